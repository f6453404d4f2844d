"""Starting, watching and ending a contender's processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.contender_processes import Processes, cause, last_lines, run

CODE = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
status = int(os.environ.get("STATUS", "0"))
if status:
    sys.exit(status)
time.sleep(float(os.environ.get("SLEEP", "0")))
"""


@pytest.mark.parametrize(
    ("variables", "seconds", "problem", "status"),
    [
        (({}, {}), 60, None, 0),
        (({"SLEEP": "50"}, {"STATUS": "3"}), 60, "process 1 ended with exit status 3", 3),
        (({"SLEEP": "50"}, {}), 1, "not done after 1 s (--timeout)", None),
    ],
)
def test_all_end_when_one_fails_or_time_is_up(
    variables: tuple[dict[str, str], ...],
    seconds: float,
    problem: str | None,
    status: int | None,
    tmp_path: Path,
) -> None:
    started = Processes(
        argv=[sys.executable, "-c", CODE],
        environments=[{"RANK": str(rank), **more} for rank, more in enumerate(variables)],
        logs=[tmp_path / f"rank{rank}.log" for rank in range(2)],
        bound=True,
    )
    began = time.monotonic()
    ended = run(started, seconds)
    assert (ended.problem, ended.status) == (problem, status)
    assert (tmp_path / "rank1.log").read_text() == "rank 1\n"
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(("ours", "bound"), [({6, 0, 1, 4, 5}, [[0, 1], [4, 5]]), ({3}, [])])
def test_processors_are_shared_equally_or_not_at_all(
    ours: set[int], bound: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: ours)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: found.append(processors))
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    run(Processes(argv=["true"], environments=[{}, {}], logs=logs, bound=True), 60)
    assert found == bound


def test_the_log_that_ended_first_is_shown(tmp_path: Path) -> None:
    for rank, text in enumerate(("connection lost", "ValueError: the cause")):
        path = tmp_path / f"rank{rank}.log"
        path.write_text(f"start\n{text}\n")
        os.utime(path, (100 - rank, 100 - rank))
    assert last_lines(tmp_path, 1) == ["ValueError: the cause"]
    assert last_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["error: first", "error: adapter differs", "logs: /x"], "error: adapter differs"),
        (["  File x", "torch.cuda.OutOfMemoryError: CUDA"], "torch.cuda.OutOfMemoryError: CUDA"),
        (["step 1", "no errors so far"], ""),
    ],
)
def test_the_cause_is_the_last_error_of_a_log(lines: list[str], found: str) -> None:
    assert cause(lines) == found
