"""A short job of real ranks on this machine, in the environment that ranks of a run would have.

A module offers one by calling `main`: ``python -m MODULE --agent --job JOB`` is then the agent that
starts the ranks, and ``python -m MODULE --job JOB`` each of them. `run` starts the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Backend, Job, LaunchSettings
from anygauge.registry import Registry
from anygauge.util.events import EventWriter, read_event
from anygauge.util.files import write_text
from anygauge.util.processes import die_with_parent

COLLECTIVE_TIMEOUT_S = 60.0
_RESULT = "result.json"

RunRank = Callable[[Job, int, int, int], Mapping[str, Any]]
"""Job, rank, world size and local rank -> a result that JSON can hold."""


class LocalJobError(AnygaugeError):
    """The ranks failed; the message is one line."""


def run(
    module: str,
    name: str,
    backend: str,
    options: Mapping[str, Any],
    ranks: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Start ranks of a module on this machine; returns the result of rank 0.

    Args:
        module: calls `main`.
        name: of the job.
        options: the run file's ``backend_options``.
        ranks: how many.
        timeout_s: seconds for the whole job.

    Raises:
        LocalJobError: a rank failed, or they took longer.
    """
    with tempfile.TemporaryDirectory(prefix=f"anygauge-{name}-") as folder:
        job = Job(
            name=name,
            run_directory=folder,
            run_file="",
            backend=backend,
            launch=LaunchSettings(devices=ranks, collective_timeout_s=COLLECTIVE_TIMEOUT_S),
            rendezvous=f"file://{folder}/rendezvous",
            token=secrets.token_hex(16),
            backend_options=dict(options),
        )
        path = Path(folder) / "job.json"
        write_text(path, job.dump(), mode=0o600)
        argv = [sys.executable, "-m", module, "--agent", "--job", str(path)]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise LocalJobError(f"{ranks} ranks were not done within {timeout_s:.0f} s") from None
        result = Path(folder) / _RESULT
        if done.returncode or not result.is_file():
            raise LocalJobError(f"{ranks} ranks: {_cause(done.stdout, done.stderr)}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


@contextlib.contextmanager
def opened(job: Job, rank: int, world_size: int, local_rank: int) -> Iterator[Backend]:
    """The job's backend in one of its ranks, with an open device and process group."""
    with Registry.load().create_backend(job.backend, job.backend_options) as backend:
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=job.launch.collective_timeout_s,
            device=backend.open(local_rank),
            secret=job.token,
        )
        yield backend


def _cause(stdout: str, stderr: str) -> str:
    """The first line of the cause that the agent reported, or else the last that it printed."""
    for line in reversed(stdout.splitlines()):
        event = read_event(line.encode())
        if event is not None and event.get("cause"):
            return str(event["cause"]).splitlines()[0]
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "they ended without a report"


def main(module: str, run_rank: RunRank, argv: list[str]) -> int:
    """Be one rank or, with ``--agent``, the agent that starts all. Returns the exit status."""
    path = argv[-1]
    if argv[0] == "--agent":
        from anygauge.launch.agent import main as run_agent

        return run_agent(["--job", path], rank_argv=(sys.executable, "-m", module, "--job", path))
    die_with_parent()
    job, rank = Job.load(path), int(os.environ["RANK"])
    events = EventWriter.of_rank(rank)
    try:
        result = run_rank(job, rank, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    except Exception as error:
        events.failed(error)
        raise
    if rank == 0:
        write_text(Path(job.run_directory) / _RESULT, json.dumps(result) + "\n")
    events.send("finished")
    return 0
