"""One verdict over the reports of all nodes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

from anygauge.agent.outcome import JobFailure, Report, parse_report, resolve_outcome
from anygauge.interface import LOST, STOPPED

FINE = [Report(node_rank=rank, host=f"h{rank}", ok=True) for rank in range(3)]


def failed(node: int, time: float, **fields: object) -> Report:
    ending = JobFailure(time=time, text=f"node {node} at {time}", **fields)  # type: ignore[arg-type]
    return Report(node_rank=node, host=f"h{node}", failures=(ending,))


def test_all_must_have_done_their_work() -> None:
    assert resolve_outcome(FINE).state == "ok" and resolve_outcome(FINE).exit_status == 0
    outcome = resolve_outcome([*FINE[:2], Report(node_rank=2, host="h2")])
    assert (outcome.state, outcome.exit_status) == ("failed", 1)
    assert outcome.cause is not None and "node 2 (h2)" in outcome.cause


def test_the_earliest_is_the_cause_whichever_node_it_is_on() -> None:
    outcome = resolve_outcome(
        [failed(0, 10.2), failed(1, 10.1, exit_status=2, final=True), FINE[2]]
    )
    assert (outcome.cause, outcome.exit_status, outcome.final) == ("node 1 at 10.1", 2, True)


def test_a_lost_node_is_a_state_of_its_own() -> None:
    outcome = resolve_outcome([failed(0, 10.2), failed(1, 10.1, lost=True, by_signal=True)])
    assert (outcome.state, outcome.exit_status, outcome.final) == ("lost", LOST, True)
    # What broke before was not caused by the loss.
    assert resolve_outcome([failed(0, 10.0), failed(1, 10.1, lost=True)]).state == "failed"


def test_a_request_is_the_cause_of_what_comes_after_it() -> None:
    asked = Report(node_rank=1, host="h1", signalled_at=10.0, signum=signal.SIGINT)
    outcome = resolve_outcome([failed(0, 10.1), asked])
    assert (outcome.state, outcome.exit_status) == ("cancelled", 130)
    assert outcome.cause == "ended by SIGINT"
    assert resolve_outcome([failed(0, 9.9), asked]).state == "failed"


def test_a_job_has_stopped_if_all_nodes_have() -> None:
    event = {"event": "stopped", "step": 7, "checkpoint": "/c/7"}
    reports = [
        Report(node_rank=0, host="h0", stopped=event, signalled_at=1.0, signum=15),
        Report(node_rank=1, host="h1", stopped={"event": "stopped"}, signalled_at=1.1, signum=15),
    ]
    outcome = resolve_outcome(reports)
    assert (outcome.state, outcome.exit_status) == ("stopped", STOPPED)
    assert outcome.cause == "stopped at request after step 7; checkpoint: /c/7"
    assert resolve_outcome([reports[0], replace(reports[1], stopped=None)]).state == "cancelled"


def test_a_report_arrives_with_the_times_of_the_head() -> None:
    sent = replace(failed(1, 100.0, rank=3), signalled_at=101.0, signum=15)
    found = parse_report(json.loads(json.dumps(sent.record())), least=-40.5, most=-39.5)
    assert found.failures[0].time == 60.0 and found.signalled_at == 61.0
    assert replace(found, failures=sent.failures, signalled_at=101.0) == sent


def test_how_well_clocks_are_known_decides_for_the_death_by_signal() -> None:
    # A second between the bounds: the peer's report, half a second earlier, may follow from it.
    died = failed(1, 100.0, by_signal=True)
    found = parse_report(died.record(), least=-1.0, most=0.0)
    assert resolve_outcome([failed(0, 99.2), found]).cause == "node 1 at 100.0"
    reported = parse_report(failed(1, 100.0).record(), least=-1.0, most=0.0)
    assert resolve_outcome([failed(0, 99.2), reported]).cause == "node 0 at 99.2"
