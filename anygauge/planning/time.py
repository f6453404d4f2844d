"""How long a step takes: what a rank computes, moves and sends, by the rates of its card.

A roofline with few constants, which hold for all cards; where a card's own rates were measured
(``anygauge plan --calibrate``), those are taken. `COPY_SHARE`, `SEND_SHARE`, `ISSUE_S` and
`OVERLAP` are those that meet half of the published runs best (``python -m tests.planning.published
--fit``). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anygauge.interface import AnygaugeError, Card
from anygauge.planning.forecast import Traffic, Work
from anygauge.planning.machines import Machine

MATMUL_SHARE = 0.8
"""Of a card's peak: what large matrix products reach, where nobody has measured it."""
COPY_SHARE = 0.435
"""Of the memory's bandwidth: what operations reach that only read and write."""
SEND_SHARE = 0.7
"""Of a link's or a network's rate: what large collectives reach."""
HOST = 100e9
"""Bytes per second that the operations of a machine's host read and write, all ranks together: an
optimizer that updates there."""
STEP_BYTES = 2**20
"""Bytes that every step copies to its host or from it: rows, a loss."""
CALL_S = 30e-6
"""Seconds that a collective takes before any byte is sent."""
ISSUE_S = 24.7e-6
"""Seconds that a host takes for each operation, with the layers of Python around it."""
OVERLAP = 0.43
"""Of the shorter of computing and sending: what runs beside the other."""


class UnknownRateError(AnygaugeError):
    """A figure is missing without which no time can be predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """The time of one optimizer step of the rank that takes longest, in seconds.

    Attributes:
        multiplying: matrix products, attention among them.
        moving: all other operations of the device.
        issuing: the host, for all operations; a device that is not the host works beside it, as far
            as neither waits for the other.
        sending: link -> collectives over it: ``cards`` of a machine, ``machines``.
        copying: to the host and from it.
        on_host: operations there, which the device waits for.
        hidden: of sending, what happens while the device computes.
        idle: what stages of a pipeline wait for each other.
        step: all together.
        tokens: of the step, over all ranks.
        flops: of the model for these tokens, without what is computed again.
        peak: of all cards together, operations per second; None where it is not known.
    """

    multiplying: float
    moving: float
    issuing: float
    sending: Mapping[str, float]
    copying: float
    on_host: float
    hidden: float
    idle: float
    step: float
    tokens: int
    flops: float
    peak: float | None

    @property
    def tokens_per_s(self) -> float:
        """The speed of all cards together."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, as `anygauge train` reports it; None without a known peak."""
        return None if self.peak is None else self.flops / self.step / self.peak

    def record(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "mfu": self.mfu}


def step_duration(
    work: Work,
    card: Card,
    ranks: int,
    per_machine: int,
    *,
    pipeline: tuple[int, int] = (1, 1),
    machine: Machine | None = None,
    dtype: str = "bfloat16",
    tokens: int = 1,
    flops: float = 0.0,
) -> Duration:
    """How long a step takes.

    Args:
        work: of the rank that has most.
        ranks: all of them; `per_machine` are on one.
        pipeline: its stages; and the micro-batches that a stage works on in a step, times the
            stages that a rank has.
        dtype: in which the model computes, whose peak MFU is of.
        tokens, flops: see `Duration`.

    Raises:
        UnknownRateError: a figure is missing; says which, and where it is written.
    """
    # Ranks whose device is the host share its processors and its memory.
    card = card.of_ranks(per_machine)
    copied = _rate(card.copy, COPY_SHARE, card.bandwidth, card, "bandwidth")
    multiplying = sum(count / _matmul_rate(card, kind) for kind, count in work.flops.items())
    multiplying = max(multiplying, work.matrix_bytes / copied)
    moving = work.other_bytes / copied
    issuing = work.operations * (ISSUE_S if card.issue is None else card.issue)
    computing = multiplying + moving
    if card.shared_memory:
        computing += issuing
    else:
        # One waits for the other in turn: between the longer of both and their sum.
        computing = math.hypot(computing, issuing)
    sending = {"cards": 0.0, "machines": 0.0}
    waited = 0.0
    for one in work.traffic:
        link, seconds = _send_time(one, card, per_machine, machine)
        sending[link] += seconds
        waited += seconds if one.waited else 0.0
    copying = 0.0
    if work.copied_bytes > STEP_BYTES:
        copying = work.copied_bytes / _rate(None, SEND_SHARE, card.host_link, card, "host_link")
    on_host = work.host_bytes * per_machine / HOST
    beside = sum(sending.values()) - waited + copying
    hidden = 0.0 if card.shared_memory else OVERLAP * min(computing, beside)
    busy = computing + beside + waited - hidden + on_host
    stages, rounds = pipeline
    idle = busy * (stages - 1) / rounds
    peak = card.flops.get(dtype)
    return Duration(
        multiplying=multiplying,
        moving=moving,
        issuing=issuing,
        sending=sending,
        copying=copying,
        on_host=on_host,
        hidden=hidden,
        idle=idle,
        step=busy + idle,
        tokens=tokens,
        flops=flops,
        peak=None if peak is None else peak * ranks,
    )


def _matmul_rate(card: Card, kind: str) -> float:
    """Operations per second of large matrix products of a type."""
    rates = [card.matmul.get(kind), card.flops.get(kind)]
    return _rate(rates[0], MATMUL_SHARE, rates[1], card, f"flops.{kind}")


def _rate(
    measured: float | None, part: float, published: float | None, card: Card, name: str
) -> float:
    if measured is not None:
        return measured
    if not published:
        raise UnknownRateError(
            f"the description of {card.name} ({card.origin}) does not say its {name}. Where such "
            "a card is at hand, `anygauge plan --calibrate` measures it; else write it in a file "
            "of your own (--hardware FILE.toml, docs/hardware.md)"
        )
    return part * published


def _send_time(
    one: Traffic, card: Card, per_machine: int, machine: Machine | None
) -> tuple[str, float]:
    """Over which link, and how long."""
    call = CALL_S if card.call is None else card.call
    if not one.crosses_machines(per_machine):
        link = card.link if machine is None or machine.link is None else machine.link
        rate = _rate(card.exchange, SEND_SHARE, link, card, "link")
        return "cards", one.times * call + one.wire_bytes / rate
    if machine is None or not machine.network:
        named = "no machine is named"
        if machine is not None:
            named = f"the description of machine {machine.name!r} has no network"
        raise UnknownRateError(
            "several machines send data to each other, but the speed of the network between them "
            f"is not known: {named}. Name a node type (--machine dgx-h100), or describe a machine "
            "with its `network` in a file of your own (--hardware FILE.toml, docs/hardware.md)"
        )
    # A ring enters and leaves each machine once; as many rings as a machine's ranks have groups.
    here = sum(rank // per_machine == one.group[0] // per_machine for rank in one.group)
    rings = per_machine / here
    return "machines", one.times * call + one.wire_bytes * rings / (SEND_SHARE * machine.network)
