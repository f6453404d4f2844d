"""From a micro-batch to the model's arguments: masks and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from anygauge.interface import SequencePart
from anygauge.kernels.loss import IGNORE
from anygauge.models.masks import MaskPlan


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


PLAIN = MaskPlan()


def shift_labels(labels: Tensor) -> Tensor:
    """What each position is to predict: the label of the next one, and -100 at the end.

    Args:
        labels: (B, T) int64, of the positions themselves.
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def padded(tensors: Mapping[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """A micro-batch's tensors, by name, with a length that is a multiple.

    What is added is not a token: it has no loss, and nobody attends to it.
    """
    length = next(iter(tensors.values())).shape[1]
    more = -length % multiple
    if not more:
        return dict(tensors)
    return {
        name: torch.nn.functional.pad(t, (0, more), value=IGNORE if name == "labels" else 0)
        for name, t in tensors.items()
    }


def positions(part: SequencePart | None, length: int) -> slice:
    """Those that a rank computes of sequences of a length that `padded` gave."""
    if part is None:
        return slice(None)
    each = length // part.count
    return slice(part.index * each, (part.index + 1) * each)


def model_inputs(
    batch: MicroBatchLike,
    dtype: torch.dtype,
    packed: MaskPlan = PLAIN,
    part: SequencePart | None = None,
) -> dict[str, Any]:
    """Keyword arguments of the model's forward, on the batch's device.

    Args:
        dtype: of the attention scores.
        packed: the masks of packed rows, and of parts; other rows have the batch's own (B, T).
        part: of the sequences; their length is a multiple of its count.
    """
    segments = batch.segment_ids
    if part is not None:
        mine = positions(part, batch.input_ids.shape[1])
        seen = batch.attention_mask if segments is None else segments
        queries = slice(None) if part.all_queries else mine
        return {
            "input_ids": batch.input_ids[:, mine],
            "attention_mask": packed.masks(seen, dtype, queries),
            "position_ids": batch.position_ids[:, mine],
            "use_cache": False,
        }
    inputs = {"input_ids": batch.input_ids, "use_cache": False}
    if segments is None:
        # Each row begins at its first position, wherever an architecture begins to count.
        return {**inputs, "attention_mask": batch.attention_mask}
    mask = packed.masks(segments, dtype)
    return {**inputs, "attention_mask": mask, "position_ids": batch.position_ids}
