"""Links between agents: authenticated lines, and fields that end a link but never the agent."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anygauge.interface import LOST
from anygauge.launch.coordinator import Coordinator
from anygauge.launch.link import UNPROVEN, CoordinatorHandshake, Link, WorkerHandshake, key_of
from anygauge.launch.nodes import Instruction, Nodes, WorkerNode
from anygauge.launch.outcome import JobFailure, JobOutcome, NodeReport
from tests.helpers.processes import until
from tests.launch.simulated import Simulation

TOKEN = "of this job"

NAN, INF, HUGE, HALF = float("nan"), float("inf"), 10**400, "\ud800"
NO_SIGNALS: tuple[Any, ...] = (-1, HUGE, NAN, HALF, [], True)
NO_LINES: tuple[Any, ...] = (None, 5, [[]])
NO_REPORTS: tuple[Any, ...] = (None, [], HALF, HUGE)
FAILURE = {
    "time": 1.0, "text": "t", "rank": 1, "by_signal": False, "exit_status": 1, "final": False,
    "lost": False,
}  # fmt: skip
REPORT = NodeReport(node_rank=1, host="host1").record()
OUTCOME = {"state": "failed", "exit_status": 1, "cause": "c", "final": True, "rendezvous": ""}


def pair() -> tuple[Link, Link, socket.socket, socket.socket]:
    """Two sealed links with somebody between them, who holds the inner ends."""
    (left, inner_left), (inner_right, right) = socket.socketpair(), socket.socketpair()
    one, two = Link(left, "two"), Link(right, "one")
    key = key_of(TOKEN, "a", "b")
    one.seal(key, "coordinator", "worker")
    two.seal(key, "worker", "coordinator")
    return one, two, inner_left, inner_right


@pytest.mark.parametrize("number", ["\ud800" * 32, "x" * 32, "", None, 10**400])
def test_a_coordinator_that_sends_no_number_is_not_trusted(number: Any) -> None:
    inside, outside = socket.socketpair()
    with outside:
        handshake = WorkerHandshake(Link(inside, "the coordinator"), TOKEN, {})
        outside.sendall(json.dumps({"kind": "number", "number": number}).encode() + b"\n")
        assert handshake.advance() is None
        assert handshake.link.why == UNPROVEN


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace(b"1}", b"2}"), *lines[1:]],
        lambda lines: [lines[0], lines[0]],
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0]],
        lambda lines: [lines[0][64:]],
        lambda lines: [b"\n"],
    ],
    ids=["altered", "repeated", "left out", "in another order", "without proof", "empty"],
)
def test_a_sealed_link_takes_its_lines_once_and_in_order(
    change: Callable[[list[bytes]], list[bytes]],
) -> None:
    one, two, left, right = pair()
    for number in (1, 2):
        one.send("n", number=number)
    lines = left.recv(65536).splitlines(keepends=True)
    changed = change(lines)
    right.sendall(b"".join(changed))
    taken = [message["number"] for message in two.receive()]
    assert two.closed and two.why == UNPROVEN
    assert taken == ([1] if changed[0] == lines[0] else [])
    # What one says is not a word of the other either.
    left.sendall(lines[0])
    assert one.receive() == [] and one.why == UNPROVEN


def test_both_ends_of_a_link_must_know_the_secret() -> None:
    for token, joined in (("one", True), ("two", False)):
        left, right = socket.socketpair()
        coordinator = CoordinatorHandshake(Link(left, "stranger"), "one", 0.0)
        handshake = WorkerHandshake(Link(right, "the coordinator"), token, {})
        assert coordinator.advance() is None
        for _ in range(2):
            assert handshake.advance() is None
        message = coordinator.advance()
        assert (message is not None, handshake.joined) == (joined, joined)
        if not joined:
            assert handshake.link.why == UNPROVEN


def test_a_link_keeps_what_the_other_end_does_not_take_yet() -> None:
    one, two = (Link(each, "other") for each in socket.socketpair())
    for number in range(500):
        one.send("n", number=number, text="x" * 2000)
    assert one.waiting
    found: list[int] = []
    while len(found) < 500:
        found += [message["number"] for message in two.receive()]
        one.flush()
    assert found == list(range(500))
    one.shut()
    assert two.receive() == [] and two.closed


@pytest.fixture
def met() -> Iterator[tuple[Coordinator, WorkerNode]]:
    """A coordinator and a worker that have met."""
    job = Simulation(2, 1)
    coordinator, worker = (agent.nodes for agent in job.agents)
    assert isinstance(coordinator, Coordinator) and isinstance(worker, WorkerNode)
    yield coordinator, worker
    job.close()


def instructions_of(nodes: Nodes) -> list[Instruction]:
    """What one is instructed to do, once it is."""
    found: list[Instruction] = []

    def listens() -> bool:
        found.extend(nodes.poll())
        return bool(found)

    until(listens, "an instruction")
    return found


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *(("event", {"line": line}, "'line'") for line in NO_LINES),
        ("event", {}, "'line' is missing"),
        *(("stop", {"signum": number}, "'signum'") for number in NO_SIGNALS),
        *(("report", {"report": report}, "not a mapping") for report in NO_REPORTS),
        ("report", {}, "not a mapping"),
        ("report", {"report": {}}, "'node_rank' is missing"),
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
        ("report", {"report": {**REPORT, "stopped": {"step": [[]]}}}, "'stopped.step'"),
        ("report", {"report": {**REPORT, "stopped": {"checkpoint": {}}}}, "stopped.check"),
        ("report", {"report": {**REPORT, "failures": [5]}}, "'failures.0' has"),
        *(
            ("report", {"report": {**REPORT, "failures": [{**FAILURE, name: value}]}}, f".{name}'")
            for name, value in (
                *(("time", HUGE), ("time", NAN), ("time", "now"), ("rank", "1"), ("text", None)),
                *(("exit_status", -1), ("exit_status", HUGE), ("lost", "yes"), ("more", 1)),
            )
        ),
    ],
)  # fmt: skip
def test_a_worker_that_sends_nonsense_is_a_lost_node(
    met: tuple[Coordinator, WorkerNode], kind: str, fields: dict[str, Any], said: str
) -> None:
    coordinator, worker = met
    worker._link.send(kind, **fields)
    assert instructions_of(coordinator) == [Instruction.END]
    coordinator.report(NodeReport(node_rank=0, host="host0"))
    coordinator.poll()
    assert coordinator.outcome is not None and coordinator.outcome.exit_status == LOST
    cause = str(coordinator.outcome.cause)
    lost = "node 1 (host1) is lost: the coordinator cannot read what its agent sent ("
    assert cause.startswith(lost)
    assert f"('{kind}': " in cause and said in cause
    cause.encode()


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        *(("stop", {"signum": number}, "'signum'") for number in NO_SIGNALS),
        ("outcome", {}, "'state' is missing"),
        ("outcome", {**OUTCOME, HALF: 1}, "'?' is unknown"),
        *(
            ("outcome", {**OUTCOME, name: value}, f"'{name}'")
            for name, value in (
                *(("state", "fine"), ("state", []), ("exit_status", HUGE), ("exit_status", NAN)),
                *(("cause", 5), ("final", 1), ("rendezvous", 5)),
            )
        ),
        *(
            ("outcome", {**OUTCOME, "state": "again", "rendezvous": where}, "'rendezvous'")
            for where in ("", "tcp://a:1\0", f"tcp://{HALF} x", "tcp://" + "x" * 400)
        ),
    ],
)  # fmt: skip
def test_a_coordinator_that_sends_nonsense_is_lost(
    met: tuple[Coordinator, WorkerNode], kind: str, fields: dict[str, Any], said: str
) -> None:
    coordinator, worker = met
    coordinator._send_all(kind, **fields)
    assert instructions_of(worker) == [Instruction.END]
    worker.report(NodeReport(node_rank=1, host="host1"))
    worker.poll()
    assert worker.outcome is not None and worker.outcome.exit_status == LOST
    cause = str(worker.outcome.cause)
    assert "it sent what cannot be read here" in cause and said in cause
    cause.encode()


def test_half_characters_become_marks(met: tuple[Coordinator, WorkerNode]) -> None:
    """A path that is not a text has them, and its node is as good as any."""
    ending = JobFailure(time=1.0, text=f"/a/{HALF} \U0001f600", final=True)
    coordinator, worker = met
    worker.report(NodeReport(node_rank=1, host="host1", failures=(ending,)))
    coordinator.report(NodeReport(node_rank=0, host="host0"))
    until(lambda: coordinator.poll() or coordinator.over, "the report")
    until(lambda: worker.poll() or worker.over, "the outcome")
    assert coordinator.outcome == worker.outcome
    assert coordinator.outcome == JobOutcome(state="failed", exit_status=1, cause="/a/? \U0001f600")


def test_only_links_that_have_something_are_read_at_a_turn(
    met: tuple[Coordinator, WorkerNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's message wakes the coordinator: all links each time is the square of the nodes."""
    coordinator, worker = met
    coordinator.poll()
    read: list[str] = []
    receive = Link.receive

    def recorded(link: Link) -> list[dict[str, Any]]:
        read.append(link.peer)
        return receive(link)

    monkeypatch.setattr(Link, "receive", recorded)
    for _ in range(5):
        coordinator.poll()
    assert read == []
    worker._link.send("ready")
    until(lambda: coordinator.poll() or coordinator._ready == {1}, "the message")
    assert read == ["node 1 (host1)"]
    coordinator._heartbeat_at = 0.0
    coordinator.poll()
    assert read == ["node 1 (host1)"] * 2
