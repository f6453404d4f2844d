"""Turns a micro-batch into the model's arguments: positions, masks, and whether there is padding.

Packed documents are isolated by an explicit mask, built from segment numbers, rather than by what
a model library infers from position ids: it holds for every attention that takes a mask.

For torch's fused attention the model library asks the mask, on the device, and waits for the answer
in each forward: without padding it leaves the mask out, so that a faster kernel can serve and keys
are not repeated for each head. Who laid the batch out knows. Where a token sees all before it and
nothing after, padding on the right is seen by no real token, and the loss leaves out what padding
computes: such a batch needs no mask either.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anygauge.interface import SequencePart, UnsupportedError
from anygauge.kernels.attention import config_value, model_class

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PADDING_FLAG = "anygauge_has_padding"
_current: list[bool | None] = [None]
"""Of the forward that is under way; None: nobody stated it."""

FORMS = {"eager": "additive", "sdpa": "boolean", "flex_attention": "blocks"}
"""The library's attention that a kind of mask belongs to -> its form."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """The masks of packed rows for one model.

    Attributes:
        form: ``additive``, ``boolean`` or ``blocks``.
        windows: positions that a token sees, itself among them, by kind of layer; None: all
            before it. The kind "" stands for all layers.
    """

    form: str = "additive"
    windows: tuple[tuple[str, int | None], ...] = (("", None),)

    def masks(self, segment_ids: Tensor, dtype: torch.dtype, queries: slice = slice(None)) -> Any:
        """The model's ``attention_mask``: one, or one for each kind of layer.

        Args:
            segment_ids: (B, T) int64, document number from 1; 0 is padding.
            dtype: of the attention scores.
            queries: the positions that see.
        """
        if len(self.windows) == 1 and self.windows[0][0] == "":
            return self._mask(segment_ids, dtype, self.windows[0][1], queries)
        return {
            kind: self._mask(segment_ids, dtype, window, queries) for kind, window in self.windows
        }

    def _mask(
        self, segment_ids: Tensor, dtype: torch.dtype, window: int | None, queries: slice
    ) -> Any:
        if self.form == "blocks":
            assert queries == slice(None), "blocks are made for whole sequences"
            return block_mask(segment_ids, window)
        seen = visible(segment_ids, window, queries)[:, None]
        if self.form == "boolean":
            return seen
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def visible(segment_ids: Tensor, window: int | None = None, queries: slice = slice(None)) -> Tensor:
    """Who sees whom: (B, queries, T) bool, by query and key.

    A token sees its own document up to itself. A padding token sees itself, so that no row of the
    softmax is empty.
    """
    keys = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    behind = keys[queries, None] - keys
    near = behind >= 0
    if window is not None:
        near &= behind < window
    mine = segment_ids[:, queries, None]
    return ((mine == segment_ids[:, None, :]) & (mine != 0) & near) | (behind == 0)


def block_mask(segment_ids: Tensor, window: int | None = None) -> BlockMask:
    """Return the same as a block structure: which blocks of positions see each other at all."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        segment = segment_ids[batch, query]
        near = (query >= key) & (segment == segment_ids[batch, key]) & (segment != 0)
        if window is not None:
            near = near & (query - key < window)
        return near | (query == key)

    rows, length = segment_ids.shape
    mask = create_block_mask(seen, rows, None, length, length, device=segment_ids.device)
    # Some models tell a mask that was made for them by this, and ask no further.
    mask.ndim = 4  # type: ignore[attr-defined]
    return mask


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


def plan_masks(
    config: Any, masks_of: str, max_length: int, *, field: str = "data.packing", off: str = "false"
) -> MaskPlan:
    """Plan how a model's sequences state who sees whom, as packed rows need it.

    Args:
        config: of the model.
        masks_of: the library's attention whose masks the model's attention takes.
        max_length: of a packed row.
        field: of the run file, that asks for such masks.
        off: its value that does not.

    Raises:
        UnsupportedError: they would not be isolated; with the reason and the way out.
    """
    if reason := _why_no_masks(config, masks_of):
        raise UnsupportedError(f"{field}: {reason}; set {field}: {off}")
    return MaskPlan(FORMS[masks_of], _windows(config, max_length))


def _why_no_masks(config: Any, masks_of: str) -> str:
    """Why a model does not take a mask for each pair of positions; "" if it does."""
    if masks_of not in FORMS:
        return (
            f"attention {masks_of!r} does not take a mask for each pair of positions, as eager or "
            "sdpa (model.attention) do"
        )
    other = sorted({*(getattr(config, "layer_types", None) or ())} - {FULL, SLIDING})
    other += _recurrent_fields(config)
    if other or not config_value(config, "num_attention_heads"):
        what = f"layers of kind {', '.join(other)}" if other else "layers with no attention"
        return f"this model has {what}, on which a mask for each pair of positions has no effect"
    kind: Any = model_class(config)
    if kind is None:
        return ""
    module = sys.modules[kind.__module__]
    if not _takes_masks(module, config):
        return (
            f"{type(config).__name__.removesuffix('Config')} models build their own masks and do "
            "not take one for each pair of positions"
        )
    # Biases by distance, as MPT has them, need no positions.
    by_distance = any("alibi" in name for name in vars(module))
    if not by_distance and "position_ids" not in inspect.signature(kind.forward).parameters:
        return (
            f"{kind.__name__} takes no position ids, so it cannot count from 0 again at each "
            "document of a row"
        )
    # As in RoBERTa: the first position is the one after the padding token's number.
    parts = [part for part in vars(module).values() if isinstance(part, type)]
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in (module, *parts)):
        return f"{kind.__name__} counts positions from its padding token's number, and not from 0"
    return ""


def _recurrent_fields(config: Any) -> list[str]:
    """Fields of a configuration that speak of layers with a state that no mask reaches."""
    lists = ("layers_block_type", "block_types", "hybrid_layer_ids", "attn_layer_indices")
    return [
        name
        for name, value in sorted(getattr(config, "__dict__", {}).items())
        if value and (name in lists or name.startswith(("mamba_", "ssm_", "rwkv_", "lru_")))
    ]


def _takes_masks(module: Any, config: Any) -> bool:
    """Whether the model of a module uses a mask for each pair of positions as it is.

    It does where the library's common functions make masks, in their present or their former form.
    """
    if hasattr(module, "build_alibi_tensor") and getattr(config, "alibi", True):
        return False  # its position biases are made from a mask of one value per token
    if any(hasattr(module, name) for name in ("create_causal_mask", "create_masks_for_generate")):
        return True
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return any("_update_causal_mask" in vars(each) for each in classes)


def _windows(config: Any, max_length: int) -> tuple[tuple[str, int | None], ...]:
    window: int | None = config_value(config, "sliding_window")
    if not window or window >= max_length or not getattr(config, "use_sliding_window", True):
        return (("", None),)
    if kinds := sorted({*(getattr(config, "layer_types", None) or ())}):
        slides = tuple((kind, None if kind == FULL else window) for kind in kinds)
        return slides if len(slides) > 1 else (("", slides[0][1]),)
    if getattr(config, "max_window_layers", None) is not None:
        raise UnsupportedError(
            f"data.packing: some layers of this model see {window} tokens and others all, and its "
            "configuration does not say which, so anygauge cannot build the masks of packed rows; "
            f"set data.max_length to at most {window}, or data.packing: false"
        )
    return (("", window),)


def state_padding(mask: Tensor, has_padding: bool) -> None:
    """Note on a batch's attention mask, (B, T), what the host knows of it.

    Padding, if there is any, is on the right.
    """
    setattr(mask, _PADDING_FLAG, has_padding)


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
    if not hasattr(made, _PADDING_FLAG):
        AttentionMaskInterface.register(attention, _mask_by_host(made, causal))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def _mask_by_host(made: Callable[..., Any], causal: bool) -> Callable[..., Any]:
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

    setattr(mask, _PADDING_FLAG, True)
    return mask


def _sees_all_before(request: Mapping[str, Any]) -> bool:
    """Whether the library asks for a mask in which a token sees itself and all before it.

    Args:
        request: by keyword; versions before 5 give the queries' positions instead of their number.
    """
    queries = request["q_length"] if "q_length" in request else len(request["cache_position"])
    keys, window = request["kv_length"], request.get("local_size")
    return bool(
        request.get("allow_is_causal_skip", True)
        and queries == keys
        and not request.get("kv_offset", 0)
        and (window is None or keys < window)
    )


def _enter(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    _current[0] = getattr(kwargs.get("attention_mask"), _PADDING_FLAG, None)


def _leave(*_: Any) -> None:
    _current[0] = None
