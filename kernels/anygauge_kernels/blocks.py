"""Attention that skips blocks of positions that do not see each other: packed rows, windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anygauge.interface import AttentionKernel, UnsupportedError
from anygauge_kernels.softmax_attention import refuse

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def compiled_attention() -> AttentionKernel:
    """Compiled for the device; from the second length of rows on, for all lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    return block_attention(torch.compile(flex_attention))


def block_attention(flex: Any) -> AttentionKernel:
    """Attention by torch's `flex_attention`, or a compiled one.

    A `BlockMask` says which blocks of queries and keys see each other at all: the others are not
    computed. Torch makes it from a mask of all positions, which it then drops.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: BlockMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Query (B, H, T, D), key and value (B, G, S, D), G dividing H -> (B, T, H, D).

        `s_aux`: see `anygauge_kernels.softmax_attention`.
        """
        refuse(module, others)
        if attention_mask is None and getattr(module, "is_causal", True):
            attention_mask = _causal(query.shape[2], key.shape[2], query.device)
        if dropout and module.training:
            raise UnsupportedError(
                f"{type(module).__name__} drops attention weights, which attention by blocks "
                "cannot; set kernels.attention to another kernel, or the model's attention dropout "
                "to 0"
            )

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            assert softcap is not None
            return torch.tanh(score / softcap) * softcap

        found = flex(
            query,
            key,
            value,
            score_mod=None if softcap is None else capped,
            block_mask=attention_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=s_aux is not None,
        )
        output = found
        if s_aux is not None:
            # A score that takes part and has no value: all weights shrink by one factor.
            output, normalizer = found
            share = torch.sigmoid(normalizer - s_aux.float().view(1, -1, 1))
            output = output * share.unsqueeze(3).to(output.dtype)
        return output.transpose(1, 2).contiguous(), None

    return AttentionKernel(
        name="anygauge_blocks",
        forward=forward,
        describe="compiled; blocks that see nothing are skipped",
        mask="flex_attention",
        drops=False,
        smallest_head=16,
    )


def _causal(length: int, seen: int, device: torch.device) -> BlockMask:
    """The last query beside the last key, as of an attention without a mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (seen - length)

    return create_block_mask(visible, None, None, length, seen, device=str(device))
