"""The loop: the same for every device and every strategy.

One step is: this rank's micro-batches -> device -> `Engine.run_step` (loss per token over the whole
global batch) -> `Engine.update` -> metrics. What differs between devices is behind `Backend`, what
differs between strategies behind `Engine`; there is no branch on either here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anygauge.config.schema import TrainSection
from anygauge.data import Batches, MicroBatch
from anygauge.interface import Backend
from anygauge.strategies.base import DeviceBatch, Engine, LossFunction, Placed
from anygauge.training.guard import check_finite
from anygauge.training.meter import RunMeter
from anygauge.training.schedule import learning_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a training loop is made of.

    Attributes:
        place: moves a micro-batch to the device and makes the model's arguments.
        loss_function: (logits, labels) -> summed loss.
        evaluations: name -> this rank's batches and the supervised tokens over all ranks.
    """

    engine: Engine
    backend: Backend
    batches: Batches
    place: Callable[[MicroBatch], DeviceBatch]
    loss_function: LossFunction
    evaluations: Mapping[str, tuple[Sequence[MicroBatch], int]]
    meter: RunMeter
    settings: TrainSection

    def run(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteLossError: the loss became inf or nan; names the rows.
        """
        steps = self.batches.steps
        if self.settings.eval_at_start:
            self.evaluate(0)
        for index in range(steps):
            began = time.perf_counter()
            micro_batches = self.batches.step(index)
            tokens = self.batches.supervised_tokens(index)
            lr = learning_rate(index, steps, self.settings.optimizer.lr, self.settings.schedule)
            result = self.engine.run_step(
                Placed(micro_batches, self.place), self.loss_function, tokens
            )
            update = self.engine.update(lr, self.settings.clip)
            sums = [float(loss) for loss in result.loss_sums]
            (total,) = self.backend.collectives.sum_on_host([sum(sums)])
            check_finite(index, total, update, sums, micro_batches, self.backend.collectives)
            self.meter.step(
                index,
                loss=total / tokens,
                lr=lr,
                grad_norm=update.grad_norm,
                skipped=update.skipped,
                seconds=time.perf_counter() - began,
            )
            every = self.settings.eval_every
            if index + 1 == steps or (every and (index + 1) % every == 0):
                self.evaluate(index + 1)

    def evaluate(self, done: int) -> None:
        """Mean loss per supervised token of each evaluation set, after `done` steps."""
        for name, (batches, tokens) in self.evaluations.items():
            losses = self.engine.evaluate(map(self.place, batches), self.loss_function)
            (total,) = self.backend.collectives.sum_on_host([float(sum(losses))])
            self.meter.evaluation(done, name, total / tokens, tokens)
