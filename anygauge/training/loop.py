"""The loop: the same for every device and every strategy.

One step is: this rank's micro-batches -> device -> `Engine.run_step` (loss per token over the whole
global batch) -> `Engine.update` -> metrics. The next micro-batches are laid out by a thread, and
metrics are read while the device does the next step, so that it waits for neither. What differs
between devices is behind `Backend`, what differs between strategies behind `Engine`; there is no
branch on either here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from anygauge.config.schema import TrainSection
from anygauge.data import STEPS_AHEAD, Batches, MicroBatch, Prefetcher
from anygauge.interface import (
    Backend,
    DataAccessError,
    DataError,
    Engine,
    LossFunction,
    Share,
    UpdateResult,
)
from anygauge.training.checkpoints.manager import CheckpointManager, StopRequest
from anygauge.training.meter import MetricsLogger
from anygauge.training.moving import HostBatch, ToDevice
from anygauge.training.pending import PendingSteps
from anygauge.training.progress import Progress
from anygauge.training.schedule import learning_rate
from anygauge.training.warm_up import WarmUp

StopReason = Literal["finished", "stopped"]
"""Why a run's last step was its last: all are done, or it was asked to end and has written a
checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a training loop is made of.

    Attributes:
        to_device: moves a micro-batch to the device and makes the model's arguments.
        loss_function: the model's outputs -> summed loss.
        evaluations: name -> this rank's batches and the loss tokens over all ranks.
        progress: gets where this rank is.
        share: the part of each step's rows that this rank reads.
        warm_up: gives a step's micro-batches to the engine, in the first steps all widths, too.
        start: steps that were done before, in the part of the run that this one resumes.
    """

    engine: Engine
    backend: Backend
    batches: Batches
    to_device: ToDevice
    loss_function: LossFunction
    evaluations: Mapping[str, tuple[Iterable[MicroBatch], int]]
    meter: MetricsLogger
    checkpoints: CheckpointManager
    stop: StopRequest
    settings: TrainSection
    progress: Progress
    share: Share
    warm_up: WarmUp
    start: int = 0

    def run(self) -> StopReason:
        """Train from `start`; returns why it stopped.

        Raises:
            NonFiniteLossError: the loss or its gradient became inf or nan; names the rows.
        """
        steps = self.batches.steps
        if self._due(self.start) and not self.meter.history.evaluated(self.start):
            self.evaluate(self.start)
        checkpoints = self.checkpoints
        pending = PendingSteps(
            self.backend, self.meter, self.stop, checkpoints, self.progress, self.share
        )
        with Prefetcher(self._laid_out, steps, STEPS_AHEAD, name="batches-ahead") as ahead:
            for index in range(self.start, steps):
                self.progress.at(f"step {index + 1}, forward and backward")
                pending.begin()
                tokens = self._loss_tokens(index, pending)
                batches = ahead.get(index)
                lr = learning_rate(index, steps, self.settings.optimizer.lr, self.settings.schedule)
                loss_sums, update = self._train_on(index, batches, tokens, lr)
                pending.add(index, batches, tokens, lr, loss_sums, update)
                done, last = index + 1, index + 1 == steps
                due = last or update.skipped or self._due(done) or checkpoints.due(done)
                stop = pending.settle(index if due else index - pending.most)
                if stop or checkpoints.asked:
                    pending.settle(index)
                losses = self.evaluate(done) if self._due(done) and (last or not stop) else {}
                checkpoints.maybe_save(done, last=last, stop=stop, losses=losses)
                if stop and not last:
                    return "stopped"
        return "finished"

    def _train_on(
        self, index: int, batches: Sequence[HostBatch], tokens: int, lr: float
    ) -> tuple[Sequence[torch.Tensor], UpdateResult]:
        """Run a step and update; a step without loss tokens changes nothing."""
        if not tokens:
            return (), UpdateResult(grad_norm=torch.zeros(()), skipped=False)
        run_step = self.warm_up.run_step
        loss_sums = run_step(self.engine, index, batches, self.loss_function, tokens)
        self.progress.at(f"step {index + 1}, update")
        return loss_sums, self.engine.update(lr, self.settings.max_grad_norm)

    def _loss_tokens(self, index: int, pending: PendingSteps) -> int:
        """Loss tokens of a step over all ranks.

        Raises:
            DataError: a streamed row cannot be used; what was trained before is in a checkpoint.
        """
        try:
            return self.batches.num_loss_tokens(index)
        except DataError as error:
            # All ranks meet a bad row, but the network may have failed one of several alone.
            if not isinstance(error, DataAccessError) or self.meter.world_size == 1:
                pending.settle(index)
                if index > self.start:
                    self.checkpoints.save_before_error(index)
            raise

    def _laid_out(self, index: int) -> list[HostBatch]:
        """This rank's micro-batches of a step, ready to be moved; a thread calls this."""
        return [self.to_device.on_host(batch) for batch in self.batches.step(index)]

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
