"""The low-rank product of a LoRA layer, added to its base's output in one operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def addmm() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """By torch's product that adds: the scale costs nothing, and backward passes as it is."""
    return lora_linear


def lora_linear(output: Tensor, low: Tensor, weight: Tensor, scale: float) -> Tensor:
    """output + scale * (low @ weight.T), as a new tensor.

    Args:
        output: (..., V), of the frozen layer.
        low: (..., R), of the first factor.
        weight: (V, R), the second factor.
    """
    flat = output.reshape(-1, output.shape[-1])
    found = torch.addmm(flat, low.reshape(-1, low.shape[-1]), weight.t(), alpha=scale)
    return found.view(output.shape)
