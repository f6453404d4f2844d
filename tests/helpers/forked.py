"""Real runs of several ranks in seconds: each rank is a fork of a process that imported everything.

What an agent does is left out, what a rank does is not: every fork runs `worker.main` on a job
file. `runs_of` runs this module as a fork itself, because a process with threads (a test runner's)
must not fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.runs import Run
from tests.helpers.zygote import Fork, run_forks

PATIENCE_S = 120.0
Changes = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """One start of a run.

    Attributes:
        file: the run file.
        overrides: as ``--set`` takes them.
        kill_after_s: SIGKILL to all ranks so long after the first of its steps; None to let it be.
        stop_after_s: likewise SIGTERM.
    """

    file: str
    overrides: tuple[str, ...] = ()
    kill_after_s: float | None = None
    stop_after_s: float | None = None


def runs_of(
    parts: Sequence[RunPart], *, timeout_s: float = 600, within: Changes | None = None
) -> list[Run]:
    """Do all parts, one after another; a rank's exit status is that of the first that failed.

    Args:
        within: a module's function; ranks run within what it changes.
    """
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        asked, told, log = (Path(folder) / name for name in ("parts.json", "runs.json", "log"))
        asked.write_text(json.dumps([asdict(part) for part in parts]))
        named = [] if within is None else [within.__module__, within.__name__]
        fork = Fork(
            module=__name__,
            arguments=[str(asked), str(told), *named],
            log=str(log),
            environment={"ANYGAUGE_BLOCK_PLUGINS": ""},
        )
        (code,) = run_forks([fork], timeout_s=timeout_s)
        assert code == 0, f"exit status {code}\n{log.read_text()[-10_000:]}"
        results = json.loads(told.read_text())
    return [
        Run(folder=Path(r["folder"]), status=r["status"], out=r["out"], err=r["log"])
        for r in results
    ]


def finished(
    parts: Sequence[RunPart], *, timeout_s: float = 600, within: Changes | None = None
) -> list[Run]:
    """The same, and all of them must succeed."""
    runs = runs_of(parts, timeout_s=timeout_s, within=within)
    for run in runs:
        assert run.status == 0, run.err
    return runs


def main(asked: str, told: str, module: str = "", within: str = "") -> None:
    given = json.loads(Path(asked).read_text())
    parts = [RunPart(**{**part, "overrides": tuple(part["overrides"])}) for part in given]
    changes: Changes = contextlib.nullcontext
    if module:
        changes = getattr(importlib.import_module(module), within)
    with changes():
        Path(told).write_text(json.dumps([start(part) for part in parts]))


def start(part: RunPart) -> dict[str, Any]:
    """Fork the ranks of one start, and see them to their end."""
    from anygauge.launch.request import read_request
    from anygauge.launch.run_directory import lock_folder, write_run
    from anygauge.util.files import write_text

    request = read_request(Path(part.file), list(part.overrides), {}, need_device=True)
    job = request.job
    folder = Path(job.run_directory)
    with lock_folder(folder):
        write_run(Path(job.run_file), request.run)
        job_file = folder / "job.json"
        write_text(job_file, job.dump())
        metrics = folder / "metrics.jsonl"
        ranks = [
            fork_rank(rank, job.world_size, folder, job_file) for rank in range(job.world_size)
        ]
        signum = signal.SIGKILL if part.kill_after_s is not None else signal.SIGTERM
        delay = part.kill_after_s if part.kill_after_s is not None else part.stop_after_s
        if delay is not None:
            wait_for_a_step(metrics, ranks)
            time.sleep(delay)
            for pid in ranks:
                os.kill(pid, signum)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    logs = "\n".join((folder / f"rank{r}.log").read_text()[-10_000:] for r in range(job.world_size))
    events = "".join((folder / f"events{r}").read_text() for r in range(job.world_size))
    status = next((code for code in codes if code), 0)
    return {"folder": str(folder), "status": status, "out": events, "log": logs}


def fork_rank(rank: int, world: int, folder: Path, job_file: Path) -> int:
    """Start one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    events = os.open(folder / f"events{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    identity: Mapping[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "ANYGAUGE_EVENTS_FD": events,
    }
    os.environ.update({name: str(value) for name, value in identity.items()})
    sys.argv = ["worker", "--job", str(job_file)]
    try:
        from anygauge.launch.rank import main as work
        from anygauge.util.processes import end_rank

        end_rank(work())
    finally:
        os._exit(1)


def wait_for_a_step(metrics: Path, ranks: Sequence[int]) -> None:
    """Until this start has written a step of its own."""
    deadline = time.monotonic() + PATIENCE_S
    seen: int | None = None
    while time.monotonic() < deadline:
        # Resuming may first shorten the file; what it grows by afterwards is this start's.
        size = metrics.stat().st_size if metrics.exists() else 0
        if seen is not None and size > seen:
            return
        seen = size if seen is None else min(seen, size)
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks):
            return  # its end comes next
        time.sleep(0.005)
    raise TimeoutError(f"no step within {PATIENCE_S} s")


def random_delays(seed: int, count: int, longest_s: float) -> list[float]:
    """Moments for kills, the same in every run of a test."""
    source = random.Random(seed)
    return [source.uniform(0, longest_s) for _ in range(count)]


if __name__ == "__main__":
    main(*sys.argv[1:])
