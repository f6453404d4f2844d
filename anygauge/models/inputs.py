"""From a micro-batch to the model's arguments: positions, masks, and whether there is padding.

For torch's fused attention the model library asks the mask, on the device, and waits for the answer
in each forward: without padding it leaves the mask out, so that a faster kernel can serve and keys
are not repeated for each head. Who laid the batch out knows. Where a token sees all before it and
nothing after, padding on the right is seen by no real token, and the loss leaves out what padding
computes: such a batch needs no mask either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import SequencePart
from anygauge.models.masks import MaskPlan

_STATED = "anygauge_has_padding"
_current: list[bool | None] = [None]
"""Of the forward that is under way; None: nobody stated it."""

PLAIN = MaskPlan()


def model_inputs(
    batch: Mapping[str, Tensor],
    dtype: torch.dtype,
    packed: MaskPlan = PLAIN,
    part: SequencePart | None = None,
) -> dict[str, Any]:
    """Keyword arguments of the model's forward, on the batch's device.

    Args:
        batch: the tensors of a micro-batch by name, each (B, T) int64.
        dtype: of the attention scores.
        packed: the masks of packed rows, and of parts; other rows have the batch's own (B, T).
        part: of the sequences; their length is a multiple of its count.
    """
    segments, mask = batch.get("segment_ids"), batch["attention_mask"]
    if part is not None:
        mine = part.positions(mask.shape[1])
        queries = slice(None) if part.all_queries else mine
        return {
            "input_ids": batch["input_ids"][:, mine],
            "attention_mask": packed.masks(mask if segments is None else segments, dtype, queries),
            "position_ids": batch["position_ids"][:, mine],
            "use_cache": False,
        }
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    if segments is None:
        # Each row begins at its first position, wherever an architecture begins to count.
        return {**inputs, "attention_mask": mask}
    mask = packed.masks(segments, dtype)
    return {**inputs, "attention_mask": mask, "position_ids": batch["position_ids"]}


def state_padding(mask: Tensor, has_padding: bool) -> None:
    """Note on a batch's attention mask, (B, T), what the host knows of it.

    Padding, if there is any, is on the right.
    """
    setattr(mask, _STATED, has_padding)


def answer_from_host(model: nn.Module, attention: str, *, causal: bool = False) -> None:
    """Have masks of a model made by what `state_padding` noted, where it did.

    Args:
        model: of transformers, adapted or not.
        attention: the name that it was built with; its masks are those of ``sdpa``, unless it is
            causal by itself.
        causal: see `AttentionKernel`.
    """
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    made = ALL_MASK_ATTENTION_FUNCTIONS[attention]
    if not hasattr(made, _STATED):
        AttentionMaskInterface.register(attention, _unasked(made, causal))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def _unasked(made: Callable[..., Any], causal: bool) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        has_padding = _current[0]
        unseen = has_padding is not None and _sees_all_before(kwargs)
        if causal and unseen:
            return None
        if unseen or has_padding is False:
            kwargs["attention_mask"] = None
        elif has_padding:
            kwargs["allow_is_causal_skip"] = False
        return made(*args, **kwargs)

    setattr(mask, _STATED, True)
    return mask


def _sees_all_before(asked: Mapping[str, Any]) -> bool:
    """Whether the library asks for a mask in which a token sees itself and all before it.

    Args:
        asked: by keyword; versions before 5 give the queries' positions instead of their number.
    """
    queries = asked["q_length"] if "q_length" in asked else len(asked["cache_position"])
    keys, window = asked["kv_length"], asked.get("local_size")
    return bool(
        asked.get("allow_is_causal_skip", True)
        and queries == keys
        and not asked.get("kv_offset", 0)
        and (window is None or keys < window)
    )


def _enter(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    _current[0] = getattr(kwargs.get("attention_mask"), _STATED, None)


def _leave(*_: Any) -> None:
    _current[0] = None
