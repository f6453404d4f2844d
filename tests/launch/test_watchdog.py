"""The watchdog of a rank, by samples and a clock that are made up; binding to cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from anygauge.launch.rank_start import bound_to
from anygauge.launch.watchdog import SHORTEST_LIMIT_S, ProcessSample, Watchdog, sample_process
from tests.helpers.child_processes import until

DOING = {"event": "progress", "doing": "step 7, update"}
WAITS = ProcessSample(0.0, "S")
STOPPED = ProcessSample(0.0, "T")


def watched(
    seconds: int,
    sample: Callable[[int], ProcessSample | None],
    *reports: dict[str, str],
    excused: bool = False,
) -> Watchdog:
    """One of a rank that reports at the start, and is looked at once a second."""
    one = Watchdog(100.0, 0.0)
    for event in reports:
        one.take_event(event)
    for second in range(1, seconds + 1):
        one.poll(float(second), sample(second), excused=excused)
    return one


@pytest.mark.parametrize(
    ("reports", "sample", "excused", "idle_s", "said"),
    [
        ([DOING], lambda second: WAITS, False, 85, "step 7, update; idle for 85 s"),
        ([DOING], lambda second: STOPPED, False, 85, "step 7, update; stopped (state T in /proc)"),
        ([], lambda second: STOPPED, False, 85, "starting; stopped (state T in /proc)"),
        # One that never reported what it does is judged only when it is stopped.
        ([], lambda second: WAITS, False, 10, "starting"),
        ([{"event": "finished"}], lambda second: WAITS, False, 85, "ending; idle for 85 s"),
        # Threads that only poll are not work, half a processor is.
        ([DOING], lambda second: ProcessSample(second * 0.03, "S"), False, 85, "step 7, update; "),
        ([DOING], lambda second: ProcessSample(second * 0.5, "R"), False, 10, "step 7, update"),
        # Nobody is judged whose reports are not read, or of whom the kernel shows nothing.
        ([DOING], lambda second: WAITS, True, 0, "step 7, update"),
        ([DOING], lambda second: None, False, 0, "step 7, update"),
    ],
)
def test_how_long_a_rank_has_been_idle(
    reports: list[dict[str, str]],
    sample: Callable[[int], ProcessSample | None],
    excused: bool,
    idle_s: float,
    said: str,
) -> None:
    one = watched(85, sample, *reports, excused=excused)
    assert one.idle_s == pytest.approx(idle_s, abs=0 if idle_s != 10 else 10)
    assert one.describe().startswith(said) and one.is_suspicious is (";" in said)


def test_a_report_ends_the_silence_and_no_silence_of_the_supervisor_counts() -> None:
    one = watched(90, lambda second: WAITS, DOING)
    one.take_event({"event": "step"})
    one.poll(91.0, WAITS)
    assert (one.idle_s, one.describe()) == (1.0, "step 7, update")
    one.poll(10_000.0, WAITS)  # the supervisor itself was stopped meanwhile
    assert one.idle_s == 1.0
    one.poll(10_001.0, WAITS)
    assert one.idle_s == 2.0


def test_a_limit_is_never_shorter_than_reports_need() -> None:
    assert Watchdog(0.1, 0.0).limit_s == SHORTEST_LIMIT_S


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
