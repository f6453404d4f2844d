"""The `single` strategy: plain torch in one process.

The reference that other strategies are compared with, and the proof that the contract is nobody's
shape in particular. Weights are stored in the compute type; the optimizer works on float32 masters.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from anygauge.interface import BuildContext
from anygauge.strategies.shared.common import prepare_layers, torch_dtype
from anygauge.strategies.shared.footprint import EstimatedStrategy
from anygauge.strategies.shared.materialize import materialize
from anygauge.strategies.shared.torch_engine import TorchEngine


class Single(EstimatedStrategy):
    """One process, one device, the whole model."""

    description = "single"

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def build(self, context: BuildContext) -> TorchEngine:
        """See `Strategy.build`."""
        return TorchEngine(build_whole(context), context)


def build_whole(context: BuildContext) -> nn.Module:
    """The whole model on the opened device, with its adapter, in the compute type."""
    model = context.factory.skeleton()
    materialize(
        model,
        context.factory,
        device=context.workload.backend.placement.device,
        dtype=torch_dtype(context.workload.precision.param_dtype),
    )
    model = context.factory.adapt(model)
    prepare_layers(model, context)
    return model
