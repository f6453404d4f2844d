"""The graph facet: how a device that compiles or accumulates graphs wants to be driven."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Phase(enum.Enum):
    """The places in a step where a graph may be cut."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class ShapeKind(enum.Enum):
    """What changing tensor shapes cost on a device."""

    DYNAMIC = "dynamic"
    BUCKETED = "bucketed"
    STATIC = "static"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapePolicy:
    """How the sequence dimension of a batch is padded.

    Attributes:
        kind: ``DYNAMIC`` pads to the longest row, ``BUCKETED`` to the next bucket,
            ``STATIC`` to the run's maximum length.
        multiple: lengths are rounded up to a multiple of this many tokens.
        buckets: number of distinct lengths when bucketed, equally spaced up to the maximum.
    """

    kind: ShapeKind = ShapeKind.DYNAMIC
    multiple: int = 1
    buckets: int = 8

    def padded_length(self, longest: int, maximum: int) -> int:
        """Tokens to pad to, for a batch whose longest row has `longest` of at most `maximum`."""
        if self.kind is ShapeKind.STATIC:
            return maximum
        unit = self.multiple
        if self.kind is ShapeKind.BUCKETED:
            per_bucket = -(-maximum // self.buckets)
            unit = -(-per_bucket // self.multiple) * self.multiple
        return min(maximum, -(-longest // unit) * unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """A torch.compile backend and the regions it should see (``model`` or ``layer``)."""

    backend: str
    regions: str


class Graph:
    """Defaults for a device that runs each operation as it comes."""

    limit: int | None = None
    """Most operations in one graph; None where the device has no such limit."""

    sync_on_release: bool = False
    """Whether gathered parameters may be freed only after a synchronisation."""

    shapes: ShapePolicy = ShapePolicy()
    compiler: Compiler | None = None

    def mark_step(self, phase: Phase) -> None:
        """End the graph accumulated so far. Nothing to do on an eager device."""

    def counters(self) -> Mapping[str, float]:
        """Of this process since it began, such as graphs ``compiled``; every step's metrics have
        them, as ``graph_compiled``.

        A device with graphs counts them here: that is how the conformance kit sees one end.
        """
        return {}
