"""The widths of a run, computed in the first steps of a process.

A device that compiles each new shape would otherwise stop in whichever later step a width first
comes up, and all ranks with it. In the first steps, each width that no row has there is computed by
a micro-batch without rows: it has no loss token, so that its loss and its gradient are zero.
Nothing of it is reported, and dropout draws the same numbers as without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anygauge.data import Batches, MicroBatch
from anygauge.interface import DeviceBatch, Engine, LossFunction, Placement
from anygauge.training.moving import HostBatch, LazyBatches, ToDevice


class WarmUp:
    """Runs steps on an engine, the first ones of a process with all widths of the run.

    How many these are, `ShapePolicy.warm_up` says. A resumed run has them again: its process has
    compiled nothing yet.
    """

    def __init__(
        self,
        batches: Batches,
        to_device: ToDevice,
        placement: Placement,
        start: int,
        *,
        off: bool = False,
    ) -> None:
        """Args:
        start: steps that were done before this process.
        off: no step has more than its own rows.
        """
        layout = batches.layout
        self._to_device, self._placement = to_device, placement
        most = 0 if off else layout.shapes.warm_up
        self._steps = range(start, min(start + most, batches.steps))
        # A schedule that has several micro-batches under way needs one width for all of a step.
        widths = batches.widths(start) if self._steps and not layout.share.one_width else []
        self._dummies = {width: layout.dummy(width) for width in widths}

    def __str__(self) -> str:
        """What is done, for the run's log; empty where nothing is."""
        if len(self._dummies) < 2:
            return ""
        widths = ", ".join(map(str, self._dummies))
        steps = " and ".join(str(index + 1) for index in self._steps)
        return f"warm-up: each of the run's widths ({widths}) is computed in step {steps}"

    def run_step(
        self,
        engine: Engine,
        index: int,
        batches: Sequence[HostBatch],
        loss_function: LossFunction,
        normalizer: int,
    ) -> Sequence[Tensor]:
        """`Engine.run_step` with a step's batches; returns the losses of these alone.

        Args:
            index: the step, from 0 in the whole run.
        """
        there = {each.batch.input_ids.shape[1] for each in batches}
        missing = [dummy for width, dummy in self._dummies.items() if width not in there]
        if index not in self._steps or not missing:
            return engine.run_step(LazyBatches(batches, self._to_device), loss_function, normalizer)
        dummies = [self._to_device.on_host(dummy) for dummy in missing]
        generators: dict[str, Tensor] = {}

        def moved(batch: MicroBatch | HostBatch) -> DeviceBatch:
            # By then, the engine is done with all that has rows.
            if batch is dummies[0]:
                generators.update(self._placement.rng_state())
            return self._to_device(batch)

        every = LazyBatches([*batches, *dummies], moved)
        losses = engine.run_step(every, loss_function, normalizer)
        self._placement.set_rng_state(generators)
        return losses[: len(batches)]
