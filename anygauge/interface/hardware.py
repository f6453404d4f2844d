"""Descriptions of cards and machines that plans are made of: TOML of plugins and of users.

Cards come with the backend that drives them, node types with the launcher that starts them. Each
figure stands beside its source, and what nobody has published is left out::

    [card.mine]
    names = ["Maker Mine 80GB"]
    memory = ["79.1 GiB", "torch's total on such a card"]
    bandwidth = ["3.35 TB/s", "the maker's data sheet"]
    flops.bfloat16 = ["989 TFLOPS", "the same: 1,979 with sparsity, halved"]

    [machine.mine-8]
    card = "mine"
    cards = [8, "the rental's page"]
    network = ["3200 Gb/s", "the same"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

__all__ = ["Card", "Machine", "Rates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What each of several ranks was measured to reach that share one card; see `Card`."""

    matmul: Mapping[str, float] = field(default_factory=dict)
    copy: float | None = None
    exchange: float | None = None
    call: float | None = None
    issue: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One device as a process sees it. A figure that nobody has published is None.

    Attributes:
        name: what users write, such as ``h100``.
        names: other names it goes by; those of its driver are written as the driver does.
        backend: the backend that drives it; "" where there is none.
        memory: bytes that a process can have of it at most, its own context included: the total
            that torch reports, which is less than what is printed on the card.
        reserved: bytes of `memory` that its context and libraries take before any tensor.
        flops: type, such as ``bfloat16``, -> dense peak, operations per second, without sparsity;
            ``float32`` without any shorter type inside.
        bandwidth: of its memory, bytes per second.
        link: to the other cards of its machine, bytes per second, one direction, all links of one
            card together; 0 where cards cannot reach each other.
        host_link: to the memory of its host, bytes per second, one direction.
        matmul: type -> what large matrix products were measured to reach, operations per second.
        copy: what large copies within its memory were measured to read and write, bytes per second.
        exchange: what was measured to leave each card where all of a machine gather large tensors,
            bytes per second.
        call: what a collective was measured to take that sends next to nothing, seconds.
        issue: what an operation was measured to take its host, in seconds, beside what it computes
            and moves.
        shared_memory: its memory is the host's, and all cards of a machine share it.
        ranks: ranks of a machine -> what each reaches where so many share it.
        asked: figures that are asked of the machine at hand, by `BackendSpec.this_machine`.
        sources: figure -> where it is from; ``flops.bfloat16`` for one of `flops`, and so `matmul`.
        origin: the plugin or file that describes it.
    """

    name: str
    names: tuple[str, ...] = ()
    backend: str = ""
    memory: int | None = None
    reserved: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    link: float | None = None
    host_link: float | None = None
    matmul: Mapping[str, float] = field(default_factory=dict)
    copy: float | None = None
    exchange: float | None = None
    call: float | None = None
    issue: float | None = None
    shared_memory: bool = False
    ranks: Mapping[int, Rates] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""

    def of_ranks(self, ranks: int) -> Card:
        """The card as each of so many ranks of a machine has it.

        Where it is shared, by as many as were measured, or by more: they then divide what those
        reached.
        """
        if not self.shared_memory:
            return self
        known = min((n for n in self.ranks if n >= ranks), default=max(self.ranks, default=0))
        one = replace(self, **asdict(self.ranks[known])) if known else self
        share = max(1.0, ranks / known) if known else ranks
        rates = ("copy", "exchange", *(() if known else ("bandwidth", "link")))
        divided = {name: getattr(one, name) / share for name in rates if getattr(one, name)}
        return replace(
            one,
            **divided,
            matmul={kind: rate / share for kind, rate in one.matmul.items()},
            flops={kind: rate / ranks for kind, rate in one.flops.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One node type. A figure that nobody has published is None.

    Attributes:
        name: what users write, such as ``p5.48xlarge``.
        names: other names it goes by.
        card: name of its cards.
        cards: how many of them.
        link: as `Card.link`, where this machine's differs from its cards'.
        network: to other machines, bytes per second, one direction, the whole machine.
        host_memory: bytes.
        cores: of its processors, as its provider counts them (clouds: vCPUs).
        disk: bytes of its local disks.
        disk_rate: of its local disks, bytes per second.
        price: per hour, in whatever currency the user's file has; published ones change.
        imagined: no list has it: it was named by its cards and their number.
        sources: figure -> where it is from.
        origin: the plugin or file that describes it.
    """

    name: str
    names: tuple[str, ...] = ()
    card: str = ""
    cards: int = 0
    link: float | None = None
    network: float | None = None
    host_memory: int | None = None
    cores: int | None = None
    disk: int | None = None
    disk_rate: float | None = None
    price: float | None = None
    imagined: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
