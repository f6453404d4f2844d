"""What a step of one rank computes, moves and sends. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anygauge.interface.strategy import Traffic

PLAIN = ("matrix_bytes", "other_bytes", "copied_bytes", "host_bytes", "operations")
"""Figures of `Work` that are plain numbers."""


@dataclass(kw_only=True, slots=True)
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

    flops: Mapping[str, float] = field(default_factory=dict)
    matrix_bytes: float = 0.0
    other_bytes: float = 0.0
    copied_bytes: float = 0.0
    host_bytes: float = 0.0
    operations: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """With so many times what another one is; its traffic does not count."""
        kinds = {**self.flops, **other.flops}
        return Work(
            flops={
                kind: self.flops.get(kind, 0.0) + times * other.flops.get(kind, 0.0)
                for kind in kinds
            },
            **{name: getattr(self, name) + times * getattr(other, name) for name in PLAIN},
            traffic=self.traffic,
        )
