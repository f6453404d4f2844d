"""What an admitted node sends ends its own link at the most, and never the agent that reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from anygauge.agent.__main__ import meet
from anygauge.agent.coordinator import Coordinator
from anygauge.agent.nodes import Nodes, Order
from anygauge.agent.outbox import Outbox
from anygauge.agent.outcome import JobFailure, JobOutcome, Report
from anygauge.agent.worker_node import WorkerNode
from anygauge.interface import LOST, Job
from tests.agent.cluster import Cluster
from tests.agent.fakes import FINISHED, PATIENCE_S, until

NAN, INF, HUGE, HALF = float("nan"), float("inf"), 10**400, "\ud800"
NO_TIMES: tuple[Any, ...] = (HUGE, NAN, INF, HALF, None, [])
NO_SIGNALS: tuple[Any, ...] = (-1, HUGE, NAN, HALF, [], True)
NO_LINES: tuple[Any, ...] = (None, 5, [[]])
NO_REPORTS: tuple[Any, ...] = (None, [], HALF, HUGE)
NEVER_LEAST: tuple[Any, ...] = (-HUGE, -INF, "x", [])
ENDING = {
    "time": 1.0, "text": "t", "rank": 1, "by_signal": False, "exit_status": 1, "final": False,
    "lost": False,
}  # fmt: skip
REPORT = Report(node_rank=1, host="host1").record()
VERDICT = {"state": "failed", "exit_status": 1, "cause": "c", "final": True, "rendezvous": ""}


@pytest.fixture(autouse=True)
def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker need not wait for half a second where it was there before its coordinator."""
    monkeypatch.setattr("anygauge.agent.worker_node._RETRY_S", 0.02)


@contextlib.contextmanager
def met(cluster: Cluster) -> Iterator[tuple[Coordinator, WorkerNode]]:
    """A head and a worker that have met, both in this process."""
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    job = Job.load(cluster.job)
    found: dict[int, Nodes] = {}

    def join(node: int) -> None:
        silent = Outbox(os.open(os.devnull, os.O_WRONLY))
        found[node] = meet(job, silent, node, f"host{node}", f"127.0.0.1:{cluster.port}", {})

    threads = [threading.Thread(target=join, args=(node,), daemon=True) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    coordinator, worker = found[0], found[1]
    assert isinstance(coordinator, Coordinator) and isinstance(worker, WorkerNode)
    try:
        yield coordinator, worker
    finally:
        coordinator.close()
        worker.close()


def told(nodes: Nodes) -> list[Order]:
    """What one is told to do, once it is."""
    orders: list[Order] = []

    def listens() -> bool:
        orders.extend(nodes.turn())
        return bool(orders)

    until(listens, "an order")
    return orders


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *(("beat", {"clock": clock}, "'clock'") for clock in NO_TIMES),
        *(("beat", {"clock": 0.0, "least": least}, "'least'") for least in NEVER_LEAST),
        *(("event", {"line": line}, "'line'") for line in NO_LINES),
        ("event", {}, "'line' is missing"),
        *(("stop", {"signum": number}, "'signum'") for number in NO_SIGNALS),
        *(("report", {"report": report}, "not a mapping") for report in NO_REPORTS),
        ("report", {}, "not a mapping"),
        ("report", {"report": {}}, "'failures' is missing"),
        ("report", {"report": {**REPORT, HALF: 1}}, "'?' is unknown"),
        ("report", {"report": {**REPORT, "node_rank": 0}}, "it is of node 0"),
        *(
            ("report", {"report": {**REPORT, name: value}}, f"'{name}'")
            for name, value in (
                *(("node_rank", HUGE), ("node_rank", "1"), ("host", []), ("ok", 1)),
                *(("stopped", []), ("stopped", 5), ("failures", {}), ("failures", None)),
                *(("signalled_at", HUGE), ("signalled_at", NAN), ("signum", 4711)),
            )
        ),
        ("report", {"report": {**REPORT, "stopped": {"step": [[]]}}}, "'step'"),
        ("report", {"report": {**REPORT, "stopped": {"checkpoint": {}}}}, "'checkpoint'"),
        ("report", {"report": {**REPORT, "failures": [5]}}, "not a mapping"),
        *(
            ("report", {"report": {**REPORT, "failures": [{**ENDING, name: value}]}}, f"'{name}'")
            for name, value in (
                *(("time", HUGE), ("time", NAN), ("time", "now"), ("rank", "1"), ("text", None)),
                *(("exit_status", -1), ("exit_status", HUGE), ("lost", "yes"), ("more", 1)),
            )
        ),
    ],
)  # fmt: skip
def test_a_member_that_sends_nonsense_is_a_lost_node(
    cluster: Cluster, kind: str, fields: dict[str, Any], said: str
) -> None:
    with met(cluster) as (coordinator, worker):
        worker._link.send(kind, **fields)
        assert told(coordinator) == [Order.END]
        coordinator.report(Report(node_rank=0, host="host0"))
        coordinator.turn()
        assert coordinator.outcome is not None and coordinator.outcome.exit_status == LOST
        cause = str(coordinator.outcome.cause)
        assert cause.startswith("node 1 (host1) is lost: its agent sent what cannot be read here")
        assert f"('{kind}': " in cause and said in cause
        cause.encode()


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *(("beat", {"clock": clock}, "'clock'") for clock in NO_TIMES),
        *(("stop", {"signum": number}, "'signum'") for number in NO_SIGNALS),
        ("outcome", {}, "'cause' is missing"),
        ("outcome", {**VERDICT, HALF: 1}, "'?' is unknown"),
        *(
            ("outcome", {**VERDICT, name: value}, f"'{name}'")
            for name, value in (
                *(("state", "fine"), ("state", []), ("exit_status", HUGE), ("exit_status", NAN)),
                *(("cause", 5), ("final", 1), ("rendezvous", 5)),
            )
        ),
        *(
            ("outcome", {**VERDICT, "state": "again", "rendezvous": where}, "'rendezvous'")
            for where in ("", "tcp://a:1\0", f"tcp://{HALF} x", "tcp://" + "x" * 400)
        ),
    ],
)  # fmt: skip
def test_a_head_that_sends_nonsense_is_lost(
    cluster: Cluster, kind: str, fields: dict[str, Any], said: str
) -> None:
    with met(cluster) as (coordinator, worker):
        coordinator._send_all(kind, **fields)
        assert told(worker) == [Order.END]
        worker.report(Report(node_rank=1, host="host1"))
        worker.turn()
        assert worker.outcome is not None and worker.outcome.exit_status == LOST
        cause = str(worker.outcome.cause)
        assert "it sent what cannot be read here" in cause and said in cause
        cause.encode()


def test_half_characters_become_marks(cluster: Cluster) -> None:
    """A path that is not a text has them, and its node is as good as any."""
    ending = JobFailure(time=1.0, text=f"/a/{HALF} \U0001f600", final=True)
    with met(cluster) as (coordinator, worker):
        worker.report(Report(node_rank=1, host="host1", failures=(ending,)))
        coordinator.report(Report(node_rank=0, host="host0"))
        until(lambda: coordinator.turn() or coordinator.over, "the report")
        until(lambda: worker.turn() or worker.over, "the outcome")
        assert coordinator.outcome == worker.outcome
        assert coordinator.outcome == JobOutcome(
            state="failed", exit_status=1, cause="/a/? \U0001f600"
        )
