"""The loss of an output layer with Triton: logits become their own gradient, in place.

The matrix products are the library's; between them, one kernel reads each row of a chunk's logits
twice and writes the gradient over them, so that a chunk is never held in float32. Importing this
module needs Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from anygauge_kernels.linear_cross_entropy import LossOptions, linear_cross_entropy, plain_chunk

CHUNK_BYTES = 512 * 2**20
"""Of logits if they were float32; as bfloat16, they are half: rows enough for a fast product."""
BLOCK = 4096


def kernel() -> Callable[..., Tensor]:
    """The implementation: `linear_cross_entropy` with chunks of its own."""
    return functools.partial(linear_cross_entropy, chunk=_chunk, chunk_bytes=CHUNK_BYTES)


def _chunk(
    logits: Tensor, targets: Tensor, options: LossOptions, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """See `ChunkLoss`; the gradient is in the logits' type and place.

    float64 and float16 go through plain torch: in place, float16 has no room for small
    probabilities.
    """
    if logits.dtype in (torch.float64, torch.float16):
        return plain_chunk(logits, targets, options, with_gradient)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _rows[(logits.shape[0],)](
        logits,
        targets,
        losses,
        logits.shape[1],
        options.ignore_index,
        options.scale,
        options.softcap or 1.0,
        CAPPED=options.softcap is not None,
        GRADIENT=with_gradient,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=8,
    )
    return losses.sum(), logits if with_gradient else None


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _final_logits(logits, place, inside, scale, softcap, CAPPED: tl.constexpr):
    """Logits after scale and cap, float32; -inf outside."""
    x = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32) * scale
    if CAPPED:
        x = _tanh(x / softcap) * softcap
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _rows(
    logits, targets, losses, classes, ignore_index, scale, softcap,
    CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignore_index
    first = row * classes
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        x = _final_logits(logits, first + column, inside, scale, softcap, CAPPED)
        higher = tl.maximum(largest, x)
        # Lanes beyond the row's end stay at -inf, whose difference would be nan.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = higher
    top = tl.max(largest, axis=0)
    base = tl.where(largest == float("-inf"), top, largest)
    normalizer = top + tl.log(tl.sum(total * tl.exp(base - top), axis=0))
    place = first + tl.where(counts, target, 0)
    aimed = _final_logits(logits, place, counts, scale, softcap, CAPPED)
    loss = normalizer - aimed
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        # All must have read the target's logit before one writes over it.
        tl.debug_barrier()
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < classes
            x = _final_logits(logits, first + column, inside, scale, softcap, CAPPED)
            slope = tl.exp(x - normalizer)
            slope = tl.where(column == target, slope - 1.0, slope)
            if CAPPED:
                slope = slope * (1.0 - (x / softcap) * (x / softcap))
            slope = tl.where(counts, slope * scale, 0.0)
            tl.store(logits + first + column, slope.to(logits.dtype.element_ty), mask=inside)
