"""The `single` strategy: plain torch in one process.

The reference that other strategies are compared with, and the proof that the contract is nobody's
shape in particular. Weights are stored in the compute type; the optimizer works on float32 masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from anygauge.interface import Setting
from anygauge.interface.strategy import BuildContext, Footprint, MemoryEstimate, Workload
from anygauge.strategies.common import prepare, torch_dtype
from anygauge.strategies.footprint import whole_memory, whole_model
from anygauge.strategies.materialise import materialise
from anygauge.strategies.torch_engine import TorchEngine


class SinglePlanner:
    """See `StrategyPlanner`."""

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        return whole_memory(workload)

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """See `StrategyPlanner.part_of`; it is all of it."""


class Single:
    """One process, one device, the whole model."""

    description = "single"
    planner = SinglePlanner()

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Plain torch has no configuration of its own."""
        return ()

    def footprint(self, workload: Workload) -> Footprint:
        """See `Strategy.footprint`."""
        return whole_model(workload)

    def build(self, context: BuildContext) -> TorchEngine:
        """See `Strategy.build`."""
        return TorchEngine(build_whole(context), context)


def build_whole(context: BuildContext) -> nn.Module:
    """The whole model on the opened device, with its adapter, in the compute type."""
    model = context.factory.skeleton()
    materialise(
        model,
        context.factory,
        device=context.backend.placement.device,
        dtype=torch_dtype(context.precision.param_dtype),
    )
    model = context.factory.adapt(model)
    prepare(model, context)
    return model
