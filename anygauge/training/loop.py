"""The loop: the same for every device and every strategy.

One step is: this rank's micro-batches -> device -> `Engine.run_step` (loss per token, or pair, of
the whole global batch) -> `Engine.update` -> metrics. The next micro-batches are laid out by a
thread, and metrics are read while the device does the next step, so that it waits for neither. What
differs between devices is behind `Backend`, what differs between strategies behind `Engine`; there
is no branch on either here.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    UpdateResult,
)
from anygauge.training.checkpoints.manager import CheckpointManager
from anygauge.training.evaluation import EVAL, EvaluationSources, early_stop
from anygauge.training.profiled_steps import StepProfiler
from anygauge.training.progress import Progress
from anygauge.training.schedule import learning_rate
from anygauge.training.step_results import MetricsLogger, PendingSteps
from anygauge.training.to_device import ToDevice

StopReason = Literal["steps", "early_stopping", "request"]
"""Why a run's last step was its last: all are done, its evaluations are no longer better, or it was
asked to end and has written a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a training loop is made of.

    Attributes:
        to_device: moves micro-batches to the device, and makes the model's arguments.
        loss_function: the model's outputs -> summed loss.
        evaluations: of each source of the evaluation rows; none where there are no such rows.
        pending: steps that the device was given, until they are read.
        progress: gets where this rank is.
        profiler: records some steps.
        start: steps that were done before, in the part of the run that this one resumes.
    """

    engine: Engine
    backend: Backend
    batches: Batches
    to_device: ToDevice
    loss_function: LossFunction
    evaluations: EvaluationSources
    logger: MetricsLogger
    pending: PendingSteps
    checkpoints: CheckpointManager
    settings: TrainSection
    progress: Progress
    profiler: StepProfiler
    start: int = 0

    def run(self) -> StopReason:
        """Train from `start`; returns why it stopped.

        Raises:
            NonFiniteLossError: the loss or its gradient became inf or nan; names the rows.
        """
        steps = self.batches.steps
        pending, checkpoints = self.pending, self.checkpoints
        if self._due(self.start) and not self.logger.history.has_evaluation(self.start):
            loss = self.evaluate(self.start)
            # What a run that went on would have kept when it came here.
            if self.start and loss is not None:
                checkpoints.maybe_save(self.start, last=False, stop=False, loss=loss)
        if self.why_early():
            return "early_stopping"
        with Prefetcher(self.batches.step, steps, STEPS_AHEAD, name="batches-ahead") as ahead:
            for index in self.profiler.over(range(self.start, steps)):
                self.progress.enter(f"step {index + 1}, forward and backward")
                pending.begin()
                normalizer = self._normalizer(index)
                batches = ahead.get(index)
                lr = learning_rate(index, steps, self.settings.optimizer.lr, self.settings.schedule)
                loss_sums, update = self._train_on(index, batches, normalizer, lr)
                pending.add(index, batches, normalizer, lr, loss_sums, update)
                done, last = index + 1, index + 1 == steps
                due = last or update.skipped or self._due(done) or checkpoints.due(done)
                stop = pending.read(but=0 if due else pending.ahead)
                if stop or checkpoints.asked:
                    pending.read()
                loss = self.evaluate(done) if self._due(done) and (last or not stop) else None
                early = not last and bool(self.why_early())
                checkpoints.maybe_save(done, last=last or early, stop=stop, loss=loss)
                if early:
                    return "early_stopping"
                if stop and not last:
                    return "request"
        return "steps"

    def why_early(self) -> str | None:
        """Why the run is to end, by its evaluations; None where it is not."""
        return early_stop(self.logger.history.evaluations, self.settings.early_stopping)

    def _train_on(
        self, index: int, batches: Sequence[MicroBatch], normalizer: int, lr: float
    ) -> tuple[Sequence[torch.Tensor], UpdateResult]:
        """Run a step and update; a step without loss tokens changes nothing."""
        if not normalizer:
            return (), UpdateResult(grad_norm=torch.zeros(()), skipped=False)
        run_step = self.to_device.run_step
        loss_sums = run_step(self.engine, index, batches, self.loss_function, normalizer)
        self.progress.enter(f"step {index + 1}, update")
        return loss_sums, self.engine.update(lr, self.settings.max_grad_norm)

    def _normalizer(self, index: int) -> int:
        """Loss tokens, or pairs, of a step over all ranks.

        Raises:
            DataError: a streamed row cannot be used; what was trained before is in a checkpoint.
        """
        try:
            return self.batches.normalizer(index)
        except DataError as error:
            # All ranks meet a bad row, but the network may have failed one of several alone.
            if not isinstance(error, DataAccessError) or self.logger.world_size == 1:
                self.pending.read()
                if index > self.start:
                    self.checkpoints.save_before_error(index)
            raise

    def _due(self, done: int) -> bool:
        """Whether an evaluation belongs after `done` steps."""
        every = self.settings.eval_every
        if done == 0:
            return self.settings.eval_at_start
        return done == self.batches.steps or bool(every and done % every == 0)

    def evaluate(self, done: int) -> float | None:
        """Mean loss per loss token, or pair, of the evaluation rows; None without rows.

        Where they come from several sources, the loss of each is recorded as well.
        """
        self.progress.enter(f"evaluation after step {done}")
        own, counts = [], [count for _, count in self.evaluations.values()]
        for batches, _ in self.evaluations.values():
            sums = self.engine.evaluate(map(self.to_device, batches), self.loss_function)
            own.append(float(sum(sums)))
        if not own:
            return None
        totals = self.backend.collectives.sum_on_host(own)
        loss = sum(totals) / sum(counts)
        self.logger.evaluation(done, EVAL, loss, sum(counts))
        if len(totals) > 1:
            for name, total, count in zip(self.evaluations, totals, counts, strict=True):
                self.logger.evaluation(done, f"{EVAL}/{name}", total / count, count)
        return loss
