"""Softmax in the type of its input, accumulated in float32, with masks and a scale."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return _trained_mask(x, dim, mask, scale, causal_offset)
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
        if mask is not None:
            # Broadcast without a copy, so that a piece of it belongs to a piece of x.
            shape = torch.broadcast_shapes(x.shape, mask.shape)
            x, mask = x.expand(shape), mask.expand(shape).movedim(dim, -1)
        source = x.movedim(dim, -1)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        target = output.movedim(dim, -1)
        for piece, first_row in _pieces(source):
            scores = source[piece].to(wide, copy=True)
            if scale != 1.0:
                scores.mul_(scale)
            if mask is not None and mask.dtype is not torch.bool:
                scores.add_(mask[piece])
            elif mask is not None:
                scores.sub_(_infinite_where_hidden(mask[piece], wide))
            if causal_offset is not None:
                seen = _causal_mask(scores, causal_offset + first_row)
                scores.sub_(_infinite_where_hidden(seen, wide))
            weights = torch.softmax(scores, -1)
            empty = scores.amax(-1, keepdim=True) == -torch.inf
            # A row of -inf alone is nan / nan. The host knows whether there is one at all.
            if x.device.type != "cpu" or empty.any():
                weights.masked_fill_(empty, 0.0)
            target[piece] = weights
        ctx.save_for_backward(output)
        ctx.dim, ctx.scale = dim, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        wide = torch.promote_types(output.dtype, torch.float32)
        result = torch.empty_like(output)
        target, weights, upstream = (t.movedim(ctx.dim, -1) for t in (result, output, grad))
        for piece, _ in _pieces(weights):
            slopes = torch.ops.aten._softmax_backward_data(
                upstream[piece].to(wide), weights[piece].to(wide), -1, wide
            )
            target[piece] = slopes.mul_(ctx.scale) if ctx.scale != 1.0 else slopes
        return result, None, None, None, None


IN_CACHE = 2**18
"""Elements of a piece on the host: 1 MiB in float32, which a core keeps near."""


def _pieces(x: Tensor) -> Iterator[tuple[Any, int]]:
    """Indices that cover all rows (..., columns), each with the number of its first row.

    On the host, piece after piece stays in the cache while several operations go over it; other
    devices take all at once.
    """
    if x.device.type != "cpu" or x.numel() <= IN_CACHE or x.dim() == 1:
        yield ..., 0
        return
    axis, below = x.dim() - 2, x.shape[-1]
    while axis > 0 and below * x.shape[axis] <= IN_CACHE:
        below *= x.shape[axis]
        axis -= 1
    step = max(1, IN_CACHE // below)
    for outer in itertools.product(*map(range, x.shape[:axis])):
        for start in range(0, x.shape[axis], step):
            first_row = start if axis == x.dim() - 2 else 0
            yield (*outer, slice(start, start + step)), first_row


def _causal_mask(scores: Tensor, offset: int) -> Tensor:
    """Columns that a row reaches: (rows, columns) bool."""
    rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return columns <= rows[:, None] + offset


def _infinite_where_hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where True, inf where False: 1 / 1 - 1 and 1 / 0 - 1.

    By arithmetic, because selecting by a mask takes several times as long on the host.
    """
    return seen.view(torch.uint8).to(dtype).reciprocal_().sub_(1)


def _trained_mask(x: Tensor, dim: int, mask: Tensor, scale: float, offset: int | None) -> Tensor:
    """By operations that torch differentiates, for a mask that asks for a gradient."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.to(wide) * scale + mask
    if offset is not None:
        scores = scores.masked_fill(~_causal_mask(scores, offset), -torch.inf)
    empty = scores.amax(dim, keepdim=True) == -torch.inf
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim).masked_fill(empty, 0.0)
    return weights.to(x.dtype)
