"""The watchdog of a rank, with a process and a clock that are made up; binding to cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from anygauge.launch.rank_process import (
    SHORTEST_LIMIT_S,
    ProcessSample,
    Watchdog,
    bound_to,
    sample_process,
)
from tests.helpers.processes import until

LIMIT_S = 100.0
DOING = {"event": "progress", "doing": "step 7, update"}


class Process:
    """What the kernel shows of it; the test changes it."""

    def __init__(self) -> None:
        self.seen: ProcessSample | None = ProcessSample(0.0, "S")

    def sample(self, pid: int) -> ProcessSample | None:
        return self.seen


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def rank(process: Process) -> Watchdog:
    return Watchdog(1, LIMIT_S, sample=process.sample, now=0.0)


def pass_time(rank: Watchdog, begin: int, end: int) -> None:
    """Turns once a second, as an agent makes them."""
    for second in range(begin + 1, end + 1):
        rank.poll(float(second))


def test_one_that_waits_is_still_since_its_last_report(rank: Watchdog) -> None:
    rank.reported(DOING, 5.0)
    pass_time(rank, 0, 90)
    assert rank.idle_s(90.0) == 85.0
    assert rank.describe(90.0) == "step 7, update; idle for 85 s"
    rank.reported({"event": "step"}, 91.0)
    assert rank.idle_s(92.0) == 1.0
    assert rank.describe(92.0) == "step 7, update"


def test_one_that_works_moves_without_a_report(rank: Watchdog, process: Process) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 500):
        process.seen = ProcessSample(second * 0.5, "R")  # half a processor
        rank.poll(float(second))
    assert rank.idle_s(500.0) <= 20.0


def test_threads_that_only_poll_are_not_work(rank: Watchdog, process: Process) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 200):
        process.seen = ProcessSample(second * 0.03, "S")
        rank.poll(float(second))
    assert rank.idle_s(200.0) == 200.0


def test_one_that_never_said_what_it_is_in_is_judged_only_when_stopped(
    rank: Watchdog, process: Process
) -> None:
    pass_time(rank, 0, 300)
    assert rank.idle_s(300.0) <= 20.0
    process.seen = ProcessSample(0.0, "T")
    pass_time(rank, 300, 600)
    assert rank.idle_s(600.0) >= 290.0
    assert rank.describe(600.0) == "starting; stopped (state T in /proc)"


def test_time_in_which_the_agent_itself_was_stopped_does_not_count(rank: Watchdog) -> None:
    rank.reported(DOING, 0.0)
    pass_time(rank, 0, 10)
    rank.poll(10_000.0)
    assert rank.idle_s(10_000.0) == 10.0
    rank.poll(10_001.0)
    assert rank.idle_s(10_001.0) == 11.0


def test_time_in_which_its_reports_were_not_read_does_not_count(rank: Watchdog) -> None:
    rank.reported(DOING, 0.0)
    for second in range(1, 200):
        rank.poll(float(second), excused=True)
    assert rank.idle_s(200.0) == 1.0


def test_where_the_kernel_shows_nothing_nobody_is_judged(rank: Watchdog, process: Process) -> None:
    rank.reported(DOING, 0.0)
    process.seen = None
    pass_time(rank, 0, 300)
    assert rank.idle_s(300.0) <= 20.0


def test_a_limit_is_never_shorter_than_reports_need() -> None:
    assert Watchdog(1, 0.1, now=0.0).limit_s == SHORTEST_LIMIT_S


def test_a_real_process_is_seen_to_work_and_to_be_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: (seen := sample_process(process.pid)) and seen.cpu_s > 0.05, "its work")
        process.send_signal(signal.SIGSTOP)
        until(lambda: (seen := sample_process(process.pid)) and seen.state == "T", "its stop")
    finally:
        process.kill()
        process.wait(timeout=60)
    assert sample_process(process.pid) is None
    assert sample_process(os.getpid()) is not None


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="binding shows only with two cores or more",
)
def test_what_is_started_is_bound_and_its_starter_is_not() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    show = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
    with bound_to((core,)):
        child = subprocess.Popen([sys.executable, "-c", show], stdout=subprocess.PIPE, text=True)
    assert os.sched_getaffinity(0) == before
    out, _ = child.communicate(timeout=60)
    assert json.loads(out) == [core]
