"""How a device's graphs and shapes are driven: for one that compiles or accumulates graphs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Compiler", "Graph", "HeldAtOnce", "Phase", "ShapeKind", "ShapePolicy"]


class Phase(enum.Enum):
    """The places in a step where a graph may be cut.

    ``FORWARD``, ``BACKWARD`` and ``UPDATE`` are at the end of each. ``RECOMPUTE`` is in backward,
    before a layer computes its activations again; ``CHUNK`` is in forward, before and after each
    chunk of the loss. Without these two, one graph would be as large as the model and hold what all
    of its layers, or chunks, need at once.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    RECOMPUTE = "recompute"
    CHUNK = "chunk"


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
        warm_up: first steps of a process in which each length that the run will have is computed,
            by a micro-batch without rows if no row has it there; 0: none. For a device that
            compiles each new shape when bucketed: later steps then wait for no compilation.
    """

    kind: ShapeKind = ShapeKind.DYNAMIC
    multiple: int = 1
    buckets: int = 8
    warm_up: int = 0

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAtOnce:
    """What a graph compiler makes of a layer's memory: it fuses operations, and reuses memory.

    Attributes:
        share: of what operations one by one would have at once in a layer, or in the loss, and free
            again: the part that the compiled graph has; and so of what they read and write.
        source: a published figure; or that it is fitted to a run, and to which.
    """

    share: float
    source: str


class Graph:
    """Defaults for a device that runs each operation as it comes."""

    limit: int | None = None
    """Most operations in one graph; None where the device has no such limit."""

    accumulates: bool = False
    """Whether operations accumulate in a graph that `mark_step` ends."""

    sync_on_release: bool = False
    """Whether gathered parameters may be freed only after a synchronization."""

    reentrant_only: str = ""
    """Why layers are to be recomputed in backward by torch's reentrant form here, in words; empty
    where either form will do."""

    shapes: ShapePolicy = ShapePolicy()
    compiler: Compiler | None = None
    """What compiles a model's regions; None where nothing does."""

    held: HeldAtOnce | None = None
    """For plans; None where operations run one by one."""

    def mark_step(self, phase: Phase) -> None:
        """End the graph accumulated so far. Nothing to do on an eager device."""

    def counters(self) -> Mapping[str, float]:
        """Of this process since it began, such as graphs ``compiled``; every step's metrics have
        them, as ``graph_compiled``.

        A device with graphs counts them here: that is how the conformance kit sees one end.
        """
        return {}
