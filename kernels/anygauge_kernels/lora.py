"""LoRA's two products without the copies that modules make of a layer's input and output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anygauge.interface import LoraKernel


def addmm() -> LoraKernel:
    """By torch's product that adds: the scale costs nothing, and backward passes as it is."""
    return LoraKernel(down=down, up=up)


def down(x: Tensor, weight: Tensor, dropout: float) -> Tensor:
    """dropout(x) @ weight.T.

    Kept for backward: x itself, which layers of one input share, and the draws. Draws, and so the
    result, are those of `torch.nn.functional.dropout`.

    Args:
        x: (..., D).
        weight: (R, D), the first factor, of x's type.
        dropout: probability of a zero.
    """
    if dropout == 0 or not x.requires_grad:  # the draws are for the gradient of x alone
        return functional.linear(functional.dropout(x, dropout), weight)
    result: Tensor = _DroppedProduct.apply(x, weight, dropout)
    return result


def up(output: Tensor, low: Tensor, weight: Tensor, scale: float) -> Tensor:
    """output + scale * (low @ weight.T), as a new tensor.

    Args:
        output: (..., V), of the frozen layer.
        low: (..., R), of the first factor.
        weight: (V, R), the second factor.
    """
    flat = output.reshape(-1, output.shape[-1])
    found = torch.addmm(flat, low.reshape(-1, low.shape[-1]), weight.t(), alpha=scale)
    return found.view(output.shape)


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dropout: float) -> Tensor:
        # Zeros, and 1 / (1 - dropout): x times these is what dropout makes of x.
        factors = functional.dropout(torch.ones_like(x), dropout, inplace=True)
        ctx.save_for_backward(x, factors, weight)
        return functional.linear(x * factors, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, factors, weight = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ (x * factors).flatten(0, -2)
        return (grad @ weight).mul_(factors), of_weight, None
