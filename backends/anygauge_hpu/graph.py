"""The graph facet: where lazy mode's graph is cut, what compile mode compiles, which shapes."""

from __future__ import annotations

from collections.abc import Mapping

from anygauge.interface import Compiler, Graph, HeldAtOnce, Phase, ShapeKind, ShapePolicy
from anygauge_hpu.mode import Mode
from anygauge_hpu.options import HpuOptions

COMPILER = "hpu_backend"
"""torch.compile's backend (gaudi-pytorch-bridge, dynamo/compile_backend/backends.py)."""

COUNTERS = (
    ("compiled", "graph_compilation", "TotalNumber", 1),
    ("compile_s", "graph_compilation", "TotalTime", 1e-6),  # given in microseconds
    ("fallbacks", "cpu_fallback", "TotalNumber", 1),
    ("reused", "recipe_cache", "TotalHit", 1),
)
"""Name of a counter -> the library's metric, its statistic, and what that is multiplied with."""


WARM_UP = 2
"""After one alone, a width that only the first step had is compiled once more: from the second on,
DeepSpeed fetches weights ahead, in other pieces (counted: docs/gaudi.md, the census)."""

_REENTRANT = (
    "lazy mode has been run with the reentrant form alone: Intel's DeepSpeed and optimum-habana "
    "recompute by a function of that form, which ends the graph before each layer"
)
"""Source: HabanaAI/DeepSpeed 1.21.0, activation_checkpointing/checkpointing.py; optimum-habana,
trainer.py."""


_HELD = HeldAtOnce(
    share=0.474,
    source="fitted to one run, LoRA of Llama-2-70B on 8 cards, whose peak was published as 73.9 GB",
)
"""Nothing else is published of the memory of Gaudi's graphs."""


class HpuGraph(Graph):
    """Graphs of a mode. In lazy mode the limit itself is kept by Gaudi's library, which reads it
    from the environment."""

    def __init__(self, mode: Mode, options: HpuOptions) -> None:
        self._mode = mode
        self._between = options.split_forward_backward
        self.accumulates = mode is Mode.LAZY
        self.limit = options.graph_limit if mode is Mode.LAZY else None
        # Intel's DeepSpeed did this up to 1.15.1, as a workaround, and not since 1.16.0
        # (runtime/zero/partition_parameters.py, free_param): no release that runs here needs it.
        self.sync_on_release = options.sync_on_release
        self.reentrant_only = _REENTRANT if mode is Mode.LAZY else ""
        # Every new shape is compiled anew, in each mode.
        self.shapes = ShapePolicy(
            kind=ShapeKind.BUCKETED,
            multiple=32,
            buckets=options.buckets,
            warm_up=WARM_UP if options.warm_up else 0,
        )
        self.held = None if mode is Mode.EAGER else _HELD
        self.compiler = (
            Compiler(backend=COMPILER, regions="layer") if mode is Mode.COMPILE else None
        )

    def mark_step(self, phase: Phase) -> None:
        """Cut the graph at each place that a phase names, after forward only if that was asked for.

        Engines call it after forward, backward and update (also forward in an evaluation),
        recomputation before a layer computes its activations again, and the loss before and after
        each of its chunks. Cuts in lazy mode alone: in the others, the library's function does
        nothing but warn.
        """
        if self._mode is not Mode.LAZY or (phase is Phase.FORWARD and not self._between):
            return
        from habana_frameworks.torch.core import mark_step

        mark_step()

    def counters(self) -> Mapping[str, float]:
        """By Gaudi's own metrics: graphs compiled so far and the seconds that took, operators that
        the host ran in the device's place, and graphs that a recipe was there for.

        The last is counted only where ``PT_HPU_ENABLE_CACHE_METRICS=1`` is exported: the library
        calls Python for every graph then (gaudi-pytorch-bridge, hpu/metrics/metrics.py).
        """
        from habana_frameworks.torch.hpu.metrics import metric_global

        found = {}
        for key, metric_name, tag, unit in COUNTERS:
            metric = metric_global(metric_name)
            stats = {} if metric is None else dict(metric.stats())
            if tag in stats:
                found[key] = float(stats[tag]) * unit
        return found
