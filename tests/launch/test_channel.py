"""Channels between agents: whole messages, whose fields end a channel but never an agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from anygauge.interface import LOST
from anygauge.launch.channel import Channel
from anygauge.launch.decision import Decision
from anygauge.launch.nodes import Instruction, Nodes, WorkerNode
from anygauge.launch.outcome import JobFailure, JobOutcome, NodeReport
from tests.helpers.processes import until
from tests.launch.simulated import Simulation

NAN, HUGE, HALF = float("nan"), 10**400, "\ud800"
NO_SIGNALS: tuple[Any, ...] = (-1, HUGE, NAN, HALF, [], True)
NO_LINES: tuple[Any, ...] = (None, 5, [[]])
NO_REPORTS: tuple[Any, ...] = (None, [], HALF, HUGE)
FAILURE = {
    "time": 1.0, "text": "t", "rank": 1, "by_signal": False, "exit_status": 1, "final": False,
    "lost": False,
}  # fmt: skip
REPORT = NodeReport(node_rank=1, host="host1").record()
OUTCOME = {"state": "failed", "exit_status": 1, "cause": "c", "final": True, "rendezvous": ""}


def test_a_channel_keeps_what_the_other_end_does_not_take_yet() -> None:
    one, two = (Channel(each, "other") for each in socket.socketpair())
    for number in range(500):
        one.send("n", number=number, text="x" * 2000)
    assert one.waiting
    found: list[int] = []
    while len(found) < 500:
        found += [message["number"] for message in two.receive()]
        one.flush()
    assert found == list(range(500))
    one.close("it was closed here")
    assert list(two.receive()) == [] and two.closed


def test_what_is_not_taken_at_once_comes_next() -> None:
    one, two = (Channel(each, "other") for each in socket.socketpair())
    for number in range(3):
        one.send("n", number=number)
    assert next(two.receive())["number"] == 0
    assert [message["number"] for message in two.receive()] == [1, 2]
    for each in (one, two):
        each.close("the end")


@pytest.fixture
def met() -> Iterator[tuple[Nodes, WorkerNode]]:
    """A coordinator and a worker that have met."""
    job = Simulation(2, 1)
    coordinator, worker = (agent.nodes for agent in job.agents)
    assert isinstance(worker, WorkerNode)
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
        *(("report", {"report": report}, "Input should be a dictionary") for report in NO_REPORTS),
        ("report", {}, "Input should be a dictionary"),
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
        ("report", {"report": {**REPORT, "failures": [5]}}, "'failures.0': Input"),
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
    met: tuple[Nodes, WorkerNode], kind: str, fields: dict[str, Any], said: str
) -> None:
    coordinator, worker = met
    worker._send_all(kind, **fields)
    assert instructions_of(coordinator) == [Instruction.END]
    coordinator.report(NodeReport(node_rank=0, host="host0"))
    coordinator.poll()
    assert coordinator.outcome is not None and coordinator.outcome.exit_status == LOST
    cause = str(coordinator.outcome.cause)
    lost = f"node 1 (host1) is lost: what its agent sent cannot be read here ('{kind}': "
    assert cause.startswith(lost) and said in cause
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
    met: tuple[Nodes, WorkerNode], kind: str, fields: dict[str, Any], said: str
) -> None:
    coordinator, worker = met
    coordinator._send_all(kind, **fields)
    assert instructions_of(worker) == [Instruction.END]
    worker.report(NodeReport(node_rank=1, host="host1"))
    worker.poll()
    assert worker.outcome is not None and worker.outcome.exit_status == LOST
    cause = str(worker.outcome.cause)
    lost = f"the coordinator is lost: what its agent sent cannot be read here ('{kind}': "
    assert cause.startswith(lost) and said in cause
    cause.encode()


def test_half_characters_become_marks(met: tuple[Nodes, WorkerNode]) -> None:
    """A path that is not a text has them, and its node is as good as any."""
    ending = JobFailure(time=1.0, text=f"/a/{HALF} \U0001f600", final=True)
    coordinator, worker = met
    worker.report(NodeReport(node_rank=1, host="host1", failures=(ending,)))
    coordinator.report(NodeReport(node_rank=0, host="host0"))
    until(lambda: coordinator.poll() or coordinator.over, "the report")
    until(lambda: worker.poll() or worker.over, "the outcome")
    assert coordinator.outcome == worker.outcome
    assert coordinator.outcome == JobOutcome(state="failed", exit_status=1, cause="/a/? \U0001f600")


def test_only_channels_that_have_something_are_read_at_a_turn(
    met: tuple[Nodes, WorkerNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's message wakes node 0: all channels each time is the square of the nodes."""
    coordinator, worker = met
    coordinator.poll()
    read: list[str] = []
    receive = Channel.receive

    def recorded(channel: Channel) -> Iterator[dict[str, Any]]:
        read.append(channel.peer)
        return receive(channel)

    monkeypatch.setattr(Channel, "receive", recorded)
    for _ in range(5):
        coordinator.poll()
    assert read == []
    worker.mark_ready(Decision())
    until(lambda: coordinator.poll() or coordinator._ready == {1}, "the message")
    assert read == ["node 1 (host1)"]
    coordinator._heartbeat_at = 0.0
    coordinator.poll()
    assert read == ["node 1 (host1)"] * 2


def test_what_follows_an_outcome_is_for_the_next_attempt(met: tuple[Nodes, WorkerNode]) -> None:
    """Node 0 may have started again, and failed, before another node reads the outcome."""
    coordinator, worker = met
    again = {**OUTCOME, "state": "again", "rendezvous": "tcp://host0:2"}
    coordinator._send_all("outcome", **again)
    coordinator._send_all("stop", signum=15)
    until(lambda: worker.poll() or worker.over, "the outcome")
    assert worker.poll() == []
    worker.restart()
    assert (worker.rendezvous, worker.poll(), worker.signum) == (
        "tcp://host0:2", [Instruction.STOP], 15,
    )  # fmt: skip
