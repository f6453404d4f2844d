"""The nodes of a job as one agent sees them: what they are, and what they tell it to do.

The agents meet before any rank starts, and end together. The agent of node 0 is the coordinator;
the others (workers) connect to it and to nobody else. It passes on to all nodes what happens on one
(a rank fails, a signal arrives). A node that sends no heartbeats is lost, whatever cut it off.

`Nodes` itself serves a job of one node; `Coordinator` and `WorkerNode` build on it. A `Supervisor`
takes instructions from it at each turn of its loop, and gives it a report at the end.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge.agent.link import FieldCheck, fields_of, is_count, is_text
from anygauge.agent.outcome import JobOutcome, NodeReport, resolve_outcome
from anygauge.interface import AnygaugeError, Job

HEARTBEAT_S = 1.0
OUTBOX_CAPACITY = 100_000
"""Lines kept for a follower that does not read; when it is full, no events are read from ranks."""
CANCELLED_EARLY = "asked to end before all nodes had met; no rank was started"


class CancelledError(AnygaugeError):
    """The agent was asked to end before all nodes had met."""

    exit_status = 128 + signal.SIGTERM


class Instruction(enum.Enum):
    """What another node tells this one's supervisor to do. The values are kinds of messages."""

    END = "end"
    """End the ranks: a rank or a node has failed."""
    STOP = "stop"
    """Let the ranks write a checkpoint and end: the job was asked to."""
    KILL = "kill"
    """Kill the ranks: the job was asked twice."""
    FINISH = "finish"
    """Expect the ranks to finish soon: a rank of another node has finished, or saves."""


INSTRUCTIONS = {each.value for each in Instruction}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """How an agent describes its node when it joins.

    Attributes:
        fabric: network between machines that it would use; empty: its library chooses.
        settings: digest of each variable that must be the same on every node.
    """

    node_rank: int
    host: str
    nodes: int
    devices_per_node: int
    version: str
    fabric: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def _is_settings(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


_HELLO: Mapping[str, FieldCheck] = {
    "node_rank": is_count, "host": is_text, "nodes": is_count, "devices_per_node": is_count,
    "version": is_text, "fabric": is_text, "settings": _is_settings,
}  # fmt: skip


def read_hello(record: object) -> Hello:
    """The description that another node sent, every field checked.

    Raises:
        ValueError: a field is missing, unknown, or has an impossible value; names it.
    """
    return Hello(**fields_of(record, _HELLO))


def check_hello(own: Hello, other: Hello, known: Mapping[int, str]) -> None:
    """Refuse a node that does not belong to this job.

    Args:
        own: of the coordinator.
        known: node rank -> host, of the nodes that have joined.

    Raises:
        AnygaugeError: its number is taken, or it was started for another job or version.
    """
    who = f"node {other.node_rank} ({other.host})"
    if other.node_rank in known:
        raise AnygaugeError(
            f"two agents report that they are node {other.node_rank}: {known[other.node_rank]} and "
            f"{other.host}. Give each machine a number of its own, from 0 to {own.nodes - 1}"
        )
    if not 0 <= other.node_rank < own.nodes:
        raise AnygaugeError(f"{who}: the job has nodes 0 to {own.nodes - 1}")
    for name, mine, theirs in (
        ("launch.nodes", own.nodes, other.nodes),
        ("launch.devices", own.devices_per_node, other.devices_per_node),
        ("the version of anygauge", own.version, other.version),
    ):
        if mine != theirs:
            raise AnygaugeError(
                f"{name} is {theirs} on {who}, but {mine} on the coordinator ({own.host}); all "
                "nodes must have the same"
            )
    names = sorted({*own.settings, *other.settings})
    differ = [name for name in names if own.settings.get(name) != other.settings.get(name)]
    if own.fabric != other.fabric:
        raise AnygaugeError(
            f"launch.fabric: between machines, {who} would use "
            f"{other.fabric or 'what its library finds'}, but the coordinator ({own.host}) would "
            f"use {own.fabric or 'what its library finds'}. Set launch.fabric to a network that "
            "all nodes have"
        )
    if differ:
        raise AnygaugeError(
            f"{', '.join(differ)}: the value on {who} differs from that on the coordinator "
            f"({own.host}), but all nodes must have the same. Set it under environment in the run "
            "file, which takes precedence on every node"
        )


class Outbox:
    """Writes whole lines for whoever follows the job, and never blocks the agent.

    A follower that is stopped (Ctrl-Z) leaves the pipe full. The agent must still notice signals
    and dead ranks then, so a thread does the writing.

    Attributes:
        shared: the agents of other nodes write to the same file.
        last: fields of the event that reported the job's end.
    """

    def __init__(self, descriptor: int, *, shared: bool = False) -> None:
        self.shared = shared
        self.last: dict[str, Any] = {}
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="outbox", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether the follower is so far behind that no events should be read from ranks."""
        return self._lines.qsize() >= OUTBOX_CAPACITY

    def forward(self, line: bytes) -> None:
        """Add a rank's line as it is; it ends in a newline."""
        self._lines.put(line)

    def send(self, event: str, **fields: Any) -> None:
        """Add an event of the agent's own."""
        record = {"event": event, "time": time.time(), **fields}
        if event == "ended":
            self.last = fields
        self._lines.put((json.dumps(record) + "\n").encode())

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the follower read what is left, for at most `timeout_s`."""
        self._lines.put(None)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        gone = False
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            while rest and not gone:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except OSError:  # nobody reads any more; the run's files have everything
                    gone = True


class Nodes:
    """The only node of its job; `Coordinator` and `WorkerNode` build on it.

    Attributes:
        rendezvous: where the ranks meet.
        signum: the signal that came with `Instruction.STOP`.
        outcome: how the attempt ended, once it has.
        restarts: attempts that failed and were followed by another.
        all_ready: each node has what its ranks need.
    """

    def __init__(self, job: Job, outbox: Outbox) -> None:
        self.rendezvous = job.rendezvous
        self.outcome: JobOutcome | None = None
        self.signum: int | None = None
        self.restarts = 0
        self.all_ready = False
        self._job = job
        self._outbox = outbox
        self._instructions: list[Instruction] = []

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake when a message of another node arrives."""

    def poll(self) -> list[Instruction]:
        """Read and answer messages of other nodes; what they tell this one to do."""
        found, self._instructions = self._instructions, []
        return found

    def store_socket(self, rank: int) -> contextlib.AbstractContextManager[socket.socket | None]:
        """The socket on which the ranks' store listens, for the rank that serves it."""
        return contextlib.nullcontext()

    def forward(self, line: bytes) -> None:
        """Pass on a rank's event to the follower."""
        self._outbox.forward(line)

    def send(self, event: str, **fields: Any) -> None:
        """Send an event of the agent's own to the follower."""
        self._outbox.send(event, **fields)

    @property
    def full(self) -> bool:
        """Whether no events should be read from ranks for now."""
        return self._outbox.full

    def broadcast(self, instruction: Instruction, signum: int | None = None) -> None:
        """Send an instruction to all other nodes."""

    def report(self, report: NodeReport) -> None:
        """Report that all ranks of this node have ended."""
        self.outcome = self._or_restart(resolve_outcome([report]))

    def mark_ready(self) -> None:
        """Report that this node has what its ranks need."""
        self.all_ready = True

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def restart(self) -> None:
        """After an outcome of ``again``: prepare for the next attempt."""
        assert self.outcome is not None
        self.rendezvous = self.outcome.rendezvous
        self.restarts += 1
        self.outcome = self.signum = None
        self._instructions.clear()

    def close(self) -> None:
        """Close the connections to other nodes."""

    def _or_restart(self, outcome: JobOutcome) -> JobOutcome:
        """The outcome, or ``again`` in its place where the ranks may be restarted."""
        used_up = self.restarts >= self._job.launch.max_restarts
        if outcome.state != "failed" or outcome.final or used_up:
            return outcome
        return replace(outcome, state="again", rendezvous=self._next_rendezvous())

    def _next_rendezvous(self) -> str:
        return f"{self._job.rendezvous}-{self.restarts + 1}"
