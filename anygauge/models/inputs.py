"""From a micro-batch to the model's arguments: masks and positions.

Packed documents are isolated by an explicit mask, built from segment numbers, rather than by what
a model library infers from position ids: it holds for every attention that takes a mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from anygauge.interface import UnsupportedError


class MicroBatchLike(Protocol):
    """The tensors of a micro-batch, each (B, T) int64 on the host."""

    @property
    def input_ids(self) -> Tensor: ...  # noqa: D102
    @property
    def attention_mask(self) -> Tensor: ...  # noqa: D102
    @property
    def position_ids(self) -> Tensor: ...  # noqa: D102
    @property
    def segment_ids(self) -> Tensor | None: ...  # noqa: D102


def isolating_mask(segment_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask under which a token sees its own document only.

    Args:
        segment_ids: (B, T) int64, document number from 1; 0 is padding.
        dtype: of the attention scores.

    Returns:
        (B, 1, T, T): 0 where seen, the type's lowest value elsewhere. A padding token sees
        itself, so that no row of the softmax is empty.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=segment_ids.device)
    seen = (same & (segment_ids != 0)[:, :, None] & causal) | itself
    mask = torch.zeros(seen.shape, dtype=dtype, device=segment_ids.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def model_inputs(batch: MicroBatchLike, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of the model's forward, on the batch's device."""
    if batch.segment_ids is None:
        mask = batch.attention_mask
    else:
        mask = isolating_mask(batch.segment_ids, dtype)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }


def check_packing(
    config: Any, attention: str, max_length: int, *, takes_masks: bool = False
) -> None:
    """Refuse packing where the model's attention would not keep documents apart.

    Args:
        takes_masks: the attention is a kernel whose contract is to add the mask that it is given.

    Raises:
        UnsupportedError: with the reason and the way out.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other or not getattr(config, "num_attention_heads", None):
        raise UnsupportedError(
            "data.packing: this model has layers of kind "
            f"{', '.join(other) or 'no attention'}, which the mask between packed rows does not "
            "reach; set data.packing: false"
        )
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and window and window < max_length:
        raise UnsupportedError(
            f"data.packing: this model's attention slides over {window} tokens, fewer than "
            f"data.max_length {max_length}, and packing replaces its mask; set data.max_length to "
            f"at most {window}, or data.packing: false"
        )
    if not takes_masks and attention not in ("eager", "sdpa"):
        raise UnsupportedError(
            f"data.packing: attention {attention!r} does not take the mask that keeps packed rows "
            "apart; set model.attention to eager or sdpa, or data.packing: false"
        )
