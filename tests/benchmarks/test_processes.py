"""Starting, watching and ending a contender's processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.processes import Processes, identities, last_lines, run, shares
from tests.benchmarks.test_measure import plan

CODE = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
status = int(os.environ.get("STATUS", "0"))
if status:
    sys.exit(status)
time.sleep(float(os.environ.get("SLEEP", "0")))
"""


def two(folder: Path, *variables: dict[str, str]) -> Processes:
    return Processes(
        argv=[sys.executable, "-c", CODE],
        environments=[
            {**identity, **more}
            for identity, more in zip(identities(plan(folder)), variables, strict=True)
        ],
        logs=[folder / f"rank{rank}.log" for rank in range(2)],
        bound=True,
    )


def test_all_succeed(tmp_path: Path) -> None:
    ended = run(two(tmp_path, {}, {}), 60)
    assert ended.problem is None
    assert (tmp_path / "rank1.log").read_text() == "rank 1\n"


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run(two(tmp_path, {"SLEEP": "50"}, {"STATUS": "3"}), 60)
    assert ended.problem == "process 1 ended with status 3"
    assert time.monotonic() - began < 40


def test_time_is_limited(tmp_path: Path) -> None:
    ended = run(two(tmp_path, {"SLEEP": "50"}, {}), 1)
    assert ended.problem is not None
    assert "not done after 1 s" in ended.problem


def test_ranks_meet_at_one_port() -> None:
    first, second = identities(plan(Path()))
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")


def test_processors_are_shared_equally_or_not_at_all() -> None:
    assert shares([0, 1, 4, 5, 6], 2) == [[0, 1], [4, 5]]
    assert shares([3], 2) is None


def test_the_log_that_ended_first_is_shown(tmp_path: Path) -> None:
    import os

    for rank, text in enumerate(("connection lost", "ValueError: the cause")):
        path = tmp_path / f"rank{rank}.log"
        path.write_text(f"start\n{text}\n")
        os.utime(path, (100 - rank, 100 - rank))
    assert last_lines(tmp_path, 1) == ["ValueError: the cause"]
    assert last_lines(tmp_path / "none") == []
