"""Sequences to tensors: padding, labels, positions and document numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anygauge.data.rows import Tokens
from anygauge.interface import ShapePolicy

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of positions without a loss."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """What one forward reads. Tensors are int64 of shape (sequences, length), on the host.

    Attributes:
        input_ids: token numbers; sequences are padded on the right.
        labels: the loss tokens *at their own position* (the loss shifts them);
            `IGNORED` elsewhere, and on the first token of every document.
        attention_mask: 1 for tokens, 0 for padding. A dummy sequence keeps one 1, since attention
            over nothing at all is not a number.
        position_ids: from 0; packed documents and the padding behind them each begin anew.
        segment_ids: packed: the document's number in its sequence from 1, 0 for padding.
            None where nothing is packed.
        origins: where the rows came from; dummies have none.
        num_loss_tokens: labels that count.
        tokens: real tokens, without padding and dummies.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor | None
    origins: tuple[str, ...]
    num_loss_tokens: int
    tokens: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, for moving to a device; `segment_ids` only where packed."""
        named = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        if self.segment_ids is not None:
            named["segment_ids"] = self.segment_ids
        return named


def tokens_of(sequence: Sequence[Tokens]) -> int:
    """Of all the documents that a sequence holds."""
    return sum(len(document.ids) for document in sequence)


def collate(
    sequences: Sequence[Sequence[Tokens]],
    *,
    packed: bool,
    shapes: ShapePolicy,
    max_length: int,
    pad_id: int,
    width: int | None = None,
) -> MicroBatch:
    """Lay out sequences side by side.

    Args:
        sequences: for each, the documents it holds, in order; none at all makes a dummy, from
            which there is no loss.
        packed: whether documents are told apart by positions and `segment_ids`; only then may a
            sequence hold several.
        shapes: decides the padded length.
        max_length: most tokens of a sequence.
        width: the padded length; None: as `shapes` says.
    """
    import torch

    if width is None:
        longest = max(map(tokens_of, sequences))
        width = shapes.padded_length(max(1, longest), max_length)
    shape = (len(sequences), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(sequences), 1))
    segments = np.zeros(shape, dtype=np.int64)
    tokens = 0
    for place, sequence in enumerate(sequences):
        at = 0
        for number, document in enumerate(sequence, start=1):
            end = at + len(document.ids)
            input_ids[place, at:end] = document.ids
            labels[place, at:end] = np.where(document.loss_mask, document.ids, IGNORED)
            mask[place, at:end] = 1
            segments[place, at:end] = number
            if packed:
                positions[place, at:] = np.arange(width - at)
            at = end
        tokens += at
        if not sequence:
            mask[place, 0] = segments[place, 0] = at = 1
        if packed:
            positions[place, at:] = np.arange(width - at)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments) if packed else None,
        origins=tuple(document.origin for sequence in sequences for document in sequence),
        num_loss_tokens=int((labels != IGNORED).sum()),
        tokens=tokens,
    )
