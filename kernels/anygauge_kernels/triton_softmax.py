"""Softmax in Triton: scale and mask in the same pass, rows of any length.

Rows that fit are read once and kept in registers; longer ones are read twice, with a running
maximum and sum (online softmax), so that no length is too long. Where there are too few long rows
to occupy a device, several programs share each. Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_kernels import softmax as plain

ONE_PASS = 32768
"""Columns up to which a row stays in registers: 32 to 64 values for each of 512 to 1024 threads."""
TILE = 2048
"""Elements that one program takes at least, as several short rows."""
STEP = 8192
"""Columns that a program reads at a time of a row that does not fit."""
PROGRAMS = 512
"""Long rows below which each is shared: a few programs for each multiprocessor of a large GPU."""
WHOLE, SUM, WRITE = 0, 1, 2
"""What a program does of a long row: all; or its part of the sum, and of the rest afterwards."""

NO_MASK, BOOLEAN, ADDITIVE = 0, 1, 2


def kernel() -> Callable[..., Tensor]:
    """The implementation; a mask that needs a gradient goes through plain torch."""
    return softmax


def softmax(
    x: Tensor,
    dim: int = -1,
    mask: Tensor | None = None,
    scale: float = 1.0,
    *,
    causal_offset: int | None = None,
) -> Tensor:
    """See `anygauge_kernels.softmax.softmax`; for a device that Triton compiles for."""
    trained = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if trained or x.dtype is torch.float64 or x.dim() > 4 or x.numel() == 0:
        return plain.softmax(x, dim, mask, scale, causal_offset=causal_offset)
    plain.check(x, dim, causal_offset)
    if mask is not None:
        x = x.expand(torch.broadcast_shapes(x.shape, mask.shape))
    result: Tensor = _TritonSoftmax.apply(x, dim, mask, scale, causal_offset)
    return result


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        mask: Tensor | None,
        scale: float,
        causal_offset: int | None,
    ) -> Tensor:
        rows = x.movedim(dim, -1).contiguous()
        output = torch.empty_like(rows)
        columns = rows.shape[-1]
        # (A, B, C, columns): a row's place in the mask follows from its number.
        shape = (1,) * (4 - rows.dim()) + tuple(rows.shape)
        kind, strides, pointer = NO_MASK, (0, 0, 0, 0), rows
        if mask is not None:
            kind = BOOLEAN if mask.dtype is torch.bool else ADDITIVE
            wide = mask.expand(x.shape).movedim(dim, -1)
            a, b, c, d = wide.expand(shape).stride()
            strides = (a, b, c, d)
            pointer = mask.view(torch.uint8) if kind == BOOLEAN else mask
        count = rows.numel() // columns
        arguments = (
            output, rows, pointer, count, columns, shape[1], shape[2], *strides, scale,
            0 if causal_offset is None else causal_offset,
        )  # fmt: skip
        meta = {"MASK": kind, "CAUSAL": causal_offset is not None}
        if columns <= ONE_PASS:
            tile, block, warps = _tile(columns)
            _forward_rows[(triton.cdiv(count, tile),)](
                *arguments, **meta, ROWS=tile, BLOCK=block, num_warps=warps
            )
        else:
            _launch_long_rows(_forward_long, count, columns, arguments, meta, rows.device)
        ctx.save_for_backward(output)
        ctx.dim, ctx.scale = dim, scale
        return output.movedim(-1, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        upstream = grad.movedim(ctx.dim, -1).contiguous()
        result = torch.empty_like(output)
        columns = output.shape[-1]
        count = output.numel() // columns
        arguments = (result, output, upstream, count, columns, ctx.scale)
        if columns <= ONE_PASS // 2:  # two rows are held
            tile, block, warps = _tile(columns)
            _backward_rows[(triton.cdiv(count, tile),)](
                *arguments, ROWS=tile, BLOCK=block, num_warps=warps
            )
        else:
            _launch_long_rows(_backward_long, count, columns, arguments, {}, output.device)
        return result.movedim(-1, ctx.dim), None, None, None, None


def _tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of one program, and its warps."""
    block = triton.next_power_of_2(columns)
    rows = max(1, TILE // block)
    return rows, block, min(32, max(4, rows * block // 1024))


def _launch_long_rows(
    kernel: Any,
    count: int,
    columns: int,
    arguments: tuple[Any, ...],
    meta: dict[str, Any],
    device: torch.device,
) -> None:
    """Launch a kernel for rows that do not fit: once, or twice where programs share a row."""
    parts = min(triton.cdiv(PROGRAMS, count), triton.cdiv(columns, STEP))
    span = triton.cdiv(triton.cdiv(columns, parts), STEP) * STEP
    parts = triton.cdiv(columns, span)
    found = torch.empty(2, count, parts, device=device, dtype=torch.float32)
    meta = {**meta, "BLOCK": STEP, "PARTS": triton.next_power_of_2(parts), "num_warps": 16}
    for phase in (WHOLE,) if parts == 1 else (SUM, WRITE):
        kernel[(count, parts)](*arguments, found, parts, span, **meta, PHASE=phase)


@triton.jit
def _scores(
    x, mask, row, column, inside, columns, B, C, sa, sb, sc, sd, scale, offset,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scaled and masked scores in float32; -inf where nothing takes part."""
    score = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32) * scale
    c = row % C
    if MASK != 0:
        place = (row // C // B) * sa + (row // C % B) * sb + c * sc + column * sd
        value = tl.load(mask + place, mask=inside, other=0)
        if MASK == 1:
            score = tl.where(value != 0, score, float("-inf"))
        else:
            score = score + value.to(tl.float32)
    if CAUSAL:
        score = tl.where(column <= c + offset, score, float("-inf"))
    return tl.where(inside, score, float("-inf"))


@triton.jit
def _forward_rows(
    output, x, mask, count, columns, B, C, sa, sb, sc, sd, scale, offset,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < columns)
    score = _scores(
        x, mask, row, column, inside, columns, B, C, sa, sb, sc, sd, scale, offset, MASK, CAUSAL
    )
    largest = tl.max(score, axis=1)[:, None]
    # A row of -inf alone has nothing to subtract, and a sum of zero to divide by.
    weight = tl.exp(score - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, axis=1)[:, None]
    weight = weight / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * columns + column, weight.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _forward_long(
    output, x, mask, count, columns, B, C, sa, sb, sc, sd, scale, offset, found, parts, span,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * span
    end = tl.minimum(first + span, columns)
    if PHASE != 2:
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        # A maximum and a sum for each lane: they meet once, at the end.
        for start in range(first, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            score = _scores(
                x, mask, row, column, column < end, columns, B, C, sa, sb, sc, sd, scale, offset,
                MASK, CAUSAL,
            )  # fmt: skip
            higher = tl.maximum(largest, score)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - base) + tl.exp(score - base)
            largest = higher
    else:
        each = tl.arange(0, PARTS)
        tops = found + row * parts + each
        largest = tl.load(tops, mask=each < parts, other=float("-inf"))
        total = tl.load(tops + count * parts, mask=each < parts, other=0.0)
    top = tl.max(largest, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(total * tl.exp(largest - base), axis=0)
    if PHASE == 1:
        tl.store(found + row * parts + part, top)
        tl.store(found + (count + row) * parts + part, whole)
    else:
        inverse = 1.0 / tl.where(whole == 0.0, 1.0, whole)
        for start in range(first, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            score = _scores(
                x, mask, row, column, column < end, columns, B, C, sa, sb, sc, sd, scale, offset,
                MASK, CAUSAL,
            )  # fmt: skip
            weight = tl.exp(score - base) * inverse
            place = output + row * columns + column
            tl.store(place, weight.to(output.dtype.element_ty), mask=column < end)


@triton.jit
def _backward_rows(
    result, output, upstream, count, columns, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < columns)
    place = row * columns + column
    y = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
    product = y * tl.load(upstream + place, mask=inside, other=0.0).to(tl.float32)
    slope = (product - y * tl.sum(product, axis=1)[:, None]) * scale
    tl.store(result + place, slope.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _backward_long(
    result, output, upstream, count, columns, scale, found, parts, span,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * span
    end = tl.minimum(first + span, columns)
    begin = row * columns
    if PHASE != 2:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < end
            y = tl.load(output + begin + column, mask=inside, other=0.0).to(tl.float32)
            total += y * tl.load(upstream + begin + column, mask=inside, other=0.0).to(tl.float32)
    else:
        each = tl.arange(0, PARTS)
        total = tl.load(found + row * parts + each, mask=each < parts, other=0.0)
    whole = tl.sum(total, axis=0)
    if PHASE == 1:
        tl.store(found + row * parts + part, whole)
    else:
        for start in range(first, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < end
            y = tl.load(output + begin + column, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(upstream + begin + column, mask=inside, other=0.0).to(tl.float32)
            slope = y * (g - whole) * scale
            tl.store(result + begin + column, slope.to(result.dtype.element_ty), mask=inside)
