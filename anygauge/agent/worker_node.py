"""The agent of any other node: joins the coordinator, and follows its instructions."""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anygauge.agent.link import (
    OF_ANOTHER_JOB,
    UNPROVEN,
    Link,
    WorkerHandshake,
    field_of,
    is_signal,
    is_time,
    or_none,
    shown,
)
from anygauge.agent.nodes import (
    CANCELLED_EARLY,
    HEARTBEAT_S,
    INSTRUCTIONS,
    CancelledError,
    Hello,
    Instruction,
    Nodes,
    Outbox,
)
from anygauge.agent.outcome import JobOutcome, NodeReport, parse_outcome
from anygauge.interface import LOST, AnygaugeError, Job

_RETRY_S = 0.5
_OUTCOME_S = 30.0
_PROOF_S = 10.0
_MOST_WAITING = 1000


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
        self._least: float | None = None  # lower bound of how far its clock is ahead, in seconds
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
            self._link.send("beat", **self._clocks())
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
        self._link.send("report", report=report.record(), **self._clocks())

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
            join = {"clock": time.time(), "hello": asdict(self._own)}
            handshake = WorkerHandshake(link, self._job.token, join)
            answer = _answer(handshake, self._job.launch.lost_after_s, requests)
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
                    self._compare_clocks(answer)
                    self.rendezvous = field_of(answer, "rendezvous", _is_rendezvous)
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
            outcome = parse_outcome(fields)
            if outcome.state == "again":
                field_of(message, "rendezvous", _is_rendezvous)
            self.outcome = outcome
        elif kind == "ready":
            self.all_ready = True
        elif kind in INSTRUCTIONS:
            self.signum = field_of(message, "signum", or_none(is_signal)) or self.signum
            self._instructions.append(Instruction(kind))
        elif kind == "beat":
            self._compare_clocks(message)

    def _compare_clocks(self, message: Mapping[str, Any]) -> None:
        ahead = field_of(message, "clock", is_time) - time.time()
        self._least = ahead if self._least is None else max(self._least, ahead)

    def _clocks(self) -> dict[str, float | None]:
        return {"clock": time.time(), "least": self._least}

    def _check_lost(self, now: float) -> None:
        """Without its coordinator, a node ends."""
        link, limit = self._link, self._job.launch.lost_after_s
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


def _is_rendezvous(value: object) -> bool:
    """Whether it can be given to ranks: the coordinator sends an address and a port."""
    return isinstance(value, str) and re.fullmatch("tcp://[!-~]{1,300}", value) is not None


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
