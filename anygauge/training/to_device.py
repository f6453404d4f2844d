"""Turns a micro-batch on the host into the model's arguments on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from torch import Tensor

from anygauge.data import Batches, MicroBatch
from anygauge.interface import Backend, DeviceBatch, Engine, LossFunction, Share
from anygauge.kernels.loss import state_loss_rows
from anygauge.models.inputs import MaskPlan, model_inputs, state_padding
from anygauge.strategies.shared.common import torch_dtype
from anygauge.training.progress import Progress


@dataclass(kw_only=True)
class ToDevice:
    """Moves micro-batches to the device and gives them to the engine.

    Attributes:
        compute: the type that the model computes in.
        packed: masks of packed rows, and of parts of sequences.
        progress: gets each micro-batch.
        share: what this rank computes of its sequences.
        routed: the model gets the positions of tokens, for its routers' loss.
        shapes: of all that were moved; a device with graphs compiles for each of them.
    """

    backend: Backend
    compute: str
    packed: MaskPlan
    progress: Progress
    share: Share
    routed: bool = False
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    def run_step(
        self,
        engine: Engine,
        index: int,
        batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        normalizer: int,
    ) -> Sequence[Tensor]:
        """`Engine.run_step` with a step's micro-batches.

        Args:
            index: the step, from 0 in the whole run.
        """
        return engine.run_step(LazyBatches(batches, self), loss_function, normalizer)

    def __call__(self, batch: MicroBatch) -> DeviceBatch:
        """Move one micro-batch to the device."""
        self.progress.next_batch()
        placement = self.backend.placement
        moved = placement.to_device(batch.tensors())
        mask = moved["attention_mask"]
        state_padding(mask, batch.has_padding)
        inputs = model_inputs(moved, torch_dtype(self.compute), self.packed, self.share.sequence)
        self.shapes.add(tuple(inputs["input_ids"].shape))
        labels = moved["shift_labels"][:, self.share.positions(mask.shape[1])]
        if batch.loss_rows is not None:
            rows = placement.to_device(batch.loss_rows)
            state_loss_rows(labels, rows, batch.loss_counts)
        if self.routed:
            inputs["tokens"] = mask
        return {**inputs, "shift_labels": labels}


class LazyBatches(Sequence[DeviceBatch]):
    """Micro-batches that move to the device one at a time, as the engine comes to them."""

    def __init__(self, batches: Sequence[MicroBatch], to_device: ToDevice) -> None:
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


@dataclass(kw_only=True)
class WarmUp(ToDevice):
    """Also computes the widths of a run in the first steps of a process.

    A device that compiles each new shape would otherwise stop in whichever later step a width first
    comes up, and all ranks with it. In the first steps, each width that no row has there is
    computed by a micro-batch without rows: it has no loss token, so that its loss and its gradient
    are zero. Nothing of it is reported, and dropout draws the same numbers as without it. A resumed
    run has them again: its process has compiled nothing yet.

    Attributes:
        steps: these first ones; `ShapePolicy.warm_up` says how many.
        dummies: by width, the widest first.
    """

    steps: range
    dummies: Mapping[int, MicroBatch]
    _drawn: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe what is done, for the run's log."""
        widths = ", ".join(map(str, self.dummies))
        steps = " and ".join(str(index + 1) for index in self.steps)
        return f"warm-up: each of the run's widths ({widths}) is computed in step {steps}"

    def run_step(
        self,
        engine: Engine,
        index: int,
        batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        normalizer: int,
    ) -> Sequence[Tensor]:
        """See `ToDevice.run_step`; returns the losses of the step's own alone."""
        there = {batch.input_ids.shape[1] for batch in batches}
        missing = [each for each in self.dummies.values() if each.input_ids.shape[1] not in there]
        if index not in self.steps or not missing:
            return super().run_step(engine, index, batches, loss_function, normalizer)
        self._drawn.clear()
        every = [*batches, *missing]
        losses = super().run_step(engine, index, every, loss_function, normalizer)
        self.backend.placement.set_rng_state(self._drawn)
        return losses[: len(batches)]

    def __call__(self, batch: MicroBatch) -> DeviceBatch:
        """See `ToDevice`."""
        # With the first dummy, the engine is done with all that has rows.
        if not self._drawn and any(batch is each for each in self.dummies.values()):
            self._drawn.update(self.backend.placement.rng_state())
        return super().__call__(batch)


def warm_up_widths(batches: Batches, start: int) -> tuple[range, dict[int, MicroBatch]]:
    """The steps of a process that compute all widths, and a micro-batch without rows of each.

    Args:
        start: steps that were done before this process.
    """
    layout = batches.layout
    steps = range(start, min(start + layout.shapes.warm_up, batches.steps))
    # A schedule that has several micro-batches under way needs one width for all of a step.
    widths = batches.widths(start) if steps and not layout.share.one_width else []
    return steps, {width: layout.dummy(width) for width in widths}
