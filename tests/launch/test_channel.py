"""Channels between agents: whole messages, whose fields end a channel but never an agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from anygauge.interface import LOST
from anygauge.launch.channel import Channel
from anygauge.launch.decision import Decision
from anygauge.launch.nodes import Instruction, Nodes
from anygauge.launch.outcome import JobFailure, JobOutcome, NodeReport
from tests.helpers.child_processes import until
from tests.launch.simulated import Simulation

NAN, HUGE, HALF = float("nan"), 10**400, "\ud800"
NO_SIGNALS: tuple[Any, ...] = (-1, HUGE, NAN, HALF, [], True)
FAILURE = {
    "time": 1.0, "text": "t", "rank": 1, "by_signal": False, "exit_status": 1, "final": False,
    "lost": False,
}  # fmt: skip
REPORT = NodeReport(node_rank=1, host="host1").record()
OUTCOME = {"state": "failed", "exit_status": 1, "cause": "c", "final": True, "rendezvous": ""}


def test_a_channel_keeps_what_is_not_taken_yet() -> None:
    """By the other end of its connection, and of its iterator."""
    one, two = (Channel(each, "other") for each in socket.socketpair())
    for number in range(500):
        one.send("n", number=number, text="x" * 2000)
    assert one.unsent_bytes
    found = [next(two.receive())["number"], next(two.receive())["number"]]
    while len(found) < 500:
        found += [message["number"] for message in two.receive()]
        one.flush()
    assert found == list(range(500))
    one.close("it was closed here")
    assert list(two.receive()) == [] and two.closed


@pytest.fixture
def met() -> Iterator[list[Nodes]]:
    """A coordinator and a worker that have met."""
    job = Simulation(2, 1)
    yield [agent.nodes for agent in job.agents]
    job.close()


# Who sends it, kind, fields, and what is wrong with them.
NONSENSE: list[tuple[int, str, dict[str, Any], str]] = [
    *((1, "event", {"line": line}, "'line'") for line in (None, 5, [[]])),
    (1, "event", {}, "'line' is missing"),
    *((n, "stop", {"signum": number}, "'signum'") for number in NO_SIGNALS for n in (0, 1)),
    *((1, "report", {"report": one}, "should be a dictionary") for one in (None, [], HALF, HUGE)),
    (1, "report", {}, "Input should be a dictionary"),
    (1, "report", {"report": {}}, "'node_rank' is missing"),
    (1, "report", {"report": {**REPORT, HALF: 1}}, "'?' is unknown"),
    (1, "report", {"report": {**REPORT, "node_rank": 0}}, "it is of node 0"),
    *(
        (1, "report", {"report": {**REPORT, name: value}}, f"'{name}'")
        for name, value in (
            *(("node_rank", HUGE), ("node_rank", "1"), ("host", []), ("ok", 1)),
            *(("stopped", []), ("stopped", 5), ("failures", {}), ("failures", None)),
            *(("signalled_at", HUGE), ("signalled_at", NAN), ("signum", 4711)),
        )
    ),
    (1, "report", {"report": {**REPORT, "failures": [5]}}, "'failures.0': Input"),
    *(
        (1, "report", {"report": {**REPORT, "failures": [{**FAILURE, name: value}]}}, f".{name}'")
        for name, value in (
            *(("time", HUGE), ("time", NAN), ("time", "now"), ("rank", "1"), ("text", None)),
            *(("exit_status", -1), ("exit_status", HUGE), ("lost", "yes"), ("more", 1)),
        )
    ),
    (0, "outcome", {}, "'state' is missing"),
    (0, "outcome", {**OUTCOME, HALF: 1}, "'?' is unknown"),
    *(
        (0, "outcome", {**OUTCOME, name: value}, f"'{name}'")
        for name, value in (
            *(("state", "fine"), ("state", []), ("exit_status", HUGE), ("exit_status", NAN)),
            *(("cause", 5), ("final", 1), ("rendezvous", 5)),
        )
    ),
    *(
        (0, "outcome", {**OUTCOME, "state": "again", "rendezvous": where}, "'rendezvous'")
        for where in ("", "tcp://a:1\0", f"tcp://{HALF} x", "tcp://" + "x" * 400)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sender", "kind", "fields", "said"), NONSENSE)
def test_who_sends_nonsense_is_lost(
    met: list[Nodes], sender: int, kind: str, fields: dict[str, Any], said: str
) -> None:
    reader = met[1 - sender]
    met[sender]._send_all(kind, **fields)
    found: list[Instruction] = []
    until(lambda: found.extend(reader.poll()) or found, "an instruction")
    assert found == [Instruction.END]
    reader.report(NodeReport(node_rank=1 - sender, host="host"))
    reader.poll()
    assert reader.outcome is not None and reader.outcome.exit_status == LOST
    cause = str(reader.outcome.cause)
    who = "node 1 (host1)" if sender else "the coordinator"
    assert cause.startswith(f"{who} is lost: what its agent sent cannot be read here ('{kind}': ")
    assert said in cause
    cause.encode()


def test_half_characters_become_marks(met: list[Nodes]) -> None:
    """A path that is not a text has them, and its node is as good as any."""
    ending = JobFailure(time=1.0, text=f"/a/{HALF} \U0001f600", final=True)
    coordinator, worker = met
    worker.report(NodeReport(node_rank=1, host="host1", failures=(ending,)))
    coordinator.report(NodeReport(node_rank=0, host="host0"))
    until(lambda: coordinator.poll() or coordinator.has_outcome, "the report")
    until(lambda: worker.poll() or worker.has_outcome, "the outcome")
    assert coordinator.outcome == worker.outcome
    assert coordinator.outcome == JobOutcome(state="failed", exit_status=1, cause="/a/? \U0001f600")


def test_only_channels_that_have_something_are_read_at_a_turn(
    met: list[Nodes], monkeypatch: pytest.MonkeyPatch
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


def test_what_follows_an_outcome_is_for_the_next_attempt(met: list[Nodes]) -> None:
    """Node 0 may have started again, and failed, before another node reads the outcome."""
    coordinator, worker = met
    again = {**OUTCOME, "state": "again", "rendezvous": "tcp://host0:2"}
    coordinator._send_all("outcome", **again)
    coordinator._send_all("stop", signum=15)
    until(lambda: worker.poll() or worker.has_outcome, "the outcome")
    assert worker.poll() == []
    worker.restart()
    assert (worker.rendezvous, worker.poll(), worker.signum) == (
        "tcp://host0:2", [Instruction.STOP], 15,
    )  # fmt: skip


def test_workers_send_no_events_while_the_follower_is_stopped() -> None:
    job = Simulation(2, 1)
    assert not job.agents[1].nodes.is_full
    for full in (True, False):
        job.outboxes[0].is_full = full
        job.turns(10)
        assert job.agents[1].nodes.is_full is full and not job.over
    job.close()
