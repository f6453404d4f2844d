"""Which failure is named, how, and the one outcome of the reports of all nodes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anygauge.interface import LOST
from anygauge.launch.outcome import JobFailure, NodeReport, resolve_outcome
from anygauge.launch.rank_failure import exit_failure, locate_failure, reported_failure, tail


def exit_of(rank: int, code: int, last_alive: float) -> JobFailure:
    seen = {"last_alive": last_alive, "observed": last_alive + 0.3}
    return exit_failure(rank, code, finished=False, **seen)


def report(rank: int, time: float) -> JobFailure:
    event = {"error": "RuntimeError", "message": "Connection closed by peer", "time": time}
    return reported_failure(rank, event, received=20.0)


def node(time: float, *, lost: bool) -> JobFailure:
    return JobFailure(time=time, text="the node", by_signal=lost, lost=lost)


@pytest.mark.parametrize(
    ("failures", "state"),
    [
        # A kill that can only have come after a report is not the cause of it.
        ([report(0, 9.9), exit_of(1, -signal.SIGKILL, 10.0)], "failed"),
        ([exit_of(1, -signal.SIGKILL, 9.8), report(0, 9.9)], "failed"),
        # An abort comes of another's end: the moment at which it was noticed counts.
        ([report(0, 9.9), exit_of(1, -signal.SIGABRT, 9.8)], "failed"),
        # A death by signal precedes an exit that was seen in the same moment.
        ([exit_of(1, -signal.SIGSEGV, 10.0), exit_of(0, 1, 10.0)], "failed"),
        ([report(1, 9.0), report(0, 9.9)], "failed"),
        ([node(10.1, lost=True), node(10.2, lost=False)], "lost"),
        # What broke before was not caused by the loss.
        ([report(0, 10.0), node(10.1, lost=True)], "failed"),
    ],
)
def test_the_earliest_failure_is_the_cause(failures: list[JobFailure], state: str) -> None:
    first, _ = failures
    for each in (failures, failures[::-1]):
        reports = [NodeReport(node_rank=n, host="h", failures=(f,)) for n, f in enumerate(each)]
        outcome = resolve_outcome(reports)
        assert (outcome.state, outcome.cause) == (state, first.text)
        assert outcome.exit_status == (LOST if state == "lost" else 1)


def test_all_must_have_done_their_work() -> None:
    fine = [NodeReport(node_rank=rank, host=f"h{rank}", ok=True) for rank in range(3)]
    assert resolve_outcome(fine).state == "ok" and resolve_outcome(fine).exit_status == 0
    outcome = resolve_outcome([*fine[:2], NodeReport(node_rank=2, host="h2")])
    assert (outcome.state, outcome.exit_status) == ("failed", 1)
    assert outcome.cause is not None and "node 2 (h2)" in outcome.cause


def test_a_record_of_the_collectives_is_named_where_there_is_one(tmp_path: Path) -> None:
    failure = exit_of(3, -signal.SIGABRT, 1.0)
    record = tmp_path / "flight_rank_3"

    def cause() -> str:
        log = tmp_path / "rank3.log"
        return locate_failure(
            failure, host="h", world_size=4, log=log, log_offset=0, record=record
        ).text

    assert str(record) not in cause()
    record.write_bytes(b"pickled")
    assert f"what its collectives were doing: {record}" in cause()


def test_a_report_without_a_usable_time_or_status_gets_those_of_its_arrival() -> None:
    failure = reported_failure(2, {"error": "E", "message": "m", "exit_status": 999}, received=5.0)
    assert (failure.time, failure.exit_status) == (5.0, 1)


def test_the_tail_begins_with_this_run_and_shows_the_last_state_of_bars(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"old run\n")
    offset = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"10%\r50%\r100%\r\n\nbroken \xff byte\n")
    assert tail(log, offset) == ["100%", "broken \ufffd byte"]
    assert tail(tmp_path / "none.log", 0) == []
