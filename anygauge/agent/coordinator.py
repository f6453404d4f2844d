"""The agent of node 0: gathers the others, passes on what happens, decides how the job ended."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anygauge.agent.admission import check_hello, read_hello
from anygauge.agent.link import Link
from anygauge.agent.listening import Door
from anygauge.agent.messages import field_of, is_signal, is_text, is_time, or_none, shown
from anygauge.agent.nodes import (
    ASKED_TOO_EARLY,
    BEAT_S,
    ORDERS,
    EndedError,
    Hello,
    Nodes,
    Order,
)
from anygauge.agent.outbox import Outbox
from anygauge.agent.outcome import JobFailure, Report, parse_report, resolve_outcome
from anygauge.interface import AnygaugeError, Job
from anygauge.util.rendezvous import listen_at, tcp_address

_TURN_S = 0.05
_MAYBE_TIME = or_none(is_time)


class Coordinator(Nodes):
    """The agent of node 0: gathers the others, and decides."""

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        own: Hello,
        address: tuple[str, int],
        asked: Sequence[object] = (),
    ) -> None:
        """Wait for all nodes.

        Args:
            address: name or address, and port, by which the others find this one.
            asked: fills when this agent is asked to end.

        Raises:
            AnygaugeError: nodes are missing when the time is up, or do not belong together.
        """
        super().__init__(job, outbox)
        self._reports: dict[int, Report] = {}
        self._workers: dict[int, Joined] = {}
        self._ready: set[int] = set()
        self._told: set[Order] = set()
        self._beat = time.monotonic()
        self._store: socket.socket | None = None
        with Door(*address, job.token, job.launch.nodes) as door:
            try:
                self._gather(door, own, asked)
            except AnygaugeError as error:
                for worker in self._workers.values():
                    worker.link.send("refused", reason=str(error))
                    worker.link.shut()
                raise
        self._address = next(iter(self._workers.values())).link.own_address
        self.rendezvous = self._next_rendezvous()
        for worker in self._workers.values():
            # Those who joined early have waited in silence for the last.
            worker.link.heard = time.monotonic()
            worker.link.send("start", rendezvous=self.rendezvous, clock=time.time())

    def attach(self, selector: selectors.BaseSelector) -> None:
        """See `Nodes.attach`."""
        for worker in self._workers.values():
            if not worker.link.closed:
                selector.register(worker.link, selectors.EVENT_READ, self)

    def turn(self) -> list[Order]:
        """See `Nodes.turn`."""
        now = time.monotonic()
        if now - self._beat >= BEAT_S:
            self._beat = now
            self._send_all("beat", clock=time.time())
        for rank, worker in self._workers.items():
            worker.link.flush()
            for message in worker.link.receive():
                try:
                    self._take(rank, worker, message)
                except ValueError as error:
                    worker.unreadable = True
                    worker.link.close(f"{shown(message['kind'])}: {error}")
                    break
            if rank not in self._reports:
                self._look_after(rank, worker, now)
        if self.outcome is None and len(self._reports) == self._job.launch.nodes:
            reports = [self._reports[rank] for rank in sorted(self._reports)]
            self.outcome = self._once_more(resolve_outcome(reports))
            self._send_all("outcome", **asdict(self.outcome))
        return super().turn()

    def tell(self, order: Order, signum: int | None = None) -> None:
        """See `Nodes.tell`."""
        if order in self._told and order is not Order.FINISH:
            return
        self._told.add(order)
        self._send_all(order.value, signum=signum)

    def ready(self) -> None:
        """See `Nodes.ready`."""
        self._note_ready(0)

    def _note_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if len(self._ready) == self._job.launch.nodes:
            self.all_ready = True
            self._send_all("ready")

    def report(self, report: Report) -> None:
        """See `Nodes.report`."""
        self._reports[report.node_rank] = report

    def begin_again(self) -> None:
        """See `Nodes.begin_again`."""
        super().begin_again()
        self._reports.clear()
        self._told.clear()

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

    def _send_all(self, kind: str, **fields: Any) -> None:
        for worker in self._workers.values():
            worker.link.send(kind, **fields)

    def _gather(self, door: Door, own: Hello, asked: Sequence[object]) -> None:
        deadline = time.monotonic() + self._job.launch.join_timeout_s
        while len(self._workers) < self._job.launch.nodes - 1:
            now = time.monotonic()
            if now > deadline:
                raise AnygaugeError(self._missing(door.where))
            if asked:
                raise EndedError(ASKED_TOO_EARLY)
            if now - self._beat >= BEAT_S:
                self._beat = now
                self._send_all("beat", clock=time.time())
            for link, message in door.joined(_TURN_S):
                self._admit(door, link, message, own)

    def _admit(self, door: Door, link: Link, message: Mapping[str, Any], own: Hello) -> None:
        try:
            other = read_hello(message.get("hello"))
            joined = Joined(link, other.host)
            joined.compare_clocks(message)
        except ValueError as error:
            reason = f"its description of itself cannot be read here: {error}"
            link.send("refused", reason=f"{reason}. Has each node the same version of anygauge?")
            link.shut()
            door.note(link, reason)
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
            + ". Their logs (logs/agentN.log) say whether they started; if they did, they cannot "
            f"reach this node, which listens at {where}"
        )

    def _take(self, rank: int, worker: Joined, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if "clock" in message:
            worker.compare_clocks(message)
        if kind == "event":
            self._outbox.forward(field_of(message, "line", is_text).encode() + b"\n")
        elif kind == "ready":
            self._note_ready(rank)
        elif kind == "report":
            record = message.get("report")
            report = parse_report(record, least=worker.least, most=worker.most)
            if report.node_rank != rank:
                raise ValueError(f"it is of node {report.node_rank}")
            self._reports[rank] = report
        elif kind in ORDERS:
            order = Order(kind)
            self.signum = field_of(message, "signum", or_none(is_signal)) or self.signum
            self._orders.append(order)
            self.tell(order, self.signum)

    def _look_after(self, rank: int, worker: Joined, now: float) -> None:
        link, limit = worker.link, self._job.launch.lost_after_s
        silent = now - link.heard
        if not link.closed and silent <= limit:
            return
        who = f"node {rank} ({worker.host})"
        if worker.unreadable:
            text = (
                f"{who} is lost: its agent sent what cannot be read here ({link.why}). Its ranks "
                "end with it. Has each node the same version of anygauge?"
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
        # It was there when it was last heard; what others say since may be its doing.
        failure = JobFailure(time=time.time() - silent, text=text, by_signal=True, lost=True)
        self._reports[rank] = Report(node_rank=rank, host=worker.host, failures=(failure,))
        self._orders.append(Order.END)
        self.tell(Order.END)


@dataclass(slots=True)
class Joined:
    """A node as the coordinator knows it.

    Attributes:
        least: seconds that the coordinator's clock is ahead of the node's, at the least: what it
            sent arrived later than it was sent.
        most: and at the most, by what the node sent. The least delayed messages tell best.
        unreadable: it sent what no agent sends.
    """

    link: Link
    host: str
    least: float = -math.inf
    most: float = math.inf
    unreadable: bool = False

    def compare_clocks(self, message: Mapping[str, Any]) -> None:
        """Learn from a message that tells when it was sent, and what its sender learnt so far.

        Raises:
            ValueError: it tells what no clock shows.
        """
        clock, least = field_of(message, "clock", is_time), field_of(message, "least", _MAYBE_TIME)
        self.most = min(self.most, time.time() - clock)
        if least is not None:
            self.least = max(self.least, least)
