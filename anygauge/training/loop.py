"""The loop: the same for every device and every strategy.

One step is: this rank's micro-batches -> device -> `Engine.run_step` (loss per token over the whole
global batch) -> `Engine.update` -> metrics. What differs between devices is behind `Backend`, what
differs between strategies behind `Engine`; there is no branch on either here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from anygauge.config.schema import TrainSection
from anygauge.data import Batches, MicroBatch
from anygauge.interface import Backend
from anygauge.interface.strategy import DeviceBatch, Engine, LossFunction, Share
from anygauge.training.checkpoints.manager import CheckpointManager, StopRequest
from anygauge.training.guard import check_finite
from anygauge.training.meter import MetricsLogger
from anygauge.training.progress import Progress
from anygauge.training.schedule import learning_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a training loop is made of.

    Attributes:
        to_device: moves a micro-batch to the device and makes the model's arguments.
        loss_function: the model's outputs -> summed loss.
        evaluations: name -> this rank's batches and the loss tokens over all ranks.
        progress: gets where this rank is.
        share: the part of each step's rows that this rank reads.
        start: steps that were done before, in the part of the run that this one resumes.
    """

    engine: Engine
    backend: Backend
    batches: Batches
    to_device: Callable[[MicroBatch], DeviceBatch]
    loss_function: LossFunction
    evaluations: Mapping[str, tuple[Sequence[MicroBatch], int]]
    meter: MetricsLogger
    checkpoints: CheckpointManager
    stop: StopRequest
    settings: TrainSection
    progress: Progress
    share: Share
    start: int = 0

    def run(self) -> bool:
        """Train from `start` to the end; False if the run was asked to end before that.

        Raises:
            NonFiniteLossError: the loss became inf or nan; names the rows.
        """
        steps = self.batches.steps
        if self._due(self.start) and not self.meter.history.evaluated(self.start):
            self.evaluate(self.start)
        for index in range(self.start, steps):
            self.progress.at(f"step {index + 1}, forward and backward")
            began = time.perf_counter()
            micro_batches = self.batches.step(index)
            tokens = self.batches.num_loss_tokens(index)
            lr = learning_rate(index, steps, self.settings.optimizer.lr, self.settings.schedule)
            result = self.engine.run_step(
                LazyBatches(micro_batches, self.to_device), self.loss_function, tokens
            )
            self.progress.at(f"step {index + 1}, update")
            update = self.engine.update(lr, self.settings.max_grad_norm)
            sums = [float(loss) for loss in result.loss_sums]
            self.progress.at(f"step {index + 1}, sums over ranks")
            slots = sum(batch.input_ids.numel() for batch in micro_batches) * self.share.leads
            total, stop, places = self.backend.collectives.sum_on_host(
                [sum(sums), self.stop.asked, slots]
            )
            check_finite(index, total, update, sums, micro_batches, self.backend.collectives)
            self.meter.step(
                index,
                loss=total / tokens,
                lr=lr,
                grad_norm=float(update.grad_norm),
                skipped=update.skipped,
                slots=int(places),
                seconds=time.perf_counter() - began,
            )
            done, last = index + 1, index + 1 == steps
            losses = self.evaluate(done) if self._due(done) and (last or not stop) else {}
            self.checkpoints.maybe_save(done, last=last, stop=bool(stop), losses=losses)
            if stop and not last:
                return False
        return True

    def _due(self, done: int) -> bool:
        """Whether an evaluation belongs after `done` steps."""
        every = self.settings.eval_every
        if done == 0:
            return self.settings.eval_at_start
        return done == self.batches.steps or bool(every and done % every == 0)

    def evaluate(self, done: int) -> dict[str, float]:
        """Mean loss per loss token of each evaluation set, after `done` steps."""
        self.progress.at(f"evaluation after step {done}")
        losses = {}
        for name, (batches, tokens) in self.evaluations.items():
            sums = self.engine.evaluate(map(self.to_device, batches), self.loss_function)
            (total,) = self.backend.collectives.sum_on_host([float(sum(sums))])
            losses[name] = total / tokens
            self.meter.evaluation(done, name, losses[name], tokens)
        return losses


class LazyBatches(Sequence[DeviceBatch]):
    """Micro-batches that move to the device one at a time, as the engine comes to them."""

    def __init__(
        self, batches: Sequence[MicroBatch], to_device: Callable[[MicroBatch], DeviceBatch]
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
