"""The agent of node 0: admits the other nodes, passes on what happens, decides the outcome."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.link import HELLO, Hello, Link, check_hello
from anygauge.launch.listener import Listener, allow_open_files
from anygauge.launch.nodes import (
    CANCELLED_EARLY,
    HEARTBEAT_S,
    INSTRUCTIONS,
    CancelledError,
    Instruction,
    Nodes,
    Outbox,
)
from anygauge.launch.outcome import (
    REPORT,
    SIGNAL_OR_NONE,
    TEXT,
    JobFailure,
    NodeReport,
    field_of,
    read_record,
    resolve_outcome,
    shown,
)
from anygauge.util.rendezvous import listen_at, tcp_address

_TURN_S = 0.05


@dataclass(slots=True)
class JoinedNode:
    """A node as the coordinator knows it.

    Attributes:
        unreadable: it sent what no agent sends.
    """

    link: Link
    host: str
    unreadable: bool = False


class Coordinator(Nodes):
    """The other nodes as the agent of node 0 sees them. See `Nodes` for each public method."""

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        own: Hello,
        address: tuple[str, int],
        requests: Sequence[object] = (),
    ) -> None:
        """Wait until all nodes have joined.

        Args:
            address: name or address, and port, under which the others know this agent.
            requests: not empty once this agent is asked to end.

        Raises:
            AnygaugeError: nodes are missing when the time is up, or do not belong to this job.
        """
        super().__init__(job, outbox)
        self._reports: dict[int, NodeReport] = {}
        self._workers: dict[int, JoinedNode] = {}
        self._ready: set[int] = set()
        self._sent: set[Instruction] = set()
        self._heartbeat_at = time.monotonic()
        self._store: socket.socket | None = None
        self._hosts = {0: own.host}
        self._unsent: set[int] = set()  # ranks of nodes whose links keep messages
        allow_open_files(job.launch)
        with Listener(*address, job.token, job.launch.nodes) as listener:
            try:
                self._gather(listener, own, requests)
            except AnygaugeError as error:
                for worker in self._workers.values():
                    worker.link.send("refused", reason=str(error))
                    worker.link.shut()
                raise
        self._address = next(iter(self._workers.values())).link.own_address
        self.rendezvous = self._next_rendezvous()
        self._links = selectors.DefaultSelector()
        for rank, worker in self._workers.items():
            # Those that joined early had nothing to send while they waited for the last.
            worker.link.heard = time.monotonic()
            if not worker.link.closed:
                self._links.register(worker.link, selectors.EVENT_READ, rank)
        self._send_all("start", rendezvous=self.rendezvous)

    def attach(self, selector: selectors.BaseSelector) -> None:
        """See `Nodes.attach`."""
        selector.register(self._links, selectors.EVENT_READ, self)

    def poll(self) -> list[Instruction]:
        """See `Nodes.poll`."""
        now = time.monotonic()
        # Something arrives from one of a thousand nodes at every turn. So only links from which
        # something can be read are looked at, and all of them once a second.
        all_due = self._send_heartbeat(now)
        self._flush()
        for rank in list(self._workers) if all_due else self._readable():
            worker = self._workers[rank]
            for message in worker.link.receive():
                try:
                    self._handle(rank, worker, message)
                except ValueError as error:
                    worker.unreadable = True
                    worker.link.close(f"{shown(message['kind'])}: {error}")
                    break
            if rank not in self._reports:
                self._check_lost(rank, worker, now)
        if self.outcome is None and len(self._reports) == self._job.launch.nodes:
            reports = [self._reports[rank] for rank in sorted(self._reports)]
            self.outcome = self._or_restart(resolve_outcome(reports))
            self._send_all("outcome", **asdict(self.outcome))
        return super().poll()

    def broadcast(self, instruction: Instruction, signum: int | None = None) -> None:
        """See `Nodes.broadcast`."""
        if instruction in self._sent and instruction is not Instruction.FINISH:
            return
        self._sent.add(instruction)
        self._send_all(instruction.value, signum=signum)

    def mark_ready(self) -> None:
        """See `Nodes.mark_ready`."""
        self._mark_ready(0)

    def report(self, report: NodeReport) -> None:
        """See `Nodes.report`."""
        self._reports[report.node_rank] = report

    def restart(self) -> None:
        """See `Nodes.restart`."""
        super().restart()
        self._reports.clear()
        self._sent.clear()

    def close(self) -> None:
        """See `Nodes.close`."""
        self._close_store()
        for worker in self._workers.values():
            worker.link.shut()
        self._links.close()

    def store_socket(self, rank: int) -> contextlib.AbstractContextManager[socket.socket | None]:
        """See `Nodes.store_socket`."""
        if rank != 0 or self._store is None:
            return contextlib.nullcontext()
        found, self._store = self._store, None
        return found

    def _next_rendezvous(self) -> str:
        self._close_store()
        # Bound already: no other process can take the port before rank 0 listens there.
        self._store = listen_at(self._address)
        return tcp_address(self._address, self._store.getsockname()[1])

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _mark_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if len(self._ready) == self._job.launch.nodes:
            self.all_ready = True
            self._send_all("ready")

    def _send_all(self, kind: str, **fields: Any) -> None:
        for rank, worker in self._workers.items():
            worker.link.send(kind, **fields)
            if worker.link.waiting:
                self._unsent.add(rank)

    def _flush(self) -> None:
        for rank in list(self._unsent):
            link = self._workers[rank].link
            link.flush()
            if link.closed or not link.waiting:
                self._unsent.remove(rank)

    def _readable(self) -> list[int]:
        """Ranks of the nodes from which something has arrived, or whose connection has ended."""
        return [key.data for key, _ in self._links.select(0)]

    def _send_heartbeat(self, now: float) -> bool:
        """Send one if it is due; whether it was."""
        due = now - self._heartbeat_at >= HEARTBEAT_S
        if due:
            self._heartbeat_at = now
            self._send_all("beat")
        return due

    def _gather(self, listener: Listener, own: Hello, requests: Sequence[object]) -> None:
        deadline = time.monotonic() + self._job.launch.join_timeout_s
        while len(self._workers) < self._job.launch.nodes - 1:
            now = time.monotonic()
            if now > deadline:
                raise AnygaugeError(self._missing(listener.where))
            if requests:
                raise CancelledError(CANCELLED_EARLY)
            self._send_heartbeat(now)
            for link, message in listener.joined(_TURN_S):
                self._admit(listener, link, message, own)

    def _admit(
        self, listener: Listener, link: Link, message: Mapping[str, Any], own: Hello
    ) -> None:
        try:
            other = read_record(HELLO, message.get("hello"))
        except ValueError as error:
            reason = f"the coordinator cannot read how the node describes itself: {error}"
            ask = "Do all nodes have the same version of anygauge?"
            link.send("refused", reason=f"{reason}. {ask}")
            link.shut()
            listener.note(link, reason)
            return
        link.peer = f"node {other.node_rank} ({other.host})"
        try:
            check_hello(own, other, self._hosts)
        except AnygaugeError as error:
            link.send("refused", reason=str(error))
            link.shut()
            raise
        self._workers[other.node_rank] = JoinedNode(link, other.host)
        self._hosts[other.node_rank] = other.host

    def _missing(self, where: str) -> str:
        missing = [r for r in range(1, self._job.launch.nodes) if r not in self._workers]
        here = ", ".join(f"node {rank} ({m.host})" for rank, m in sorted(self._workers.items()))
        return (
            f"{len(missing)} of {self._job.launch.nodes} nodes did not join within "
            f"{self._job.launch.join_timeout_s:g} s (launch.join_timeout_s): "
            f"{', '.join(f'node {rank}' for rank in missing)} missing"
            + (f"; {here} joined" if here else "")
            + ". Check in logs/agentN.log of each missing node whether its agent started; if it "
            f"did, it cannot reach this node, which listens at {where}"
        )

    def _handle(self, rank: int, worker: JoinedNode, message: Mapping[str, Any]) -> None:
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
        elif kind in INSTRUCTIONS:
            instruction = Instruction(kind)
            self.signum = field_of(message, "signum", SIGNAL_OR_NONE) or self.signum
            self._instructions.append(instruction)
            self.broadcast(instruction, self.signum)

    def _check_lost(self, rank: int, worker: JoinedNode, now: float) -> None:
        link, limit = worker.link, self._job.launch.silence_s
        silent_s = now - link.heard
        if not link.closed and silent_s <= limit:
            return
        who = f"node {rank} ({worker.host})"
        if worker.unreadable:
            text = (
                f"{who} is lost: the coordinator cannot read what its agent sent ({link.why}). "
                "Its ranks end with it. Do all nodes have the same version of anygauge?"
            )
        elif link.closed:
            text = (
                f"{who} is lost: its agent ended without a report ({link.why}). The machine may "
                "have gone down, or the agent was killed; its ranks end with it"
            )
        else:
            text = (
                f"{who} is lost: nothing was heard from it for {limit:g} s (launch.lost_after_s). "
                "The machine or the network between it and the coordinator is down"
            )
            link.shut(0)
        # Dated by its last message: failures on other nodes since then may be its doing.
        failure = JobFailure(time=time.time() - silent_s, text=text, by_signal=True, lost=True)
        self._reports[rank] = NodeReport(node_rank=rank, host=worker.host, failures=(failure,))
        self._instructions.append(Instruction.END)
        self.broadcast(Instruction.END)
