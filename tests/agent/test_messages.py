"""What an admitted node sends ends its own link at the most, and never the agent that reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from anygauge.agent.__main__ import meet
from anygauge.agent.head import Head
from anygauge.agent.member import Member
from anygauge.agent.nodes import Nodes, Order
from anygauge.agent.outbox import Outbox
from anygauge.agent.verdict import Ending, Report, Verdict
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
    """The member need not wait for half a second where it was there before its head."""
    monkeypatch.setattr("anygauge.agent.member._RETRY_S", 0.02)


@contextlib.contextmanager
def met(cluster: Cluster) -> Iterator[tuple[Head, Member]]:
    """A head and a member that have met, both in this process."""
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
    head, member = found[0], found[1]
    assert isinstance(head, Head) and isinstance(member, Member)
    try:
        yield head, member
    finally:
        head.close()
        member.close()


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
        ("report", {"report": {}}, "'endings' is missing"),
        ("report", {"report": {**REPORT, HALF: 1}}, "'?' is unknown"),
        ("report", {"report": {**REPORT, "node_rank": 0}}, "it is of node 0"),
        *(
            ("report", {"report": {**REPORT, name: value}}, f"'{name}'")
            for name, value in (
                *(("node_rank", HUGE), ("node_rank", "1"), ("host", []), ("ok", 1)),
                *(("stopped", []), ("stopped", 5), ("endings", {}), ("endings", None)),
                *(("signalled_at", HUGE), ("signalled_at", NAN), ("signum", 4711)),
            )
        ),
        ("report", {"report": {**REPORT, "stopped": {"step": [[]]}}}, "'step'"),
        ("report", {"report": {**REPORT, "stopped": {"checkpoint": {}}}}, "'checkpoint'"),
        ("report", {"report": {**REPORT, "endings": [5]}}, "not a mapping"),
        *(
            ("report", {"report": {**REPORT, "endings": [{**ENDING, name: value}]}}, f"'{name}'")
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
    with met(cluster) as (head, member):
        member._link.send(kind, **fields)
        assert told(head) == [Order.END]
        head.report(Report(node_rank=0, host="host0"))
        head.turn()
        assert head.verdict is not None and head.verdict.exit_status == LOST
        cause = str(head.verdict.cause)
        assert cause.startswith("node 1 (host1) is lost: its agent sent what cannot be read here")
        assert f"('{kind}': " in cause and said in cause
        cause.encode()


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *(("beat", {"clock": clock}, "'clock'") for clock in NO_TIMES),
        *(("stop", {"signum": number}, "'signum'") for number in NO_SIGNALS),
        ("verdict", {}, "'cause' is missing"),
        ("verdict", {**VERDICT, HALF: 1}, "'?' is unknown"),
        *(
            ("verdict", {**VERDICT, name: value}, f"'{name}'")
            for name, value in (
                *(("state", "fine"), ("state", []), ("exit_status", HUGE), ("exit_status", NAN)),
                *(("cause", 5), ("final", 1), ("rendezvous", 5)),
            )
        ),
        *(
            ("verdict", {**VERDICT, "state": "again", "rendezvous": where}, "'rendezvous'")
            for where in ("", "tcp://a:1\0", f"tcp://{HALF} x", "tcp://" + "x" * 400)
        ),
    ],
)  # fmt: skip
def test_a_head_that_sends_nonsense_is_lost(
    cluster: Cluster, kind: str, fields: dict[str, Any], said: str
) -> None:
    with met(cluster) as (head, member):
        head._send_all(kind, **fields)
        assert told(member) == [Order.END]
        member.report(Report(node_rank=1, host="host1"))
        member.turn()
        assert member.verdict is not None and member.verdict.exit_status == LOST
        cause = str(member.verdict.cause)
        assert "it sent what cannot be read here" in cause and said in cause
        cause.encode()


def test_half_characters_become_marks(cluster: Cluster) -> None:
    """A path that is no text has them, and its node is as good as any."""
    ending = Ending(time=1.0, text=f"/a/{HALF} \U0001f600", final=True)
    with met(cluster) as (head, member):
        member.report(Report(node_rank=1, host="host1", endings=(ending,)))
        head.report(Report(node_rank=0, host="host0"))
        until(lambda: head.turn() or head.over, "the report")
        until(lambda: member.turn() or member.over, "the verdict")
        assert head.verdict == member.verdict
        assert head.verdict == Verdict(state="failed", exit_status=1, cause="/a/? \U0001f600")
