"""A short job of real ranks on this machine, in the environment that ranks of a run would have.

A module offers one by calling `main`: ``python -m MODULE --job JOB`` is then each of the ranks that
`run` starts.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Backend, Job, LaunchSettings, Phase
from anygauge.launch.local_run import LocalRun
from anygauge.launch.supervisor import GRACE_S
from anygauge.registry import installed_plugins
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.processes import die_with_parent
from anygauge.util.run_lock import open_lock

COLLECTIVE_TIMEOUT_S = 60.0
_RESULT = "result.json"

RunRank = Callable[[Backend, int, int], Mapping[str, Any]]
"""The job's backend, with an open device and process group, rank and world size -> a result that
JSON can hold."""


class LocalJobError(AnygaugeError):
    """The ranks failed; the message is one line."""


def run(module: str, backend: str, ranks: int, timeout_s: float) -> dict[str, Any]:
    """Start ranks of a module on this machine; returns the result of rank 0.

    Args:
        module: calls `main`.
        ranks: how many.
        timeout_s: seconds for the whole job.

    Raises:
        LocalJobError: a rank failed, or they took longer.
    """
    name = module.rpartition(".")[2]
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
        )
        command = (sys.executable, "-m", module, "--job", str(Path(folder) / "job.json"))
        with os.fdopen(open_lock(Path(folder))) as lock:
            running = LocalRun(job, lock=lock.fileno(), argv_of_rank=lambda *_: command)
            try:
                running.wait(timeout_s)
                late = running.state().phase == "running"
            finally:
                running.cancel()
                running.wait()
        if late:
            raise LocalJobError(f"{ranks} ranks were not done within {timeout_s:.0f} s")
        *_, ended = running.events()
        result = Path(folder) / _RESULT
        if ended["exit_status"] or not result.is_file():
            why = str(ended.get("cause") or "they ended without a report").splitlines()[0]
            raise LocalJobError(f"{ranks} ranks: {why}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def seconds(backend: Backend, work: Callable[[], object]) -> float:
    """How long a call takes that all ranks make at once."""
    backend.placement.synchronize()
    backend.collectives.barrier()
    began = time.perf_counter()
    work()
    backend.graph.mark_step(Phase.UPDATE)
    backend.placement.synchronize()
    return time.perf_counter() - began


def main(run_rank: RunRank, argv: list[str]) -> int:
    """Be one rank. Returns the exit status."""
    die_with_parent()
    job, rank = Job.load(argv[-1]), int(os.environ["RANK"])
    events = EventWriter.of_rank(rank)
    try:
        with installed_plugins().create_backend(job.backend, job.backend_options) as backend:
            backend.collectives.open(
                rendezvous=job.rendezvous,
                rank=rank,
                world_size=job.world_size,
                timeout_s=job.launch.collective_timeout_s,
                device=backend.open(int(os.environ["LOCAL_RANK"])),
                secret=job.token,
            )
            result = run_rank(backend, rank, job.world_size)
    except Exception as error:
        events.report_failure(error)
        raise
    if rank == 0:
        write_text(Path(job.run_directory) / _RESULT, json.dumps(result) + "\n")
    events.send("finished")
    return 0
