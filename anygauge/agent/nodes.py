"""The agents of a job's nodes: what they say to each other, and the case of a single one.

They meet before anything starts, and end together. The agent of node 0 is the coordinator: the
others (workers) connect to it, and to nobody else. It tells all what one node does (a rank fails, a
signal arrives); a node that falls silent is lost, whatever cut it off. A `Supervisor` asks its
`Nodes` for orders at each turn of its loop, and gives it its report.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge.agent.outbox import Outbox
from anygauge.agent.outcome import JobOutcome, Report, resolve_outcome
from anygauge.interface import AnygaugeError, Job

BEAT_S = 1.0
"""How often an agent says that it lives."""


class Order(enum.Enum):
    """What other nodes demand of this one's supervisor."""

    END = "end"
    """A rank or node has failed: nobody can go on."""
    STOP = "stop"
    """The job was asked to end: a checkpoint may be written."""
    KILL = "kill"
    """It was asked twice."""
    FINISH = "finish"
    """Ranks elsewhere have finished, or save: those that are still at work should be done soon."""


ASKED_TOO_EARLY = "asked to end before all nodes had met; no rank was started"


class EndedError(AnygaugeError):
    """The agent was asked to end before there was a job."""

    exit_status = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What an agent says of itself when it joins.

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


class Nodes:
    """The only node of its job; what `Head` and `Member` build on.

    Attributes:
        rendezvous: where the ranks meet.
        signum: the signal that came with `Order.STOP`.
        verdict: how the attempt ended, once `over`.
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
        self._orders: list[Order] = []

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have the supervisor's loop wake when another node speaks."""

    def turn(self) -> list[Order]:
        """Read and answer the others; what they demand."""
        found, self._orders = self._orders, []
        return found

    def store_socket(self, rank: int) -> contextlib.AbstractContextManager[socket.socket | None]:
        """The socket on which the ranks' store listens, for the rank whose store it is."""
        return contextlib.nullcontext()

    def forward(self, line: bytes) -> None:
        """Pass on a rank's event."""
        self._outbox.forward(line)

    def send(self, event: str, **fields: Any) -> None:
        """Report an event of the agent's own."""
        self._outbox.send(event, **fields)

    @property
    def full(self) -> bool:
        """Whether ranks should wait with their events."""
        return self._outbox.full

    def tell(self, order: Order, signum: int | None = None) -> None:
        """Pass on what happened here."""

    def report(self, report: Report) -> None:
        """All ranks of this node have ended."""
        self.outcome = self._once_more(resolve_outcome([report]))

    def ready(self) -> None:
        """This node has what its ranks need."""
        self.all_ready = True

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def begin_again(self) -> None:
        """After an outcome of ``again``: be ready for the next attempt."""
        assert self.outcome is not None
        self.rendezvous = self.outcome.rendezvous
        self.restarts += 1
        self.outcome = self.signum = None
        self._orders.clear()

    def close(self) -> None:
        """Let go of the others."""

    def _once_more(self, outcome: JobOutcome) -> JobOutcome:
        """The outcome, or ``again`` in its place where the ranks may be started once more."""
        used_up = self.restarts >= self._job.launch.max_restarts
        if outcome.state != "failed" or outcome.final or used_up:
            return outcome
        return replace(outcome, state="again", rendezvous=self._next_rendezvous())

    def _next_rendezvous(self) -> str:
        return f"{self._job.rendezvous}-{self.restarts + 1}"


ORDERS = {order.value for order in Order}
