"""Lets the model library know from the host whether a batch has padding.

For torch's fused attention it asks the mask, on the device, and waits for the answer in each
forward: without padding it leaves the mask out, so that a faster kernel can serve. Who laid the
batch out knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_STATED = "anygauge_has_padding"
_current: list[bool | None] = [None]
"""Of the forward that is under way; None: nobody stated it."""


def state_padding(mask: Tensor, has_padding: bool) -> None:
    """Note on a batch's attention mask, (B, T), what the host knows of it."""
    setattr(mask, _STATED, has_padding)


def answer_from_host(model: nn.Module, attention: str) -> None:
    """Have masks of a model made by what `state_padding` noted, where it did.

    Args:
        model: of transformers, adapted or not.
        attention: the name that it was built with; its masks are those of ``sdpa``.
    """
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    made = ALL_MASK_ATTENTION_FUNCTIONS[attention]
    if not hasattr(made, _STATED):
        AttentionMaskInterface.register(attention, _unasked(made))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def _unasked(made: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if _current[0] is False:
            kwargs["attention_mask"] = None
        elif _current[0]:
            kwargs["allow_is_causal_skip"] = False
        return made(*args, **kwargs)

    setattr(mask, _STATED, True)
    return mask


def _enter(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    _current[0] = getattr(kwargs.get("attention_mask"), _STATED, None)


def _leave(*_: Any) -> None:
    _current[0] = None
