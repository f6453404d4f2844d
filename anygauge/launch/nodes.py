"""The nodes of a job as one agent sees them: what they are, and what they tell it to do.

The agents meet before any rank starts (`meeting`), and end together. The agent of node 0 passes on
to all nodes what happens on one (a rank fails, a signal arrives), and decides the outcome. A node
that sends no heartbeats is lost, whatever cut it off.

Node 0, which may be the only one, has `Nodes`; each other node has a `WorkerNode`. A `Supervisor`
takes instructions from it at each turn of its loop, and gives it a report at the end.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Protocol

from pydantic import Field, Strict, TypeAdapter

from anygauge.interface import LOST, Job
from anygauge.launch.channel import Channel, close_all
from anygauge.launch.decision import DECISION, Decision
from anygauge.launch.outcome import (
    OUTCOME,
    REPORT,
    SIGNAL_OR_NONE,
    TEXT,
    JobFailure,
    JobOutcome,
    NodeReport,
    field_of,
    read_record,
    resolve_outcome,
)
from anygauge.util.rendezvous import listen_at, tcp_address
from anygauge.util.text import short

HEARTBEAT_S = 1.0
OUTBOX_CAPACITY = 100_000
"""Lines kept for a follower that does not read; when it is full, no events are read from ranks."""

_OUTCOME_S = 30.0
_MOST_WAITING = 1024 * 1024  # bytes


class Instruction(enum.Enum):
    """What another node tells this one's supervisor to do. The values are kinds of messages."""

    END = "end"
    """End the ranks: a rank or a node has failed."""
    STOP = "stop"
    """Let the ranks write a checkpoint and end: the job was asked to."""
    KILL = "kill"
    """Kill the ranks: the job was asked twice."""


INSTRUCTIONS = {each.value for each in Instruction}


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


class Follower(Protocol):
    """Where a supervisor sends what happens on its machine; see `Outbox`."""

    shared: bool

    @property
    def full(self) -> bool:
        """See `Outbox.full`."""

    def forward(self, line: bytes) -> None:
        """See `Outbox.forward`."""

    def send(self, event: str, **fields: Any) -> None:
        """See `Outbox.send`."""


class Nodes:
    """All nodes of the job, as node 0 sees them. Nothing here waits for another node.

    Attributes:
        rendezvous: where the ranks meet.
        signum: the signal that came with `Instruction.STOP`.
        outcome: how the attempt ended, once it has.
        restarts: attempts that failed and were followed by another.
        all_ready: each node has what its ranks need.
        decided: by node 0 for all, once they are ready.
    """

    def __init__(
        self,
        job: Job,
        outbox: Follower,
        channels: Mapping[int, Channel] | None = None,
        hosts: Mapping[int, str] | None = None,
        address: str = "",
    ) -> None:
        """Let the other nodes start, if there are any.

        Args:
            channels, hosts: of each node that has joined.
            address: by which they reach this machine.
        """
        self.rendezvous = job.rendezvous
        self.outcome: JobOutcome | None = None
        self.signum: int | None = None
        self.restarts = 0
        self.all_ready = False
        self.decided = Decision()
        self._job = job
        self._outbox = outbox
        self._channels = dict(channels or {})
        self._hosts = hosts or {}
        self._address = address
        self._store: socket.socket | None = None
        self._instructions: list[Instruction] = []
        self._sent: set[Instruction] = set()
        self._awaited = set(self._channels)  # nodes that have not said how they ended
        self._reports: dict[int, NodeReport] = {}
        self._ready: set[int] = set()
        self._unsent: set[int] = set()  # nodes whose channels keep messages
        self._heartbeat_at = time.monotonic()
        self._is_first_turn = True  # which reads what came with the join
        self._readable = selectors.DefaultSelector()
        for rank, channel in self._channels.items():
            # Those that joined early had nothing to send while they waited for the last.
            channel.heard = time.monotonic()
            if not channel.closed:
                self._readable.register(channel, selectors.EVENT_READ, rank)
        if address:
            self.rendezvous = self._next_rendezvous()
            self._send_all("start", rendezvous=self.rendezvous)

    # -- what the agent and its supervisor call ----------------------------------------------------

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake when a message of another node arrives."""
        selector.register(self._readable, selectors.EVENT_READ, self)

    def poll(self) -> list[Instruction]:
        """Read and answer messages of other nodes; what they tell this one to do."""
        now = time.monotonic()
        due = now - self._heartbeat_at >= HEARTBEAT_S
        if due:
            self._heartbeat_at = now
            self._send_all("beat")
        for rank in list(self._unsent):
            self._channels[rank].flush()
            if not self._channels[rank].waiting:
                self._unsent.remove(rank)
        # Something arrives from one of a thousand nodes at every turn. So only channels from which
        # something can be read are looked at, and all of them once a second.
        readable = [key.data for key, _ in self._readable.select(0)]
        for rank in self._channels if due or self._is_first_turn else readable:
            self._read(rank, self._channels[rank], now)
        self._is_first_turn = False
        self._decide()
        if self.over:
            return []  # what came after the outcome is for the next attempt
        found, self._instructions = self._instructions, []
        return found

    def store_socket(self, rank: int) -> contextlib.AbstractContextManager[socket.socket | None]:
        """The socket on which the ranks' store listens, for the rank that serves it."""
        if rank != 0 or self._store is None:
            return contextlib.nullcontext()
        found, self._store = self._store, None
        return found

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
        """Send an instruction to all other nodes, each once."""
        if instruction in self._sent:
            return
        self._sent.add(instruction)
        self._send_all(instruction.value, signum=signum)

    def report(self, report: NodeReport) -> None:
        """Report that all ranks of this node have ended."""
        self._reports[report.node_rank] = report
        self._decide()

    def mark_ready(self, decided: Decision) -> None:
        """Report that this node has what its ranks need; what node 0 has decided counts."""
        self.decided = decided
        self._mark_ready(0)

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def restart(self) -> None:
        """After an outcome of ``again``: prepare for the next attempt."""
        assert self.outcome is not None
        self.rendezvous = self.outcome.rendezvous
        self.restarts += 1
        self.outcome = None
        self._reports.clear()
        self._sent.clear()
        self._awaited = set(self._channels)

    def close(self) -> None:
        """Close the connections to other nodes."""
        self._close_store()
        close_all([*self._channels.values()])
        self._readable.close()

    # -- what differs between node 0 and the others ------------------------------------------------

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a node.

        Raises:
            ValueError: it cannot be read here.
        """
        kind = message["kind"]
        if kind == "event":
            self._outbox.forward(field_of(message, "line", TEXT).encode() + b"\n")
        elif kind == "ready":
            self._mark_ready(rank)
        elif kind == "report":
            report = read_record(REPORT, message.get("report"))
            if report.node_rank != rank:
                raise ValueError(f"it is of node {report.node_rank}")
            self._reports[rank] = report
            self._awaited.discard(rank)
        elif kind in INSTRUCTIONS:
            self.broadcast(self._take_instruction(message), self.signum)

    def _lose(self, rank: int, cause: str, silent_s: float) -> None:
        """Go on without a node of which nothing more is heard."""
        # Dated by its last message: failures on other nodes since then may be its doing.
        failure = JobFailure(time=time.time() - silent_s, text=cause, by_signal=True, lost=True)
        host = self._hosts[rank]
        self._reports[rank] = NodeReport(node_rank=rank, host=host, failures=(failure,))
        self.broadcast(Instruction.END)

    def _decide(self) -> None:
        """Decide the outcome once all nodes have reported, and send it to them."""
        if self.over or len(self._reports) < self._job.launch.nodes:
            return
        outcome = resolve_outcome([self._reports[rank] for rank in sorted(self._reports)])
        used_up = self.restarts >= self._job.launch.max_restarts
        if outcome.state == "failed" and not outcome.final and not used_up:
            outcome = replace(outcome, state="again", rendezvous=self._next_rendezvous())
        self._conclude(outcome)
        self._send_all("outcome", **asdict(outcome))

    # -- what they have in common ------------------------------------------------------------------

    def _conclude(self, outcome: JobOutcome) -> None:
        self.outcome, self.signum = outcome, None
        self._instructions.clear()

    def _take_instruction(self, message: Mapping[str, Any]) -> Instruction:
        instruction = Instruction(message["kind"])
        self.signum = field_of(message, "signum", SIGNAL_OR_NONE) or self.signum
        self._instructions.append(instruction)
        return instruction

    def _read(self, rank: int, channel: Channel, now: float) -> None:
        """Take what has arrived from a node; a node of which nothing more can come is lost."""
        unreadable, heard_before = "", channel.heard
        for message in channel.receive():
            try:
                self._handle(rank, message)
            except ValueError as error:
                unreadable = f"{short(repr(message['kind']))}: {error}"
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
        self._lose(rank, f"{channel.peer} is lost: {why}", silent_s)

    def _send_all(self, kind: str, **fields: Any) -> None:
        for rank, channel in self._channels.items():
            channel.send(kind, **fields)
            if channel.waiting:
                self._unsent.add(rank)

    def _mark_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if len(self._ready) == self._job.launch.nodes:
            self.all_ready = True
            self._send_all("ready", decided=asdict(self.decided))

    def _next_rendezvous(self) -> str:
        if not self._address:
            return f"{self._job.rendezvous}-{self.restarts + 1}"
        self._close_store()
        # Bound already: no other process can take the port before rank 0 listens there.
        self._store = listen_at(self._address)
        return tcp_address(self._address, self._store.getsockname()[1])

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class WorkerNode(Nodes):
    """All nodes of the job, as any other node sees them: it knows the coordinator alone."""

    def __init__(self, job: Job, outbox: Follower, coordinator: Channel, rendezvous: str) -> None:
        super().__init__(job, outbox, {0: coordinator})
        self.rendezvous = rendezvous
        self._reported_at: float | None = None
        self._lost: str | None = None

    def forward(self, line: bytes) -> None:  # noqa: D102
        self._send_all("event", line=line.decode(errors="replace").rstrip("\n"))

    def send(self, event: str, **fields: Any) -> None:  # noqa: D102
        if event == "ended":
            # Node 0 reports it too. If that is lost, a follower learns it only from here.
            if fields.get("state") == "lost" or not self._outbox.shared:
                self._outbox.send(event, **fields)
        else:
            record = {"event": event, "time": time.time(), **fields}
            self.forward(json.dumps(record).encode())

    @property
    def full(self) -> bool:  # noqa: D102
        return self._channels[0].waiting > _MOST_WAITING

    def mark_ready(self, decided: Decision) -> None:  # noqa: D102
        self._send_all("ready")

    def report(self, report: NodeReport) -> None:  # noqa: D102
        self._reported_at = time.monotonic()
        self._send_all("report", report=report.record())
        self._decide()

    def restart(self) -> None:  # noqa: D102
        super().restart()
        self._reported_at = None

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "outcome":
            fields = {key: value for key, value in message.items() if key != "kind"}
            outcome = read_record(OUTCOME, fields)
            if outcome.state == "again":
                rendezvous_of(message)
            self._awaited.discard(rank)
            self._conclude(outcome)
        elif kind == "ready":
            self.decided = read_record(DECISION, message.get("decided"))
            self.all_ready = True
        elif kind in INSTRUCTIONS:
            self._take_instruction(message)

    def _lose(self, rank: int, cause: str, silent_s: float) -> None:
        self._lost = cause

    def _decide(self) -> None:
        """Without its coordinator, a node ends."""
        if self.over or self._reported_at is None:
            return
        waited_s = time.monotonic() - self._reported_at
        if self._lost is None and waited_s > self._job.launch.silence_s + _OUTCOME_S:
            self._lost = "the coordinator did not report how the job ended"
        if self._lost is not None:
            self._conclude(JobOutcome(state="lost", exit_status=LOST, cause=self._lost))


_RENDEZVOUS = TypeAdapter[str](Annotated[str, Strict(), Field(pattern="^tcp://[!-~]{1,300}$")])


def rendezvous_of(message: Mapping[str, Any]) -> str:
    """What can be given to ranks: node 0 sends an address and a port.

    Raises:
        ValueError: it is neither.
    """
    return field_of(message, "rendezvous", _RENDEZVOUS)
