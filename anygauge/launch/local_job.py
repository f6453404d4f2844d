"""A short job of real ranks on this machine, in the environment that ranks of a run would have.

A module offers one by calling `main`: ``python -m MODULE --job JOB`` is then each of the ranks that
`run` starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Backend, Job, LaunchSettings
from anygauge.launch.local_run import LocalRun
from anygauge.launch.supervisor import GRACE_S
from anygauge.registry import installed_plugins
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.processes import die_with_parent
from anygauge.util.run_lock import open_lock

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
            run_file=f"{folder}/run.json",
            backend=backend,
            launch=LaunchSettings(devices=ranks, collective_timeout_s=COLLECTIVE_TIMEOUT_S),
            rendezvous=f"file://{folder}/rendezvous",
            stop_grace_s=GRACE_S,
            token=secrets.token_hex(16),
            backend_options=dict(options),
        )
        command = (sys.executable, "-m", module, "--job", str(Path(folder) / "job.json"))
        lock = open_lock(Path(folder))
        try:
            running = LocalRun(job, lock=lock, argv_of_rank=lambda *_: command)
            ended = _ending(running, timeout_s)
        finally:
            os.close(lock)
        if ended is None:
            raise LocalJobError(f"{ranks} ranks were not done within {timeout_s:.0f} s")
        result = Path(folder) / _RESULT
        if ended["exit_status"] or not result.is_file():
            why = str(ended.get("cause") or "they ended without a report").splitlines()[0]
            raise LocalJobError(f"{ranks} ranks: {why}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def _ending(running: LocalRun, timeout_s: float) -> Mapping[str, Any] | None:
    """How it ended; None where it was ended because it took too long."""
    late = threading.Event()

    def end() -> None:
        late.set()
        running.cancel()

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        *_, ended = running.events()
    except BaseException:
        running.cancel()
        raise
    finally:
        timer.cancel()
        running.wait()
    return None if late.is_set() else ended


@contextlib.contextmanager
def opened(job: Job, rank: int, world_size: int, local_rank: int) -> Iterator[Backend]:
    """The job's backend in one of its ranks, with an open device and process group."""
    with installed_plugins().create_backend(job.backend, job.backend_options) as backend:
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=job.launch.collective_timeout_s,
            device=backend.open(local_rank),
            secret=job.token,
        )
        yield backend


def main(run_rank: RunRank, argv: list[str]) -> int:
    """Be one rank. Returns the exit status."""
    die_with_parent()
    job, rank = Job.load(argv[-1]), int(os.environ["RANK"])
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
