"""Reads what steps give, late; checks, counts and writes it.

A step's losses and its gradient norm are one small tensor on its way to the host. It is read when
a device that works ahead has been given the next step; of another device, at once. With it come the
sums over ranks, the request to stop, the time for a checkpoint and the check for numbers that are
not finite: all ranks learn of them in the same place. Metrics are worked out once, and go to
``metrics.jsonl``, the terminal and trackers.

Rates count real tokens, never padding. MFU is left out where the device's peak is unknown; it
counts the model's own operations, so recomputation lowers it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.config.schema import TrainSection
from anygauge.data import Batches, MicroBatch
from anygauge.interface import (
    HOST_DEVICE,
    Backend,
    Collectives,
    NonFiniteLossError,
    RunStatus,
    Share,
    UpdateResult,
)
from anygauge.models.flops import StepFlops
from anygauge.training.checkpoints.manager import CheckpointManager, StopRequest
from anygauge.training.progress import Progress
from anygauge.training.system import SystemSampler
from anygauge.training.trackers.group import Trackers
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.text import json_values

LARGEST_EXPONENT = 700.0
"""Beyond it exp overflows a float."""
MOST_ROWS = 8
"""That an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step that the device was given will have computed, on its way to the host.

    Attributes:
        origins: of the rows of each micro-batch.
        padded_tokens: of its micro-batches on this rank, padding among them.
        normalizer: see `Batches.normalizer`.
        on_host, copied: a loss for each micro-batch, and the norm of the gradient: those that the
            engine has on the host, by place, and the others.
        counted: by the logger, when the device was given the step; None: when it is read.
        began, ended: moments of the device's; or of the host's clock, which gives the end later.
    """

    index: int
    origins: Sequence[Sequence[str]]
    padded_tokens: int
    normalizer: int
    lr: float
    skipped: bool
    on_host: Mapping[int, Tensor]
    copied: Tensor
    counted: Mapping[str, float] | None
    began: Any
    ended: Any

    def numbers(self) -> list[float]:
        """The losses and the norm; where they are copied ahead, once the copy is made."""
        copied = iter(self.copied.tolist())
        count = len(self.on_host) + len(self.copied)
        return [
            float(self.on_host[at]) if at in self.on_host else next(copied) for at in range(count)
        ]


def _begin_copy(values: Sequence[Tensor], *, ahead: bool) -> tuple[dict[int, Tensor], Tensor]:
    """Split numbers into those on the host, by place, and the others in one tensor.

    Args:
        values: of one element each, of a floating type, on the device or the host.
        ahead: begin to copy now, into pinned memory, which the host does not wait for.
    """
    here = {at: value for at, value in enumerate(values) if value.device.type == HOST_DEVICE}
    away = [value.detach() for at, value in enumerate(values) if at not in here]
    if not away:
        return here, torch.empty(0)
    # None is rounded: a norm may be float64.
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in away), torch.float32)
    together = torch.stack([v.reshape(()).to(dtype) for v in away])
    if ahead:
        memory = torch.empty(len(away), dtype=dtype, device=HOST_DEVICE, pin_memory=True)
        together = memory.copy_(together, non_blocking=True)
    return here, together


@dataclass(kw_only=True)
class PendingSteps:
    """Steps that the device was given and that were not read yet.

    Attributes:
        logger: gets each step when it is read.
        checkpoints: learns whether the ranks agree that it is time for one.
        share: the part of each step's rows that this rank reads.
        ahead: how many steps may be unread when the next one begins, the same on all ranks.
    """

    backend: Backend
    logger: MetricsLogger
    stop: StopRequest
    checkpoints: CheckpointManager
    progress: Progress
    share: Share

    def __post_init__(self) -> None:
        self._placement, self._collectives = self.backend.placement, self.backend.collectives
        self.ahead = int(self._placement.works_ahead)
        self._steps: deque[StepResult] = deque()
        self._began: Any = None
        self._asked = False

    def begin(self) -> None:
        """The next step begins."""
        self._began = self._time_event()

    def add(
        self,
        index: int,
        batches: Sequence[MicroBatch],
        normalizer: int,
        lr: float,
        loss_sums: Sequence[Tensor],
        update: UpdateResult,
    ) -> None:
        """Take what the device will have computed of the step that began last."""
        values = [*loss_sums, update.grad_norm]
        on_host, copied = _begin_copy(
            values, ahead=bool(self.ahead) and self._placement.pinned_memory
        )
        ended = self._time_event() if self.ahead else None
        self._steps.append(
            StepResult(
                index=index,
                origins=[batch.origins for batch in batches],
                padded_tokens=sum(batch.input_ids.numel() for batch in batches),
                normalizer=normalizer,
                lr=lr,
                skipped=update.skipped,
                on_host=on_host,
                copied=copied,
                # What is read later would have the next step's counts.
                counted=self.logger.read_counters() if self.ahead else None,
                began=self._began,
                ended=ended,
            )
        )

    def read(self, *, but: int = 0) -> bool:
        """Read all steps but the latest few; returns whether any rank is to stop.

        Every rank calls it after the same step.

        Raises:
            NonFiniteLossError: the loss or the gradient of one is not finite; names the rows.
        """
        while len(self._steps) > but:
            self._read(self._steps.popleft())
        return self._asked

    def _read(self, step: StepResult) -> None:
        self.progress.enter(f"step {step.index + 1}, sums over ranks")
        if self.ahead:
            step.ended.synchronize()
        *losses, norm = step.numbers()
        places = step.padded_tokens * self.share.leads
        overdue = self.checkpoints.overdue()
        total, stop, padded_tokens, votes = self._collectives.sum_on_host(
            [sum(losses), self.stop.asked, places, overdue]
        )
        self._asked = self._asked or bool(stop)
        self.checkpoints.asked = bool(votes)
        check_finite(step, total, losses, norm, self._collectives)
        self.logger.step(
            step,
            loss=total / step.normalizer if step.normalizer else None,
            grad_norm=norm,
            padded_tokens=int(padded_tokens),
            seconds=self._duration(step),
        )

    def _time_event(self) -> Any:
        if not self.ahead:
            return time.perf_counter()
        event = self._placement.event()
        event.record()
        return event

    def _duration(self, step: StepResult) -> float:
        if self.ahead:
            return float(step.began.elapsed_time(step.ended)) / 1e3
        return time.perf_counter() - float(step.began)


def check_finite(
    step: StepResult, total: float, sums: Sequence[float], norm: float, collectives: Collectives
) -> None:
    """Return if the step's loss and gradient are finite.

    Where loss scaling left the update out, the norm may be anything: the next step tries again with
    a smaller scale.

    Args:
        total: summed loss over all ranks, the same on every rank.
        sums: this rank's losses, one per micro-batch; several ranks may have parts of one.
        norm: of the gradient, the same on every rank.

    Raises:
        NonFiniteLossError: on every rank together; the message names the rows.
    """
    finite_loss = math.isfinite(total)
    if finite_loss and (step.skipped or math.isfinite(norm)):
        return
    what = f"the gradient's norm became {norm}" if finite_loss else f"the loss became {total}"
    mine = [
        origin
        for loss, origins in zip(sums, step.origins, strict=True)
        if finite_loss or not math.isfinite(loss)
        for origin in origins
    ]
    every = (origin for rank in collectives.gather_objects(mine) for origin in rank)
    rows = list(dict.fromkeys(every))
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    raise NonFiniteLossError(
        f"{what} at step {step.index + 1}, with rows {', '.join(rows[:MOST_ROWS])}{more}. Look at "
        "these rows; or lower train.optimizer.lr, lengthen train.schedule.warmup_steps, or try "
        "precision.param_dtype: float32. No adapter or model was saved; earlier checkpoints are "
        "kept"
    )


@dataclass(kw_only=True, slots=True)
class History:
    """What the metrics of a run have come to; a resumed run continues from it.

    Attributes:
        step: steps done.
        first_loss, last_loss: of the first and the latest step; nan before.
        tokens: real tokens of all steps.
        seconds: spent in steps.
        evaluations: a record of each.
        timed_steps, timed_tokens, timed_seconds: the same of the steps after a warm-up.
    """

    step: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    tokens: int = 0
    seconds: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    timed_steps: int = 0
    timed_tokens: int = 0
    timed_seconds: float = 0.0

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> History:
        """What a checkpoint kept of it, where null stands for nan."""

        def number(value: float | None) -> float:
            return math.nan if value is None else value

        evaluations = [
            {**one, "eval_loss": number(one["eval_loss"])} for one in record["evaluations"]
        ]
        losses = {name: number(record[name]) for name in ("first_loss", "last_loss")}
        return cls(**{**record, **losses, "evaluations": evaluations})

    def add(
        self, index: int, *, loss: float | None, tokens: int, seconds: float, timed: bool
    ) -> None:
        """Count one step.

        Args:
            index: of the step, from 0.
            loss: None where it had no loss tokens.
            timed: whether the run has warmed up.
        """
        self.step = index + 1
        self.tokens += tokens
        self.seconds += seconds
        if loss is not None:
            self.last_loss = loss
            if math.isnan(self.first_loss):
                self.first_loss = loss
        if timed:
            self.timed_steps += 1
            self.timed_tokens += tokens
            self.timed_seconds += seconds

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation was made after this step."""
        return any(record["step"] == step for record in self.evaluations)

    def step_seconds(self) -> float | None:
        """Mean seconds of a step: after the warm-up, or of all where none came after it."""
        if self.timed_steps:
            return self.timed_seconds / self.timed_steps
        return self.seconds / self.step if self.step else None

    def speed(self) -> dict[str, float]:
        """The speed as a run's summary has it; empty before the first step.

        Returns:
            ``tokens_per_s`` and the number of its steps, ``timed_steps``: those after the warm-up,
            or all where none came after it. In the first case also ``warmup_s``, what the other
            steps took, and ``warmup_extra_s``, how much longer than their tokens take later: mostly
            compilation; 0 where they took no longer.
        """
        if not self.seconds:
            return {}
        if not self.timed_tokens:  # perhaps of steps that had nothing to learn
            return {"tokens_per_s": self.tokens / self.seconds, "timed_steps": self.step}
        rate = self.timed_tokens / self.timed_seconds
        warmup = self.seconds - self.timed_seconds
        extra = warmup - (self.tokens - self.timed_tokens) / rate
        return {
            "tokens_per_s": rate,
            "timed_steps": self.timed_steps,
            "warmup_s": warmup,
            "warmup_extra_s": max(0.0, extra),
        }


@dataclass(kw_only=True)
class MetricsLogger:
    """Collects what the loop measures; only rank 0 writes anything.

    Attributes:
        shapes: distinct shapes of micro-batches that this rank was given; it grows.
        peak_flops: of one device, operations per second; None where unknown.
        history: of the run, the part before this process included.
    """

    path: Path
    rank: int
    world_size: int
    settings: TrainSection
    batches: Batches
    shapes: Set[tuple[int, ...]]
    flops: StepFlops
    peak_flops: float | None
    backend: Backend
    events: EventWriter
    trackers: Trackers
    system: SystemSampler | None = None
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        """Open the file and begin to count."""
        if self.rank == 0:
            cut_after(self.path, self.history.step)
        # Without a buffer, so that it is known what could not be written.
        self._file = self.path.open("ab", buffering=0) if self.rank == 0 else None
        self._unwritten = b""
        self._warned = False
        # Steps of this process yet to come that the run's speed leaves out.
        self._untimed = self.settings.throughput_warmup_steps
        self._peaks: dict[str, int] = {}
        self._note_memory("load")

    def _note_memory(self, phase: str) -> int:
        """This device's peak, in bytes; kept as the phase's."""
        memory = self.backend.placement.memory()
        self._memory_kind = memory.kind
        self._peaks[phase] = max(memory.peak, self._peaks.get(phase, 0))
        return memory.peak

    def memory(self, expected: Mapping[str, int]) -> dict[str, Any]:
        """The most that rank 0 held, in bytes, for the report.

        Args:
            expected: phase -> what was planned of its tensors; empty where it was not.
        """
        predicted = {"predicted": dict(expected)} if expected else {}
        return {**predicted, "measured": dict(self._peaks), "counted": self._memory_kind}

    def step_seconds(self, expected: float | None) -> dict[str, float | None]:
        """What a step took on average after the warm-up, for the report.

        Args:
            expected: what was planned; None where it was not.
        """
        mean = self.history.step_seconds()
        return {"measured": mean} if expected is None else {"predicted": expected, "measured": mean}

    def read_counters(self) -> dict[str, float]:
        """Read the counters when a step was given to the device."""
        if self._file is None:
            return {}
        graphs = self.backend.graph.counters()
        return {
            "shapes": len(self.shapes),
            "peak_memory": self._note_memory("training"),
            **{f"graph_{name}": value for name, value in graphs.items()},
        }

    def step(
        self,
        step: StepResult,
        *,
        loss: float | None,
        grad_norm: float,
        padded_tokens: int,
        seconds: float,
    ) -> None:
        """Record one optimizer step.

        Args:
            loss: nats per loss token, or pair; None where the step had none.
            padded_tokens: in the batches of all ranks, padding among them.
            seconds: wall clock of the step.
        """
        tokens, steps = self.batches.real_tokens(step.index), self.batches.steps
        done = step.index + 1
        counted = self.read_counters() if step.counted is None else step.counted
        timed = self._untimed == 0
        self.history.add(step.index, loss=loss, tokens=tokens, seconds=seconds, timed=timed)
        self._untimed = max(0, self._untimed - 1)
        if self._file is None:
            return
        metrics: dict[str, Any] = {
            **({} if loss is None else {"loss": loss, "grad_norm": grad_norm}),
            "lr": step.lr,
            "epoch": round(self.batches.epoch(step.index), 6),
            "tokens": tokens,
            f"num_{self.unit}": step.normalizer,
            "padding": round(1 - tokens / padded_tokens, 6),
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            **counted,
        }
        if self.peak_flops:
            operations = self.flops.of(tokens, tokens / self.batches.global_batch)
            metrics["mfu"] = operations / seconds / (self.peak_flops * self.world_size)
        if step.skipped:
            metrics["skipped"] = 1
        if loss is None:
            self.events.message(
                f"step {done}: none of its rows holds anything to learn within "
                "data.max_length, so nothing was trained in it",
                "warning",
            )
        left = (steps - done) * (self.history.step_seconds() or 0.0)
        self._write({"step": done, **metrics, "remaining_s": round(left, 3)})
        if done % self.settings.log_every == 0 or done == steps:
            self.events.send(
                "step",
                step=done,
                steps=steps,
                elapsed_s=self.history.seconds,
                memory_kind=self._memory_kind,
                **json_values(metrics),
            )
        self.trackers.log(done, {f"train/{name}": v for name, v in metrics.items()})
        self._system_samples()

    @property
    def unit(self) -> str:
        """What a loss is the mean over, as metrics name it."""
        return "pairs" if self.batches.layout.pairs else "loss_tokens"

    def evaluation(self, step: int, name: str, loss: float, count: int) -> None:
        """Record one evaluation after `step` steps; `loss` in nats per loss token, or pair."""
        counted = f"eval_{self.unit.removeprefix('loss_')}"
        record = {"step": step, "name": name, "eval_loss": loss, counted: count}
        self.history.evaluations.append(record)
        if self._file is None:
            return
        self._note_memory("training")
        derived = {}
        if not self.batches.layout.pairs:
            derived["perplexity"] = math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
        self._write({**record, **derived})
        self.events.send("evaluation", **json_values({**record, **derived}))
        shown = {"loss": loss, **derived}
        self.trackers.log(step, {f"{name}/{key}": value for key, value in shown.items()})
        self._system_samples()

    def _system_samples(self) -> None:
        """Write what was sampled since the last call; it belongs to the latest step."""
        for at, values in self.system.drain() if self.system else ():
            self._write({"time": at, "system": dict(values)})
            named = {f"system/{name}": value for name, value in values.items()}
            self.trackers.log(self.history.step, named)

    def _write(self, record: dict[str, Any]) -> None:
        record = {"time": time.time(), **record}
        self._unwritten += json.dumps(json_values(record)).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write what waits; what cannot be written now waits for the next line."""
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.events.message(
                    f"{self._file.name} cannot be written now: {error.strerror}. The run goes on, "
                    "and writes its metrics later; a checkpoint or the result may fail: free space",
                    "warning",
                )

    def close(self, status: RunStatus) -> None:
        """End sampling, files and trackers; takes a bounded time and raises nothing of theirs."""
        if self.system is not None:
            self.system.stop()
        if self._file is not None:
            self._system_samples()
            self._flush()
            if lacking := self._unwritten.count(b"\n"):
                self.events.message(f"{self._file.name} lacks the last {lacking} lines", "warning")
            with contextlib.suppress(OSError):  # of what was written before, on a network disk
                self._file.close()
        self.trackers.close(status, {} if status == "failed" else self.summary())

    def summary(self) -> dict[str, float]:
        """The run's result for trackers."""
        history = self.history
        result = {
            "steps": history.step,
            "first_loss": history.first_loss,
            "final_loss": history.last_loss,
            "tokens": history.tokens,
            **history.speed(),
        }
        for record in history.evaluations:
            result[f"{record['name']}_loss"] = record["eval_loss"]
        return result


def cut_after(path: Path, step: int) -> None:
    """Keep a metrics file up to a step: what a run did beyond its checkpoint is done again."""
    if not path.exists():
        return
    kept: list[str] = []
    waiting: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break  # torn by a kill
        waiting.append(line)
        if "step" in record:
            if record["step"] > step:
                break
            kept += waiting
            waiting = []
    write_text(path, "".join(kept) if step else "")
