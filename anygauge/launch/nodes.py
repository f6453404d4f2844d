"""The nodes of a job as one supervisor sees them: what they are, and what they tell it to do.

The agents meet before any rank starts (`meeting`), and end together. The agent of node 0 passes on
to all nodes what happens on one (a rank fails, a signal arrives), and decides the outcome. A node
that sends no heartbeats is lost, whatever cut it off. Nothing here waits for another node.

A `Supervisor` takes instructions from `Nodes` at each turn of its loop, and gives it a report at
the end. Of several nodes, node 0 has a `Coordinator`, and each other one a `Worker`.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge.interface import Job
from anygauge.launch.channel import Channel, close_all
from anygauge.launch.decision import Decision
from anygauge.launch.outbox import Outbox
from anygauge.launch.outcome import (
    SIGNAL_OR_NONE,
    JobOutcome,
    NodeReport,
    field_of,
    resolve_outcome,
)
from anygauge.util.text import shorten

HEARTBEAT_S = 1.0


class Instruction(enum.Enum):
    """An instruction of another node to this one's supervisor. The values are kinds of messages."""

    END = "end"
    """End the ranks: a rank or a node has failed."""
    STOP = "stop"
    """Let the ranks write a checkpoint and end: the job was asked to."""
    KILL = "kill"
    """Kill the ranks: the job was asked twice."""


INSTRUCTIONS = {each.value for each in Instruction}


class Nodes:
    """All nodes of the job: this one, and those to which it has channels.

    Attributes:
        rendezvous: where the ranks meet.
        signum: the signal that came with `Instruction.STOP`.
        outcome: how the attempt ended, once it has.
        restarts: attempts that failed and were followed by another.
        all_ready: each node has what its ranks need.
        decided: by node 0 for all, once they are ready.
    """

    def __init__(
        self, job: Job, outbox: Outbox, channels: Mapping[int, Channel] | None = None
    ) -> None:
        self.rendezvous = job.rendezvous
        self.outcome: JobOutcome | None = None
        self.signum: int | None = None
        self.restarts = 0
        self.all_ready = False
        self.decided = Decision()
        self._job = job
        self._outbox = outbox
        self._channels = channels or {}
        self._instructions: list[Instruction] = []
        self._sent: set[Instruction] = set()
        self._awaited = set(self._channels)  # nodes that have not said how they ended
        self._reports: dict[int, NodeReport] = {}
        self._heartbeat_at = time.monotonic()
        self._readable = selectors.DefaultSelector()
        for rank, channel in self._channels.items():
            # Those that joined early had nothing to send while they waited for the last.
            channel.heard = time.monotonic()
            if not channel.closed:
                self._readable.register(channel.socket, selectors.EVENT_READ, rank)

    # -- what the agent and its supervisor call ----------------------------------------------------

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake when a message of another node arrives."""
        selector.register(self._readable, selectors.EVENT_READ, self)

    def poll(self) -> list[Instruction]:
        """Read and answer messages of other nodes; returns their instructions."""
        now = time.monotonic()
        due = now - self._heartbeat_at >= HEARTBEAT_S
        if due:
            self._heartbeat_at = now
            # What they report would fill this node's memory while its follower is stopped.
            self._send_all("beat", full=self._outbox.is_full)
        for channel in self._channels.values():
            if channel.unsent_bytes:
                channel.flush()
        # Something arrives from one of a thousand nodes at every turn. So only channels from which
        # something can be read are looked at, and all of them once a second.
        readable = [key.data for key, _ in self._readable.select(0)]
        for rank in self._channels if due else readable:
            self._read(rank, self._channels[rank], now)
        self._decide_outcome()
        if self.has_outcome:
            return []  # what came after the outcome is for the next attempt
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
    def is_full(self) -> bool:
        """Whether no events should be read from ranks for now."""
        return self._outbox.is_full

    def broadcast(self, instruction: Instruction, signum: int | None = None) -> None:
        """Send an instruction to all other nodes, each once."""
        if instruction not in self._sent:
            self._sent.add(instruction)
            self._send_all(instruction.value, signum=signum)

    def report(self, report: NodeReport) -> None:
        """Report that all ranks of this node have ended."""
        self._reports[report.node_rank] = report
        self._decide_outcome()

    def mark_ready(self, decided: Decision) -> None:
        """Report that this node has what its ranks need; what node 0 has decided counts."""
        self.decided = decided
        self.all_ready = True

    @property
    def has_outcome(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def restart(self) -> None:
        """Prepare for the next attempt, after an outcome of ``again``."""
        assert self.outcome is not None
        self.rendezvous = self.outcome.rendezvous
        self.restarts += 1
        self.outcome = None
        self._reports.clear()
        self._sent.clear()
        self._awaited = set(self._channels)

    def close(self) -> None:
        """Close the connections to other nodes."""
        close_all(self._channels.values())
        self._readable.close()

    # -- what differs between the coordinator and a worker -----------------------------------------

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a node.

        Raises:
            ValueError: it cannot be read here.
        """
        if message["kind"] in INSTRUCTIONS:
            self.signum = field_of(message, "signum", SIGNAL_OR_NONE) or self.signum
            self._instructions.append(Instruction(message["kind"]))

    def _drop_node(self, rank: int, cause: str, silent_s: float) -> None:
        """Go on without a node of which nothing more is heard."""

    def _decide_outcome(self) -> None:
        """Decide the outcome once all nodes have reported."""
        if self.has_outcome or len(self._reports) < self._job.launch.nodes:
            return
        outcome = resolve_outcome([self._reports[rank] for rank in sorted(self._reports)])
        used_up = self.restarts >= self._job.launch.max_restarts
        if outcome.state == "failed" and not outcome.final and not used_up:
            outcome = replace(outcome, state="again", rendezvous=self._next_rendezvous())
        self._end_attempt(outcome)

    def _next_rendezvous(self) -> str:
        return f"{self._job.rendezvous}-{self.restarts + 1}"

    # -- what they have in common ------------------------------------------------------------------

    def _end_attempt(self, outcome: JobOutcome) -> None:
        self.outcome, self.signum = outcome, None
        self._instructions.clear()

    def _read(self, rank: int, channel: Channel, now: float) -> None:
        """Take what has arrived from a node; a node of which nothing more can come is lost."""
        unreadable, heard_before = "", channel.heard
        for message in channel.receive():
            try:
                self._handle(rank, message)
            except ValueError as error:
                unreadable = f"{shorten(repr(message['kind']))}: {error}"
                channel.close(unreadable)
        # Of one that is closed, the last message may have waited here since the turn before.
        silent_s = now - (heard_before if channel.closed else channel.heard)
        limit = self._job.launch.silence_s
        if rank not in self._awaited or not (channel.closed or silent_s > limit):
            return
        if unreadable:
            why = (
                f"what its agent sent cannot be read here ({unreadable}). Do all nodes have the "
                "same version of anygauge?"
            )
        elif channel.closed:
            why = (
                f"its agent ended without a report ({channel.why}). The machine may have gone "
                "down, or the agent was killed; its ranks end with it"
            )
        else:
            why = (
                f"nothing was heard from it for {limit:g} s (launch.lost_after_s). The machine or "
                "the network to it is down"
            )
        channel.close(why)
        self._awaited.remove(rank)
        self._instructions.append(Instruction.END)
        self._drop_node(rank, f"{channel.peer} is lost: {why}", silent_s)

    def _send_all(self, kind: str, **fields: Any) -> None:
        for channel in self._channels.values():
            channel.send(kind, **fields)
