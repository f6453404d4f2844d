"""The optimizer: AdamW, with decay on matrices only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from anygauge.config.schema import OptimizerSection


def optimizer_factory(
    section: OptimizerSection,
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """A function that makes the run's optimizer from named parameters.

    Vectors (norms and biases) are not decayed: pulling a scale towards zero has no purpose.
    A sharded parameter shows its whole shape in ``ds_shape``.
    """

    def make(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for _, parameter in parameters:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) >= 2 else plain).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": section.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
        )

    return make
