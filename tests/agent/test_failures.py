"""Which failure is named, and how."""

from __future__ import annotations

import signal
from pathlib import Path

from anygauge.agent.failures import Failure, cause, from_event, from_exit, tail
from anygauge.agent.outcome import JobFailure, Report, resolve_outcome


def exit_of(rank: int, code: int, *, seen_alive: float, observed: float) -> Failure:
    return from_exit(rank, code, finished=False, seen_alive=seen_alive, observed=observed)


def report(rank: int, time: float) -> Failure:
    event = {"error": "RuntimeError", "message": "Connection closed by peer", "time": time}
    return from_event(rank, event, received=time)


def earliest(failures: list[Failure]) -> Failure:
    reported = tuple(
        JobFailure(time=f.time, rank=f.rank, by_signal=f.by_signal, text=str(index))
        for index, f in enumerate(failures)
    )
    outcome = resolve_outcome([Report(node_rank=0, host="h", failures=reported)])
    assert outcome.state == "failed" and outcome.cause is not None
    return failures[int(outcome.cause)]


def test_a_kill_noticed_after_a_peers_report_is_still_the_cause() -> None:
    killed = exit_of(1, -signal.SIGKILL, seen_alive=10.0, observed=10.3)
    assert earliest([report(0, 10.1), killed]) is killed


def test_a_kill_that_can_only_have_come_after_a_report_is_not_the_cause() -> None:
    reported = report(0, 9.9)
    killed = exit_of(1, -signal.SIGKILL, seen_alive=10.0, observed=10.3)
    assert earliest([killed, reported]) is reported


def test_an_abort_counts_from_when_it_was_noticed() -> None:
    reported = report(0, 10.1)
    aborted = exit_of(1, -signal.SIGABRT, seen_alive=10.0, observed=10.3)
    assert earliest([aborted, reported]) is reported


def test_a_death_by_signal_precedes_an_exit_seen_in_the_same_moment() -> None:
    exited = exit_of(0, 1, seen_alive=10.0, observed=10.1)
    killed = exit_of(1, -signal.SIGSEGV, seen_alive=10.0, observed=10.1)
    assert earliest([exited, killed]) is killed


def test_a_report_without_a_usable_time_or_status_gets_those_of_its_arrival() -> None:
    failure = from_event(2, {"error": "E", "message": "m", "exit_status": 999}, received=5.0)
    assert (failure.time, failure.exit_status) == (5.0, 1)


def test_the_user_reads_rank_and_host_of_their_error_in_a_larger_job(tmp_path: Path) -> None:
    failure = from_event(1, {"message": "no such file", "for_user": True}, received=0.0)
    text = cause(failure, host="h", world_size=2, log=tmp_path / "x.log", log_offset=0)
    assert text == "no such file\n(rank 1 on h)"


def test_the_tail_begins_with_this_run_and_shows_the_last_state_of_bars(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"old run\n")
    offset = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"10%\r50%\r100%\r\n\nbroken \xff byte\n")
    assert tail(log, offset) == ["100%", "broken \ufffd byte"]


def test_the_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log", 0) == []
