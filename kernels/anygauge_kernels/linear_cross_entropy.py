"""The loss of an output layer, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anygauge_kernels.chunks import Copies, Views

CHUNK_BYTES = 64 * 2**20
"""Of float32 logits that are held at once: many rows for a matrix product, few for the memory."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What the loss of one chunk depends on, in addition to tensors; see `linear_cross_entropy`."""

    ignore_index: int = -100
    softcap: float | None = None
    scale: float = 1.0


ChunkLoss = Callable[[Tensor, Tensor, LossOptions, bool], tuple[Tensor, Tensor | None]]
"""(logits (n, V), which it may overwrite, targets (n,), options, whether gradients are wanted) ->
(sum of the losses (), its gradient by the logits or None)."""


AT_MOST = 4
"""Times `CHUNK_BYTES` of logits that are held where the weight is trained."""

COMPILED = 8
"""Times `CHUNK_BYTES` of logits that are held where chunks are graphs: each takes the host as long
to hand over, however many rows it has, and devices that compile have room for half a GiB."""

LIFT = 1024.0
"""Factor of float16 gradients by rows until the loss's own gradient is known: probabilities below
6e-8 would be zero without it, and of a large vocabulary they are many."""


def chunked() -> Callable[..., Tensor]:
    """The implementation in plain torch, for every device."""
    return linear_cross_entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    skip_ignored: bool = False,
    mark_step: Callable[[], None] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    chunk: ChunkLoss | None = None,
) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T + bias``, without holding these logits.

    The product is in the type of `hidden`, the loss in float32 at least, as of a model whose logits
    are held. Gradients are made in the forward pass, chunk by chunk, so that no logits are computed
    twice; they exist only for what asks for them.

    Args:
        hidden: (N, D), floating.
        weight: (V, D), type of `hidden`.
        targets: (N,) int64; `ignore_index` where a row does not count.
        bias: (V,), type of `hidden`.
        low_rank: (N, R) and (V, R), whose product is added to the logits: an adapter of the output
            layer.
        softcap: logits become softcap * tanh(logits / softcap).
        scale: factor of the logits, before the cap.
        skip_ignored: leave out rows that do not count, before anything is computed. How many are
            left is then known only at run time, which a device with fixed shapes cannot have.
        mark_step: given where each new graph, or shape, is compiled. It ends a graph, and is called
            before each chunk and after the last, so that one graph serves all of them.
        chunk_bytes: of float32 logits at once; with `mark_step`, `COMPILED` times as many.
        chunk: computes the loss of one chunk; None: in plain torch.

    Returns:
        () float32, or float64 for float64.
    """
    options = LossOptions(ignore_index, softcap, scale)
    least = max(1, chunk_bytes // (4 * weight.shape[0]))
    rows = least if mark_step is None else COMPILED * least
    if weight.requires_grad and torch.is_grad_enabled():
        # Each chunk adds to the whole weight's gradient, which takes as long as a product with as
        # many rows as the weight has columns: fewer and larger chunks, within bounds.
        rows = max(rows, min(hidden.shape[1], AT_MOST * least))
    if skip_ignored:
        kept = (targets != options.ignore_index).nonzero().squeeze(1)
        hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        if low_rank is not None:
            low_rank = (low_rank[0].index_select(0, kept), low_rank[1])
    count = hidden.shape[0]
    # As many chunks, but alike: the last is not much shorter than the others.
    rows = max(1, -(-count // max(1, -(-count // rows))))
    total: Tensor = _LinearCrossEntropy.apply(
        hidden,
        weight,
        bias,
        *(low_rank or (None, None)),
        targets,
        chunk or plain_chunk,
        options,
        Views(count, rows) if mark_step is None else Copies(count, rows, hidden.device, mark_step),
        torch.is_grad_enabled(),
    )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        low_weight: Tensor | None,
        targets: Tensor,
        chunk: ChunkLoss,
        options: LossOptions,
        parts: Views,
        with_gradients: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        given: Any = (hidden, weight, bias, low, low_weight)
        wanted = [with_gradients and needed for needed in ctx.needs_input_grad[:5]]
        # Rows are written once; what all rows share is summed over chunks, in float32.
        of_hidden, of_low = (
            parts.begin(each) if each is not None and need else None
            for each, need in ((hidden, wanted[0]), (low, wanted[3]))
        )
        by_weight, by_bias, by_low_weight = (
            torch.zeros_like(each, dtype=wide) if each is not None and need else None
            for each, need in ((weight, wanted[1]), (bias, wanted[2]), (low_weight, wanted[4]))
        )
        lift = LIFT if hidden.dtype is torch.float16 else 1.0
        ctx.lifts = (lift, 1.0, 1.0, lift, 1.0)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for _ in parts:
            rows = parts.rows(hidden)
            logits = torch.nn.functional.linear(rows, weight, bias)
            low_rows = None
            if low is not None and low_weight is not None:
                low_rows = parts.rows(low)
                logits.addmm_(low_rows, low_weight.t())
            aims = parts.targets(targets, options.ignore_index)
            losses, gradient = chunk(logits, aims, options, any(wanted))
            del logits
            total += losses
            if gradient is None:
                continue
            if by_bias is not None:
                by_bias += gradient.sum(0, dtype=wide)
            narrow = gradient.to(hidden.dtype)
            products: Any = (
                (rows, weight, of_hidden, by_weight),
                (low_rows, low_weight, of_low, by_low_weight),
            )
            for factor, shared, of_rows, by_shared in products:
                if of_rows is not None:
                    lifted = narrow if lift == 1.0 else (gradient * lift).to(hidden.dtype)
                    parts.keep(of_rows, torch.mm(lifted, shared))
                if by_shared is None:
                    continue
                if hidden.dtype in (wide, torch.float16):
                    # A sum over tokens has no room in float16, nor have its smallest parts.
                    by_shared.addmm_(gradient.to(wide).t(), factor.to(wide))
                else:
                    by_shared += narrow.t() @ factor
        by_hidden, by_low = (
            None if results is None else parts.whole(results) for results in (of_hidden, of_low)
        )
        ctx.save_for_backward(by_hidden, by_weight, by_bias, by_low, by_low_weight)
        ctx.dtypes = tuple(None if each is None else each.dtype for each in given)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        # The factor stays wide: of float16, it may be too small for the type.
        gradients = (
            None if held is None else held.to(grad_total.dtype).mul(grad_total / lift).to(dtype)
            for held, lift, dtype in zip(ctx.saved_tensors, ctx.lifts, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None, None)


def plain_chunk(
    logits: Tensor, targets: Tensor, options: LossOptions, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """See `ChunkLoss`; gradients are float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != options.ignore_index
    targets = targets.where(counts, torch.zeros_like(targets)).unsqueeze(1)
    if options.scale != 1.0:
        logits.mul_(options.scale)
    slope = None
    if options.softcap is not None:
        capped = logits.div_(options.softcap).tanh_()
        slope = 1 - capped.square() if with_gradient else None
        logits = capped.mul_(options.softcap)
    normalizer = logits.logsumexp(1, keepdim=True)
    losses = normalizer - logits.gather(1, targets)
    total = losses.squeeze(1).where(counts, losses.new_zeros(())).sum()
    if not with_gradient:
        return total, None
    gradient = logits.sub_(normalizer).exp_()
    # Not added by `scatter_add_`, whose deterministic form may sort: a row has one target.
    gradient.scatter_(1, targets, gradient.gather(1, targets) - 1)
    gradient.mul_(counts.unsqueeze(1))
    if slope is not None:
        gradient.mul_(slope)
    if options.scale != 1.0:
        gradient.mul_(options.scale)
    return total, gradient
