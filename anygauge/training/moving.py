"""From a micro-batch to the model's arguments on the device: the host's part, then the device's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import overload

from torch import Tensor

from anygauge.data import MicroBatch
from anygauge.interface import Backend, DeviceBatch, ShapeKind, Share
from anygauge.kernels.loss import IGNORE, state_loss_rows
from anygauge.models.inputs import model_inputs, padded, positions, shift_labels
from anygauge.models.masks import MaskPlan
from anygauge.models.padding import state_padding
from anygauge.strategies.shared.common import torch_dtype
from anygauge.training.progress import Progress


@dataclasses.dataclass(frozen=True, slots=True)
class HostBatch:
    """A micro-batch, and its tensors from which the device copies without a wait.

    Attributes:
        tensors: by name, each (B, T) int64 on the host; labels are shifted.
        has_padding: whether its mask has a zero.
        loss_rows: (n,) int64, those of this rank's labels that have a loss; None where the number
            of rows must be the same in each batch.
    """

    batch: MicroBatch
    tensors: Mapping[str, Tensor]
    has_padding: bool
    loss_rows: Tensor | None = None


@dataclasses.dataclass(kw_only=True)
class ToDevice:
    """Moves micro-batches to the device and makes the model's arguments.

    Attributes:
        compute: the type that the model computes in.
        packed: masks of packed rows, and of parts of sequences.
        progress: gets each micro-batch.
        share: what this rank computes of its sequences, and their lengths.
        routed: the model gets the positions of tokens, for its routers' loss.
        shapes: of all that were moved; a device with graphs compiles for each of them.
    """

    backend: Backend
    compute: str
    packed: MaskPlan
    progress: Progress
    share: Share
    routed: bool = False
    shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._dynamic = self.backend.graph.shapes.kind is ShapeKind.DYNAMIC

    def on_host(self, batch: MicroBatch) -> HostBatch:
        """What the host does of it; any thread may call this."""
        tensors = {**batch.tensors(), "labels": shift_labels(batch.labels)}
        tensors = padded(tensors, self.share.multiple)
        has_padding = not bool(tensors["attention_mask"].all())
        labels = self._own(tensors["labels"])
        rows = (labels.flatten() != IGNORE).nonzero().squeeze(1) if self._dynamic else None
        pin = self.backend.placement.pin
        return HostBatch(batch, pin(tensors), has_padding, pin(rows))

    def __call__(self, batch: MicroBatch | HostBatch) -> DeviceBatch:
        """One micro-batch on the device."""
        if isinstance(batch, MicroBatch):
            batch = self.on_host(batch)
        self.progress.batch()
        part, placement = self.share.sequence, self.backend.placement
        moved = dataclasses.replace(batch.batch, **placement.to_device(batch.tensors))
        state_padding(moved.attention_mask, batch.has_padding)
        inputs = model_inputs(moved, torch_dtype(self.compute), self.packed, part)
        self.shapes.add(tuple(inputs["input_ids"].shape))
        labels = self._own(moved.labels)
        if batch.loss_rows is not None:
            state_loss_rows(labels, placement.to_device(batch.loss_rows))
        if self.routed:
            inputs["tokens"] = moved.attention_mask
        return {**inputs, "shift_labels": labels}

    def _own(self, labels: Tensor) -> Tensor:
        """Labels of the positions that this rank computes."""
        return labels[:, positions(self.share.sequence, labels.shape[1])]


class LazyBatches(Sequence[DeviceBatch]):
    """Micro-batches that move to the device one at a time, as the engine comes to them."""

    def __init__(
        self,
        batches: Sequence[MicroBatch] | Sequence[HostBatch],
        to_device: Callable[[MicroBatch | HostBatch], DeviceBatch],
    ) -> None:
        self._batches = batches
        self._to_device = to_device

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> DeviceBatch: ...
    @overload
    def __getitem__(self, index: slice) -> LazyBatches: ...
    def __getitem__(self, index: int | slice) -> DeviceBatch | LazyBatches:
        if isinstance(index, slice):
            return LazyBatches(self._batches[index], self._to_device)
        return self._to_device(self._batches[index])
