"""Softmax in the type of its input, accumulated in float32, with masks and a scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reference() -> Callable[..., Tensor]:
    """The implementation in plain torch, for every device."""
    return softmax


def softmax(
    x: Tensor,
    dim: int = -1,
    mask: Tensor | None = None,
    scale: float = 1.0,
    *,
    causal_offset: int | None = None,
) -> Tensor:
    """softmax(scale * x + mask) along `dim`, in the type of `x`.

    Everything between input and output is float32 (float64 for float64). A row of which nothing is
    left becomes zero, and so does its gradient.

    Args:
        x: any shape and strides, floating.
        mask: broadcast to `x`. Boolean: True takes part. Floating: added after the scale, in
            float32; it gets a gradient if it asks for one.
        causal_offset: of the last two dimensions (rows, columns), row r sees columns up to
            r + causal_offset; `dim` must then be the last. None: all.

    Raises:
        ValueError: `causal_offset` with another `dim`.
    """
    check(x, dim, causal_offset)
    if mask is None and causal_offset is None and scale == 1.0:
        # Torch's own accumulates in float32 without a copy of the input in that type.
        return torch.softmax(x, dim)
    result: Tensor = _Softmax.apply(x, dim, mask, scale, causal_offset)
    return result


def check(x: Tensor, dim: int, causal_offset: int | None) -> None:
    """Raises: ValueError: `causal_offset` with another dimension than the last."""
    if causal_offset is not None and dim not in (-1, x.dim() - 1):
        raise ValueError(f"causal_offset needs the softmax of the last dimension, not of {dim}")


class _Softmax(torch.autograd.Function):
    """Keeps the output alone for backward, in its own type."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        mask: Tensor | None,
        scale: float,
        causal_offset: int | None,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = x.to(wide, copy=True).mul_(scale)
        if mask is not None and mask.dtype is not torch.bool:
            scores = scores.add_(mask) if _fits(mask, scores) else scores + mask
        hidden = _hidden(scores, mask, causal_offset)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        largest = scores.amax(dim, keepdim=True)
        # A row of -inf alone has nothing to subtract, and a sum of zero to divide by.
        empty = largest == -torch.inf
        scores.sub_(largest.masked_fill(empty, 0.0)).exp_()
        scores.div_(scores.sum(dim, keepdim=True).masked_fill_(empty, 1.0))
        output = scores.to(x.dtype)
        ctx.save_for_backward(output)
        ctx.dim, ctx.scale = dim, scale
        ctx.mask_shape = None if mask is None or mask.dtype is torch.bool else mask.shape
        ctx.mask_dtype = None if mask is None else mask.dtype
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        wide = torch.promote_types(output.dtype, torch.float32)
        product = grad.to(wide) * output
        by_scores = product - output * product.sum(ctx.dim, keepdim=True)
        by_mask = None
        if ctx.mask_shape is not None and ctx.needs_input_grad[2]:
            by_mask = by_scores.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)
        by_x = by_scores.mul_(ctx.scale).to(output.dtype) if ctx.needs_input_grad[0] else None
        return by_x, None, by_mask, None, None


def _fits(mask: Tensor, scores: Tensor) -> bool:
    return torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape


def _hidden(scores: Tensor, mask: Tensor | None, causal_offset: int | None) -> Tensor | None:
    """What takes no part, or None."""
    hidden = ~mask if mask is not None and mask.dtype is torch.bool else None
    if causal_offset is None:
        return hidden
    rows, columns = scores.shape[-2:]
    later = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
    later = later.triu_(causal_offset + 1)
    return later if hidden is None else hidden | later
