"""From a micro-batch to the model's arguments: masks and positions."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

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


def model_inputs(
    batch: MicroBatchLike, dtype: torch.dtype, packed: MaskPlan = PLAIN
) -> dict[str, Any]:
    """Keyword arguments of the model's forward, on the batch's device.

    Args:
        dtype: of the attention scores.
        packed: the masks of packed rows; others have the batch's own (B, T).
    """
    segments = batch.segment_ids
    mask = batch.attention_mask if segments is None else packed.masks(segments, dtype)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
