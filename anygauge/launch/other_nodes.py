"""The nodes of a job of several: as the agent of node 0 sees them, and as each other one does."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter

from anygauge.interface import LOST, Job
from anygauge.launch.channel import Channel
from anygauge.launch.decision import DECISION, Decision
from anygauge.launch.nodes import INSTRUCTIONS, Instruction, Nodes
from anygauge.launch.outbox import Outbox
from anygauge.launch.outcome import (
    OUTCOME,
    REPORT,
    TEXT,
    JobFailure,
    JobOutcome,
    NodeReport,
    field_of,
    read_record,
)
from anygauge.util.rendezvous import listen_at, tcp_address

_OUTCOME_S = 30.0
_MOST_WAITING = 1024 * 1024  # bytes
_RENDEZVOUS = TypeAdapter[str](Annotated[str, Strict(), Field(pattern="^tcp://[!-~]{1,300}$")])


class Coordinator(Nodes):
    """All nodes of the job, as the agent of node 0 sees them."""

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        channels: Mapping[int, Channel],
        hosts: Mapping[int, str],
        address: str,
    ) -> None:
        """Let the other nodes start.

        Args:
            channels, hosts: of each node that has joined.
            address: by which they reach this machine.
        """
        super().__init__(job, outbox, channels)
        self._hosts = hosts
        self._address = address
        self._ready: set[int] = set()
        self._store: socket.socket | None = None
        self.rendezvous = self._next_rendezvous()
        self._send_all("start", rendezvous=self.rendezvous)

    def store_socket(self, rank: int) -> contextlib.AbstractContextManager[socket.socket | None]:  # noqa: D102
        if rank != 0 or self._store is None:
            return contextlib.nullcontext()
        found, self._store = self._store, None
        return found

    def mark_ready(self, decided: Decision) -> None:  # noqa: D102
        self.decided = decided
        self._mark_ready(0)

    def close(self) -> None:  # noqa: D102
        self._close_store()
        super().close()

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
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
            super()._handle(rank, message)
            self.broadcast(Instruction(kind), self.signum)

    def _drop_node(self, rank: int, cause: str, silent_s: float) -> None:
        # Dated by its last message: failures on other nodes since then may be its doing.
        failure = JobFailure(time=time.time() - silent_s, text=cause, by_signal=True, lost=True)
        host = self._hosts[rank]
        self._reports[rank] = NodeReport(node_rank=rank, host=host, failures=(failure,))
        self.broadcast(Instruction.END)

    def _end_attempt(self, outcome: JobOutcome) -> None:
        super()._end_attempt(outcome)
        self._send_all("outcome", **asdict(outcome))

    def _mark_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if len(self._ready) == self._job.launch.nodes:
            self.all_ready = True
            self._send_all("ready", decided=asdict(self.decided))

    def _next_rendezvous(self) -> str:
        self._close_store()
        # Bound already: no other process can take the port before rank 0 listens there.
        self._store = listen_at(self._address)
        return tcp_address(self._address, self._store.getsockname()[1])

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class Worker(Nodes):
    """All nodes of the job, as any other agent sees them: it knows the coordinator alone."""

    def __init__(self, job: Job, outbox: Outbox, coordinator: Channel, rendezvous: str) -> None:
        super().__init__(job, outbox, {0: coordinator})
        self.rendezvous = rendezvous
        self._coordinator = coordinator
        self._coordinator_full = False
        self._reported_at: float | None = None
        self._lost: str | None = None

    def forward(self, line: bytes) -> None:  # noqa: D102
        self._coordinator.send("event", line=line.decode(errors="replace").rstrip("\n"))

    def send(self, event: str, **fields: Any) -> None:  # noqa: D102
        if event == "ended":
            # Node 0 reports it too. If that is lost, a follower learns it only from here.
            if fields.get("state") == "lost" or not self._outbox.shared:
                self._outbox.send(event, **fields)
        else:
            record = {"event": event, "time": time.time(), **fields}
            self.forward(json.dumps(record).encode())

    @property
    def is_full(self) -> bool:  # noqa: D102
        return self._coordinator_full or self._coordinator.unsent_bytes > _MOST_WAITING

    def mark_ready(self, decided: Decision) -> None:  # noqa: D102
        self._coordinator.send("ready")

    def report(self, report: NodeReport) -> None:  # noqa: D102
        self._reported_at = time.monotonic()
        self._coordinator.send("report", report=report.record())
        self._decide_outcome()

    def restart(self) -> None:  # noqa: D102
        super().restart()
        self._reported_at = None

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "beat":
            self._coordinator_full = message.get("full") is True
        elif kind == "outcome":
            fields = {key: value for key, value in message.items() if key != "kind"}
            outcome = read_record(OUTCOME, fields)
            if outcome.state == "again":
                rendezvous_of(message)
            self._awaited.discard(rank)
            self._end_attempt(outcome)
        elif kind == "ready":
            self.decided = read_record(DECISION, message.get("decided"))
            self.all_ready = True
        else:
            super()._handle(rank, message)

    def _drop_node(self, rank: int, cause: str, silent_s: float) -> None:
        self._lost = cause

    def _decide_outcome(self) -> None:
        """End this node, since its coordinator is lost."""
        if self.has_outcome or self._reported_at is None:
            return
        waited_s = time.monotonic() - self._reported_at
        if self._lost is None and waited_s > self._job.launch.silence_s + _OUTCOME_S:
            self._lost = "the coordinator did not report how the job ended"
        if self._lost is not None:
            self._end_attempt(JobOutcome(state="lost", exit_status=LOST, cause=self._lost))


def rendezvous_of(message: Mapping[str, Any]) -> str:
    """Return the address that ranks get: node 0 sends an address and a port.

    Raises:
        ValueError: it is neither.
    """
    return field_of(message, "rendezvous", _RENDEZVOUS)
