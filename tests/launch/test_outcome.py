"""Which failure is named, how, and the one outcome of the reports of all nodes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

from anygauge.interface import LOST
from anygauge.launch.outcome import (
    REPORT,
    JobFailure,
    NodeReport,
    read_record,
    resolve_outcome,
)
from anygauge.launch.rank_failure import exit_failure, located, reported_failure, tail

FINE = [NodeReport(node_rank=rank, host=f"h{rank}", ok=True) for rank in range(3)]


def exit_of(rank: int, code: int, *, last_alive: float, observed: float) -> JobFailure:
    return exit_failure(rank, code, finished=False, last_alive=last_alive, observed=observed)


def report(rank: int, time: float) -> JobFailure:
    event = {"error": "RuntimeError", "message": "Connection closed by peer", "time": time}
    return reported_failure(rank, event, received=time)


def earliest(failures: list[JobFailure]) -> JobFailure:
    outcome = resolve_outcome([NodeReport(node_rank=0, host="h", failures=tuple(failures))])
    assert outcome.state == "failed"
    (found,) = (failure for failure in failures if failure.text == outcome.cause)
    return found


def test_a_record_of_the_collectives_is_named_where_there_is_one(tmp_path: Path) -> None:
    failure = exit_of(3, -signal.SIGABRT, last_alive=1.0, observed=1.0)
    record = tmp_path / "flight_rank_3"

    def cause() -> str:
        log = tmp_path / "rank3.log"
        return located(failure, host="h", world_size=4, log=log, log_offset=0, record=record).text

    assert str(record) not in cause()
    record.write_bytes(b"pickled")
    assert f"what its collectives were doing: {record}" in cause()


def test_a_kill_that_can_only_have_come_after_a_report_is_not_the_cause() -> None:
    reported = report(0, 9.9)
    killed = exit_of(1, -signal.SIGKILL, last_alive=10.0, observed=10.3)
    assert earliest([killed, reported]) is reported


def test_a_death_by_signal_precedes_an_exit_seen_in_the_same_moment() -> None:
    exited = exit_of(0, 1, last_alive=10.0, observed=10.1)
    killed = exit_of(1, -signal.SIGSEGV, last_alive=10.0, observed=10.1)
    assert earliest([exited, killed]) is killed


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


def failed(node: int, time: float, **fields: object) -> NodeReport:
    ending = JobFailure(time=time, text=f"node {node} at {time}", **fields)  # type: ignore[arg-type]
    return NodeReport(node_rank=node, host=f"h{node}", failures=(ending,))


def test_all_must_have_done_their_work() -> None:
    assert resolve_outcome(FINE).state == "ok" and resolve_outcome(FINE).exit_status == 0
    outcome = resolve_outcome([*FINE[:2], NodeReport(node_rank=2, host="h2")])
    assert (outcome.state, outcome.exit_status) == ("failed", 1)
    assert outcome.cause is not None and "node 2 (h2)" in outcome.cause


def test_a_lost_node_is_a_state_of_its_own() -> None:
    outcome = resolve_outcome([failed(0, 10.2), failed(1, 10.1, lost=True, by_signal=True)])
    assert (outcome.state, outcome.exit_status, outcome.final) == ("lost", LOST, True)
    # What broke before was not caused by the loss.
    assert resolve_outcome([failed(0, 10.0), failed(1, 10.1, lost=True)]).state == "failed"


def test_a_report_arrives_as_it_was_sent() -> None:
    sent = replace(failed(1, 100.0, rank=3), signalled_at=101.0, signum=15)
    assert read_record(REPORT, json.loads(json.dumps(sent.record()))) == sent
