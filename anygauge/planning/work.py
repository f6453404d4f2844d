"""What a step of one rank computes, moves and sends. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank gives to collectives of one kind over one group, in one step.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``,
            ``broadcast``, ``reduce`` or ``send``.
        group: ranks of the job that take part.
        waited: whether a rank waits for each call before it continues, as for parts of a divided
            layer; else others are under way meanwhile.
        times: how often.
        bytes: what goes in of a reduction, what comes out of a gather, all calls together.
    """

    operation: str
    group: tuple[int, ...]
    waited: bool
    times: float
    bytes: float

    @property
    def wire(self) -> float:
        """Bytes that leave each rank where a ring carries them."""
        share = (len(self.group) - 1) / len(self.group)
        if self.operation == "all_reduce":
            return 2 * share * self.bytes
        return self.bytes if self.operation == "send" else share * self.bytes

    def spans(self, per_machine: int) -> bool:
        """Whether it leaves a machine of so many ranks."""
        return len({rank // per_machine for rank in self.group}) > 1


PLAIN = ("matrix_bytes", "other_bytes", "copied_bytes", "host_bytes", "operations")
"""Figures of `Work` that are plain numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of one optimizer step of one rank.

    Attributes:
        flops: type -> floating point operations of matrix products, recomputed ones among them.
        matrix_bytes: what these read and write.
        other_bytes: what all other operations read and write.
        copied_bytes: of them, what they copy to the host or from it.
        host_bytes: what operations on the host read and write, where that is not the device.
        operations: how many there are of both, without views.
        traffic: what is sent.
    """

    flops: Mapping[str, float]
    matrix_bytes: float
    other_bytes: float
    copied_bytes: float
    host_bytes: float
    operations: float
    traffic: tuple[Traffic, ...]

    @classmethod
    def none(cls) -> Work:
        """Nothing at all."""
        return cls(flops={}, traffic=(), **dict.fromkeys(PLAIN, 0.0))

    def flat(self) -> dict[tuple[Any, ...], float]:
        """Each figure by a name, for arithmetic; `of_flat` makes work of it again."""
        figures: dict[tuple[Any, ...], float] = {
            ("flops", kind): count for kind, count in self.flops.items()
        }
        figures |= {(name,): getattr(self, name) for name in PLAIN}
        for one in self.traffic:
            figures["times", one.operation, one.group, one.waited] = one.times
            figures["bytes", one.operation, one.group, one.waited] = one.bytes
        return figures

    @classmethod
    def of_flat(cls, figures: Mapping[tuple[Any, ...], float]) -> Work:
        """See `flat`."""

        def traffic() -> Iterator[Traffic]:
            for kind, *key in figures:
                if kind == "times" and figures["bytes", *key] > 0:
                    operation, group, waited = key
                    yield Traffic(
                        operation=operation,
                        group=group,
                        waited=waited,
                        times=figures["times", *key],
                        bytes=figures["bytes", *key],
                    )

        return cls(
            flops={key[1]: value for key, value in figures.items() if key[0] == "flops"},
            **{name: figures[name,] for name in PLAIN},
            traffic=tuple(traffic()),
        )

    def further(self, before: Work, turns: float) -> Work:
        """So many times more of what there is beyond `before`."""
        mine, other = self.flat(), before.flat()
        keys = {**other, **mine}
        return Work.of_flat(
            {
                key: max(0.0, mine.get(key, 0) + turns * (mine.get(key, 0) - other.get(key, 0)))
                for key in keys
            }
        )

    def plus(self, other: Work) -> Work:
        """Both together."""
        mine, more = self.flat(), other.flat()
        return Work.of_flat(
            {key: mine.get(key, 0.0) + more.get(key, 0.0) for key in {**mine, **more}}
        )

    @property
    def given(self) -> dict[str, float]:
        """Operation -> bytes, over all groups; as `Footprint.sent` has them."""
        found: dict[str, float] = {}
        for one in self.traffic:
            found[one.operation] = found.get(one.operation, 0) + one.bytes
        return found

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Work:
        """What JSON holds of it, made it again."""
        traffic = (Traffic(**{**one, "group": tuple(one["group"])}) for one in record["traffic"])
        return cls(**{**record, "traffic": tuple(traffic)})
