"""Attention whose softmax is a kernel of the run: two matrix products around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import AttentionKernel, UnsupportedError

CHANGES_THE_RESULT = ("position_bias", "alibi", "head_mask")
"""Arguments of other attentions that this one has no part for."""


def with_softmax(softmax: Callable[..., Tensor]) -> AttentionKernel:
    """Attention around a softmax: see `anygauge.interface.kernels`.

    Scores are in the compute type, what the softmax makes of them in float32. Grouped heads read
    their keys and values where they lie. Masks are boolean, a quarter or half of additive ones.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Query (B, H, T, D), key (B, G, S, D), value (B, G, S, E), G dividing H -> (B, T, H, E).

        Without a mask, attention is causal unless the module or the caller says otherwise, the last
        query beside the last key. `s_aux`: (H,), a score per head that takes part and has no value.
        """
        refuse(module, others)
        batch, heads, length, width = query.shape
        groups, seen = key.shape[1], key.shape[2]
        scale = width**-0.5 if scaling is None else scaling
        # Heads of a group are more rows of the same product: no copy of a key for each of them.
        rows = (batch, groups, heads // groups * length)
        scores = query.reshape(*rows, width) @ key.transpose(2, 3)
        scores = scores.view(batch, heads, length, seen)
        if softcap is not None:
            scores, scale = torch.tanh(scores * (scale / softcap)), softcap
        mask = attention_mask if attention_mask is None else attention_mask[..., :seen]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        offset = seen - length if mask is None and causal else None
        if s_aux is not None:
            scores, mask, scale = _with_sinks(scores * scale, mask, s_aux, offset), None, 1.0
            offset = None
        weights = softmax(scores, mask=mask, scale=scale, causal_offset=offset)
        weights = weights[..., :seen]
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
        output = weights.reshape(*rows, seen) @ value
        output = output.view(batch, heads, length, value.shape[3])
        return output.transpose(1, 2).contiguous(), weights

    return AttentionKernel(
        name="anygauge_softmax",
        forward=forward,
        describe="products in the compute type, softmax accumulated in float32",
        mask="sdpa",
    )


def refuse(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raises: UnsupportedError: the model passes something that would be left out of the result."""
    for name in CHANGES_THE_RESULT:
        if others.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} passes {name!r} to its attention, which this attention "
                "kernel leaves out; set kernels.attention: reference"
            )


def _with_sinks(
    scores: Tensor, mask: Tensor | None, sinks: Tensor, causal_offset: int | None
) -> Tensor:
    """Masked scores (B, H, T, S) and a column (H,) that always takes part: (B, H, T, S + 1)."""
    batch, heads, length, seen = scores.shape
    if causal_offset is not None:
        # By position: not every device has a triangle of truths.
        rows, columns = (torch.arange(n, device=scores.device) for n in (length, seen))
        mask = columns <= rows[:, None] + causal_offset
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
    return torch.cat([scores, column], dim=3)
