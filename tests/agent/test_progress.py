"""Whether a rank moves, as its agent judges it: a process and a clock that are made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from anygauge.agent.progress import LEAST_S, Look, Movement, look_at
from tests.agent.fakes import until

LIMIT_S = 100.0
DOING = {"event": "progress", "doing": "step 7, update"}


class Process:
    """What the kernel shows of it; the test changes it."""

    def __init__(self) -> None:
        self.seen: Look | None = Look(0.0, "S")

    def look(self, pid: int) -> Look | None:
        return self.seen


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def rank(process: Process) -> Movement:
    return Movement(1, LIMIT_S, look=process.look, now=0.0)


def pass_time(rank: Movement, begin: int, end: int) -> None:
    """Turns once a second, as an agent makes them."""
    for second in range(begin + 1, end + 1):
        rank.turn(float(second))


def test_one_that_waits_is_still_since_its_last_report(rank: Movement) -> None:
    rank.reported(DOING, 5.0)
    pass_time(rank, 0, 90)
    assert rank.still_s(90.0) == 85.0
    assert rank.describe(90.0) == "step 7, update; still for 85 s"
    rank.reported({"event": "step"}, 91.0)
    assert rank.still_s(92.0) == 1.0
    assert rank.describe(92.0) == "step 7, update"


def test_one_that_works_moves_without_a_report(rank: Movement, process: Process) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 500):
        process.seen = Look(second * 0.5, "R")  # half a processor
        rank.turn(float(second))
    assert rank.still_s(500.0) <= 20.0


def test_threads_that_only_look_around_are_no_work(rank: Movement, process: Process) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 200):
        process.seen = Look(second * 0.03, "S")
        rank.turn(float(second))
    assert rank.still_s(200.0) == 200.0


def test_one_that_never_said_what_it_is_in_is_judged_only_when_stopped(
    rank: Movement, process: Process
) -> None:
    pass_time(rank, 0, 300)
    assert rank.still_s(300.0) <= 20.0
    process.seen = Look(0.0, "T")
    pass_time(rank, 300, 600)
    assert rank.still_s(600.0) >= 290.0
    assert rank.describe(600.0) == "starting; stopped (state T in /proc)"


def test_time_in_which_the_agent_itself_was_stopped_does_not_count(rank: Movement) -> None:
    rank.reported(DOING, 0.0)
    pass_time(rank, 0, 10)
    rank.turn(10_000.0)
    assert rank.still_s(10_000.0) == 10.0
    rank.turn(10_001.0)
    assert rank.still_s(10_001.0) == 11.0


def test_time_in_which_its_reports_were_not_read_does_not_count(rank: Movement) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 200):
        rank.turn(float(second), excused=True)
    assert rank.still_s(200.0) == 1.0


def test_where_the_kernel_shows_nothing_nobody_is_judged(rank: Movement, process: Process) -> None:
    rank.reported(DOING, 0.0)
    process.seen = None
    pass_time(rank, 0, 300)
    assert rank.still_s(300.0) <= 20.0


def test_a_limit_is_never_shorter_than_reports_need() -> None:
    assert Movement(1, 0.1, now=0.0).limit_s == LEAST_S


def test_a_real_process_is_seen_to_work_and_to_be_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: (seen := look_at(process.pid)) and seen.cpu_s > 0.05, "its work")
        process.send_signal(signal.SIGSTOP)
        until(lambda: (seen := look_at(process.pid)) and seen.state == "T", "its stop")
    finally:
        process.kill()
        process.wait(timeout=60)
    assert look_at(process.pid) is None
    assert look_at(os.getpid()) is not None
