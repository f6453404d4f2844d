"""Floating-point operations of a training step, for model FLOPs utilization (MFU).

Per token, a weight of a matrix product costs 2 operations forward, 2 for the gradient of its input
and 2 for its own gradient; a frozen weight has no own gradient. Attention scores cost 4 x heads x
head size x (positions seen) forward and twice that backward; a causal token sees half of its row.
Recomputation is not counted: MFU is about the model, not about what the run chose to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.kernels.attention import config_value


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Operations as a function of tokens and of the tokens' row length."""

    per_token: float
    per_token_and_position: float

    def of(self, tokens: int, row_length: float) -> float:
        """Operations for `tokens` tokens in rows of `row_length`."""
        return tokens * (self.per_token + self.per_token_and_position * row_length)


def step_flops(
    model: nn.Module, config: Any, shape_of: Callable[[nn.Parameter], Sequence[int]]
) -> StepFlops:
    """Count from the parameters of linear layers.

    Args:
        shape_of: the whole shape of a parameter, sharded or not.
    """
    per_token = 0.0
    seen: set[int] = set()
    for module in model.modules():
        weight = _weight(module)
        if weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        shape = getattr(module, "plain_shape", None) or shape_of(weight)
        per_token += math.prod(shape) * (6 if weight.requires_grad else 4)
    layers = config_value(config, "num_hidden_layers") or 0
    heads = config_value(config, "num_attention_heads") or 0
    size = config_value(config, "head_dim") or (
        (config_value(config, "hidden_size") or 0) // heads if heads else 0
    )
    # Two products (scores, values) x 2 operations x half the row, three times (forward, backward).
    return StepFlops(per_token=per_token, per_token_and_position=6.0 * layers * heads * size)


def _weight(module: nn.Module) -> Any:
    """The weight of a linear layer, torch's or a device's own; None of any other module."""
    if isinstance(module, nn.Linear):
        return getattr(module, "weight", None)
    # Not by getattr: peft's wrappers make a weight when they are asked for one.
    own = module._parameters.get("weight")
    return own if hasattr(module, "in_features") and hasattr(module, "out_features") else None
