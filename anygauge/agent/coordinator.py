"""The agent of node 0: admits the other nodes, passes on what happens, decides the outcome."""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anygauge.agent.link import (
    CoordinatorHandshake,
    Link,
    field_of,
    is_signal,
    is_text,
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
    check_hello,
    read_hello,
)
from anygauge.agent.outcome import JobFailure, NodeReport, parse_report, resolve_outcome
from anygauge.interface import AnygaugeError, Job
from anygauge.util.rendezvous import listen_at, own_addresses, tcp_address

MOST_UNKNOWN = 64
"""Unauthenticated connections at the same time, in addition to one for each node."""
UNKNOWN_S = 10.0
"""Seconds that a connection may stay unauthenticated."""

_TURN_S = 0.05
_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.05
_NOTES = 100
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True)
class JoinedNode:
    """A node as the coordinator knows it.

    The two bounds come from messages that say when they were sent, by the other clock. Those with
    the shortest delay give the closest bounds.

    Attributes:
        least: lower bound of how far the coordinator's clock is ahead of the node's, in seconds.
        most: upper bound: a message arrives after it was sent.
        unreadable: it sent what no agent sends.
    """

    link: Link
    host: str
    least: float = -math.inf
    most: float = math.inf
    unreadable: bool = False

    def compare_clocks(self, message: Mapping[str, Any]) -> None:
        """Narrow the bounds by a message.

        Raises:
            ValueError: it has a time that no clock shows.
        """
        clock = field_of(message, "clock", is_time)
        least = field_of(message, "least", or_none(is_time))
        self.most = min(self.most, time.time() - clock)
        if least is not None:
            self.least = max(self.least, least)


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
        for worker in self._workers.values():
            # Those that joined early had nothing to send while they waited for the last.
            worker.link.heard = time.monotonic()
            worker.link.send("start", rendezvous=self.rendezvous, clock=time.time())

    def attach(self, selector: selectors.BaseSelector) -> None:
        """See `Nodes.attach`."""
        for worker in self._workers.values():
            if not worker.link.closed:
                selector.register(worker.link, selectors.EVENT_READ, self)

    def poll(self) -> list[Instruction]:
        """See `Nodes.poll`."""
        now = time.monotonic()
        self._send_heartbeat(now)
        for rank, worker in self._workers.items():
            worker.link.flush()
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
        for worker in self._workers.values():
            worker.link.send(kind, **fields)

    def _send_heartbeat(self, now: float) -> None:
        if now - self._heartbeat_at >= HEARTBEAT_S:
            self._heartbeat_at = now
            self._send_all("beat", clock=time.time())

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
            other = read_hello(message.get("hello"))
            joined = JoinedNode(link, other.host)
            joined.compare_clocks(message)
        except ValueError as error:
            reason = f"the coordinator cannot read how the node describes itself: {error}"
            ask = "Do all nodes have the same version of anygauge?"
            link.send("refused", reason=f"{reason}. {ask}")
            link.shut()
            listener.note(link, reason)
            return
        link.peer = f"node {other.node_rank} ({other.host})"
        known = {0: own.host, **{rank: each.host for rank, each in self._workers.items()}}
        try:
            check_hello(own, other, known)
        except AnygaugeError as error:
            link.send("refused", reason=str(error))
            link.shut()
            raise
        self._workers[other.node_rank] = joined

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
        if "clock" in message:
            worker.compare_clocks(message)
        if kind == "event":
            self._outbox.forward(field_of(message, "line", is_text).encode() + b"\n")
        elif kind == "ready":
            self._mark_ready(rank)
        elif kind == "report":
            record = message.get("report")
            report = parse_report(record, least=worker.least, most=worker.most)
            if report.node_rank != rank:
                raise ValueError(f"it is of node {report.node_rank}")
            self._reports[rank] = report
        elif kind in INSTRUCTIONS:
            instruction = Instruction(kind)
            self.signum = field_of(message, "signum", or_none(is_signal)) or self.signum
            self._instructions.append(instruction)
            self.broadcast(instruction, self.signum)

    def _check_lost(self, rank: int, worker: JoinedNode, now: float) -> None:
        link, limit = worker.link, self._job.launch.lost_after_s
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


class Listener:
    """Accepts connections until their senders are authenticated: few at a time, none for long.

    A context manager.

    Attributes:
        where: at which addresses it listens, in words.
    """

    def __init__(self, host: str, port: int, token: str, nodes: int) -> None:
        """Listen.

        Args:
            host: this machine, as the others know it.

        Raises:
            AnygaugeError: the port is taken, or may not be used.
        """
        try:
            self._sockets = _listen(host, port)
        except OSError as error:
            raise AnygaugeError(
                f"the agent of node 0 cannot listen at port {port} on {socket.gethostname()}: "
                f"{error.strerror or error}. If another job uses it, give this one another "
                "launch.port"
            ) from error
        names = [str(each.getsockname()[0]) for each in self._sockets]
        every = names == ["0.0.0.0"]
        self.where = f"{'every address' if every else ', '.join(names)}, port {port}"
        print(f"waiting for the other nodes at {self.where} ({host})", file=sys.stderr)
        self._token = token
        self._most = MOST_UNKNOWN + nodes
        self._pending: list[CoordinatorHandshake] = []
        self._notes = 0

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
        for handshake in self._pending:
            handshake.link.close("all nodes have met, or the job has ended")

    @property
    def unknown(self) -> int:
        """Number of unauthenticated connections."""
        return len(self._pending)

    def joined(self, timeout_s: float) -> list[tuple[Link, Mapping[str, Any]]]:
        """Wait for messages; the links that are now authenticated, and their ``join``."""
        # poll rather than epoll, which would need a descriptor of its own.
        with selectors.PollSelector() as selector:
            for each in self._sockets:
                selector.register(each, selectors.EVENT_READ)
            for handshake in self._pending:
                selector.register(handshake.link, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout_s)}
        for each in self._sockets:
            if each in ready:
                self._accept(each)
        found = []
        now = time.monotonic()
        for handshake in list(self._pending):
            link = handshake.link
            join = handshake.advance()
            if join is not None:
                self._pending.remove(handshake)
                found.append((link, join))
            elif link.closed:
                self._reject(handshake, link.why)
            elif now - handshake.since > UNKNOWN_S:
                self._reject(handshake, f"it had not joined after {UNKNOWN_S:g} s")
        return found

    def note(self, link: Link, why: str) -> None:
        """Log that a connection was rejected; only the first hundred, since strangers may try."""
        self._notes += 1
        if self._notes <= _NOTES:
            print(f"rejected a connection from {link.peer}: {why}", file=sys.stderr)

    def _reject(self, handshake: CoordinatorHandshake, why: str) -> None:
        handshake.link.close(why)
        self._pending.remove(handshake)
        self.note(handshake.link, why)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # What a stranger does to its own connection, or to this process's descriptors, must
                # not end the job.
                if error.errno in _NO_DESCRIPTORS and not self._make_room("no descriptor is free"):
                    time.sleep(_PAUSE_S)
                return
            if len(self._pending) >= self._most:
                self._make_room(f"more than {self._most} connections were waiting to join")
            link = Link(connection, str(address[0]))
            self._pending.append(CoordinatorHandshake(link, self._token, time.monotonic()))

    def _make_room(self, why: str) -> bool:
        """Reject the oldest, preferably one that has sent nothing valid; whether there was any."""
        oldest = min(self._pending, key=lambda each: (each.greeted, each.since), default=None)
        if oldest is not None:
            self._reject(oldest, why)
        return oldest is not None


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses that `host` has here; at every address where it has none.

    It may have none: the resolver of this machine does not know the name, the name is that of a
    service in front of the machine, or only this machine resolves it to 127.0.1.1.
    """
    found: list[socket.socket] = []
    try:
        for address in own_addresses(host):
            try:
                found.append(listen_at(address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not found:
            found.append(listen_at("", port))
    except OSError:
        for listener in found:
            listener.close()
        raise
    for listener in found:
        listener.setblocking(False)
    return found
