"""The graph facet: operations are counted, graphs are ended where the loop says so or when full.

On this device an operation only adds a node to a graph. A graph is compiled and run when it is
ended, or when somebody asks for a number in it. Graphs of the same operations and shapes are
compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge.interface import Graph, Phase, ShapeKind, ShapePolicy


class LazyGraph(Graph):
    """Graphs of at most `limit` operations, from `start` to `stop`."""

    limit: int
    accumulates = True
    shapes = ShapePolicy(kind=ShapeKind.STATIC)

    def __init__(self) -> None:
        self._mode: Any = None

    def start(self) -> None:
        """Count operations from now on in this thread and the backward passes that it starts."""
        from anygauge_lazy.cuts import CutWhenFull

        self._mode = CutWhenFull(self.limit)
        self._mode.__enter__()

    def stop(self) -> None:
        """End what is left, and count no more."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def mark_step(self, phase: Phase) -> None:
        """End the graph: compile it, unless one like it was compiled before, and run it."""
        if self._mode is not None:
            from anygauge_lazy.cuts import end_graph

            end_graph()

    def counters(self) -> Mapping[str, float]:
        """See `anygauge_lazy.cuts.counters`; ``largest`` is the operations of the largest graph."""
        from anygauge_lazy.cuts import counters

        largest = 0 if self._mode is None else self._mode.largest
        return {**counters(), "largest": float(largest)}
