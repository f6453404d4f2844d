"""The nodes of a job as one agent sees them: what they are, and what they tell it to do.

The agents meet before any rank starts, and end together. The agent of node 0 is the coordinator;
the others (workers) connect to it and to nobody else. It passes on to all nodes what happens on one
(a rank fails, a signal arrives). A node that sends no heartbeats is lost, whatever cut it off.

`Nodes` itself serves a job of one node. The agent of a worker has a `WorkerNode`, that of node 0 a
`Coordinator`. A `Supervisor` takes instructions from it at each turn of its loop, and gives it a
report at the end.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Protocol

from pydantic import Field, Strict, TypeAdapter

from anygauge.interface import LOST, AnygaugeError, Job
from anygauge.launch.link import OF_ANOTHER_JOB, UNPROVEN, Hello, Link, WorkerHandshake
from anygauge.launch.outcome import (
    OUTCOME,
    SIGNAL_OR_NONE,
    JobOutcome,
    NodeReport,
    field_of,
    read_record,
    resolve_outcome,
    shown,
)

HEARTBEAT_S = 1.0
OUTBOX_CAPACITY = 100_000
"""Lines kept for a follower that does not read; when it is full, no events are read from ranks."""
CANCELLED_EARLY = "asked to end before all nodes had met; no rank was started"

_RETRY_S = 0.5
_OUTCOME_S = 30.0
_PROOF_S = 10.0
_MOST_WAITING = 1000


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
    """The only node of its job; `Coordinator` and `WorkerNode` build on it.

    Attributes:
        rendezvous: where the ranks meet.
        signum: the signal that came with `Instruction.STOP`.
        outcome: how the attempt ended, once it has.
        restarts: attempts that failed and were followed by another.
        all_ready: each node has what its ranks need.
    """

    def __init__(self, job: Job, outbox: Follower) -> None:
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


class WorkerNode(Nodes):
    """The coordinator as another agent sees it. See `Nodes` for each public method."""

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        own: Hello,
        coordinator: tuple[str, int],
        requests: Sequence[object] = (),
    ) -> None:
        """Join the coordinator.

        Args:
            requests: not empty once this agent is asked to end.

        Raises:
            AnygaugeError: it cannot be reached in time, or refuses this node.
        """
        super().__init__(job, outbox)
        self._own = own
        self._reported_at: float | None = None
        self._lost: str | None = None
        self._heartbeat_at = time.monotonic()
        self._link = self._join(coordinator, requests)

    def attach(self, selector: selectors.BaseSelector) -> None:
        """See `Nodes.attach`."""
        if not self._link.closed:
            selector.register(self._link, selectors.EVENT_READ, self)

    def poll(self) -> list[Instruction]:
        """See `Nodes.poll`."""
        now = time.monotonic()
        if now - self._heartbeat_at >= HEARTBEAT_S:
            self._heartbeat_at = now
            self._link.send("beat")
        self._link.flush()
        for message in self._link.receive():
            try:
                self._handle(message)
            except ValueError as error:
                self._link.close(_unreadable(message, error))
                break
        if self.outcome is None:
            self._check_lost(now)
        return super().poll()

    def forward(self, line: bytes) -> None:
        """See `Nodes.forward`."""
        self._link.send("event", line=line.decode(errors="replace").rstrip("\n"))

    def send(self, event: str, **fields: Any) -> None:
        """See `Nodes.send`."""
        if event == "ended":
            # The coordinator reports it too. If that is lost, a follower learns it only from here.
            if fields.get("state") == "lost" or not self._outbox.shared:
                self._outbox.send(event, **fields)
        else:
            record = {"event": event, "time": time.time(), **fields}
            self.forward(json.dumps(record).encode())

    @property
    def full(self) -> bool:
        """See `Nodes.full`."""
        return self._link.waiting > _MOST_WAITING

    def broadcast(self, instruction: Instruction, signum: int | None = None) -> None:
        """See `Nodes.broadcast`."""
        self._link.send(instruction.value, signum=signum)

    def mark_ready(self) -> None:
        """See `Nodes.mark_ready`."""
        self._link.send("ready")

    def report(self, report: NodeReport) -> None:
        """See `Nodes.report`."""
        self._reported_at = time.monotonic()
        self._link.send("report", report=report.record())

    def restart(self) -> None:
        """See `Nodes.restart`."""
        super().restart()
        self._reported_at = None

    def close(self) -> None:
        """See `Nodes.close`."""
        self._link.shut()

    def _join(self, coordinator: tuple[str, int], requests: Sequence[object]) -> Link:
        deadline = time.monotonic() + self._job.launch.join_timeout_s
        trouble, where = "nothing answered", f"{coordinator[0]}:{coordinator[1]}"
        while time.monotonic() < deadline:
            if requests:
                raise CancelledError(CANCELLED_EARLY)
            try:
                connection = socket.create_connection(coordinator, timeout=5.0)
            except OSError as error:
                trouble = str(error)
                time.sleep(_RETRY_S)
                continue
            link = Link(connection, "the coordinator")
            join = {"hello": asdict(self._own)}
            handshake = WorkerHandshake(link, self._job.token, join)
            answer = _answer(handshake, self._job.launch.silence_s, requests)
            if link.why == UNPROVEN:
                raise AnygaugeError(
                    f"the program that listens at {where} did not prove that it knows this job's "
                    f"secret: {OF_ANOTHER_JOB}. If another job uses that port, set this job's "
                    "launch.port to another one"
                )
            if answer is None:
                trouble = link.why or "it did not answer"
            elif answer["kind"] == "refused":
                raise AnygaugeError(
                    f"the coordinator at {where} refused this node: {_reason(answer)}"
                )
            else:
                try:
                    self.rendezvous = field_of(answer, "rendezvous", _RENDEZVOUS)
                    return link
                except ValueError as error:
                    trouble = _unreadable(answer, error)
            link.shut(0)
            time.sleep(_RETRY_S)
        raise AnygaugeError(
            f"node {self._own.node_rank} ({self._own.host}) could not join the coordinator at "
            f"{where} within {self._job.launch.join_timeout_s:g} s "
            f"(launch.join_timeout_s): {trouble}. Is the agent of node 0 running, and can this "
            "node connect to that port?"
        )

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "outcome":
            fields = {key: value for key, value in message.items() if key != "kind"}
            outcome = read_record(OUTCOME, fields)
            if outcome.state == "again":
                field_of(message, "rendezvous", _RENDEZVOUS)
            self.outcome = outcome
        elif kind == "ready":
            self.all_ready = True
        elif kind in INSTRUCTIONS:
            self.signum = field_of(message, "signum", SIGNAL_OR_NONE) or self.signum
            self._instructions.append(Instruction(kind))

    def _check_lost(self, now: float) -> None:
        """Without its coordinator, a node ends."""
        link, limit = self._link, self._job.launch.silence_s
        if self._lost is not None:
            text = self._lost
        elif link.closed:
            text = f"the coordinator is lost: its agent ended without a report ({link.why})"
        elif now - link.heard > limit:
            text = f"the coordinator is lost: nothing was heard from it for {limit:g} s"
        elif self._reported_at is not None and now - self._reported_at > limit + _OUTCOME_S:
            text = "the coordinator did not report how the job ended"
        else:
            return
        if self._lost is None:
            self._lost = text
            link.shut(0)
            self._instructions.append(Instruction.END)
        if self._reported_at is not None:
            self.outcome = JobOutcome(state="lost", exit_status=LOST, cause=text)


_RENDEZVOUS = TypeAdapter[str](Annotated[str, Strict(), Field(pattern="^tcp://[!-~]{1,300}$")])
"""What can be given to ranks: the coordinator sends an address and a port."""


def _unreadable(message: Mapping[str, Any], error: ValueError) -> str:
    return f"it sent what cannot be read here, {shown(message['kind'])}: {error}"


def _reason(answer: Mapping[str, Any]) -> str:
    reason = answer.get("reason")
    return reason if isinstance(reason, str) else "it gave no reason"


def _answer(
    handshake: WorkerHandshake, limit_s: float, requests: Sequence[object]
) -> Mapping[str, Any] | None:
    """The coordinator's ``start`` or ``refused``; None if none comes while it sends heartbeats."""
    link, began = handshake.link, time.monotonic()
    while not link.closed and not requests and time.monotonic() - link.heard < limit_s:
        if not handshake.joined and time.monotonic() - began > _PROOF_S:
            link.close(f"it had not proved that it is the coordinator after {_PROOF_S:g} s")
        link.flush()
        message = handshake.advance()
        if message is not None and message["kind"] in ("start", "refused"):
            return message
        if message is None:
            time.sleep(0.02)
    return None
