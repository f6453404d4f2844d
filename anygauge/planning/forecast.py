"""What a plan found: bytes by phase and by what they are for, and what a step computes, moves and
sends. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from anygauge.interface import Precision, Traffic
from anygauge.interface.estimate import BACKWARD, EVALUATION, FORWARD, LOAD, LOSS, SAVE, UPDATE

PHASES = (LOAD, FORWARD, LOSS, BACKWARD, UPDATE, EVALUATION, SAVE)


@dataclass(kw_only=True, slots=True)
class Work:
    """The work of one optimizer step of one rank.

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

    def add(self, other: Work, times: float = 1.0) -> Work:
        """Return the sum with so many times the traced operations of another one."""
        flops = dict(self.flops)
        for kind, count in other.flops.items():
            flops[kind] = flops.get(kind, 0.0) + times * count
        return replace(
            self,
            flops=flops,
            matrix_bytes=self.matrix_bytes + times * other.matrix_bytes,
            other_bytes=self.other_bytes + times * other.other_bytes,
            operations=self.operations + times * other.operations,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that is there at once, in bytes.

    Attributes:
        total: of all kinds.
        kinds: what for -> bytes, at that time.
    """

    total: int
    kinds: Mapping[str, int]

    @classmethod
    def of(cls, *parts: Mapping[str, int]) -> Peak:
        """Return the peak of several together."""
        kinds: dict[str, int] = {}
        for part in parts:
            for kind, size in part.items():
                kinds[kind] = kinds.get(kind, 0) + round(size)
        kinds = {kind: size for kind, size in kinds.items() if size}
        return cls(total=sum(kinds.values()), kinds=kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """What the rank of a run holds that holds most.

    Attributes:
        device, host: phase -> the most that is there at once. A device whose memory is the host's
            has no second list.
        work: of a step of the rank that computes most.
        model_flops: of a token, and of a token for each position of its row; see
            `anygauge.models.flops`.
        strategy: in words.
        numbers: parameters of the model, and those of them that are trained.
        per_layer: bytes that forward keeps of a layer for backward, for each micro-batch, on
            average.
        kernels: operation -> kernel that was assumed.
        positions: that the model was made for; None where it says none.
        uncompiled: as `device`, where operations would run one by one; empty where they do.
        compiled: where the difference is from; see `HeldAtOnce`.
    """

    device: dict[str, Peak]
    host: dict[str, Peak]
    work: Work
    model_flops: tuple[float, float]
    strategy: str
    precision: Precision
    numbers: tuple[int, int]
    per_layer: int
    kernels: Mapping[str, str]
    positions: int | None = None
    uncompiled: dict[str, Peak] = field(default_factory=dict)
    compiled: str = ""

    @property
    def worst_phase(self) -> tuple[str, Peak]:
        """The phase that takes most of the device."""
        phase = max(self.device, key=lambda name: self.device[name].total)
        return phase, self.device[phase]

    def with_other(self, other: RunMemory) -> RunMemory:
        """The most of two ranks of a run, by phase, and the work of the one that has more."""

        def most(one: Mapping[str, Peak], two: Mapping[str, Peak]) -> dict[str, Peak]:
            # The last stage of a pipeline alone has a loss.
            phases = (phase for phase in PHASES if phase in one or phase in two)
            both = {phase: [p[phase] for p in (one, two) if phase in p] for phase in phases}
            return {phase: max(peaks, key=lambda peak: peak.total) for phase, peaks in both.items()}

        return replace(
            self,
            device=most(self.device, other.device),
            host=most(self.host, other.host),
            uncompiled=most(self.uncompiled, other.uncompiled),
            work=max(self.work, other.work, key=lambda work: sum(work.flops.values())),
        )
