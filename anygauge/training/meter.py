"""Metrics of a run: worked out once, sent to ``metrics.jsonl``, the terminal and trackers.

Rates count real tokens, never padding. MFU is left out where the device's peak is unknown; it
counts the model's own operations, so recomputation lowers it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.interface import Backend, RunStatus
from anygauge.models.flops import StepFlops
from anygauge.training.history import History
from anygauge.training.system import SystemSampler
from anygauge.training.trackers.group import Trackers
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.text import finite

LARGEST_EXPONENT = 700.0
"""Beyond it exp overflows a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """How much one step holds over all ranks: real tokens, loss tokens, sequences."""

    tokens: int
    num_loss_tokens: int
    sequences: int


@dataclass(kw_only=True)
class MetricsLogger:
    """Collects what the loop measures; only rank 0 writes anything.

    Attributes:
        shapes: distinct shapes of micro-batches that this rank was given; it grows.
        peak_flops: of one device, operations per second; None where unknown.
        warmup: steps of this process yet to come that the run's speed leaves out.
        history: of the run, the part before this process included.
    """

    path: Path
    rank: int
    steps: int
    world_size: int
    volume: Callable[[int], StepTokens]
    epoch: Callable[[int], float]
    shapes: Set[tuple[int, ...]]
    flops: StepFlops
    peak_flops: float | None
    backend: Backend
    events: EventWriter
    trackers: Trackers
    system: SystemSampler | None = None
    log_every: int
    warmup: int = 0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        """Open the file and begin to count."""
        if self.rank == 0:
            cut_after(self.path, self.history.step)
        # Without a buffer, so that it is known what could not be written.
        self._file = self.path.open("ab", buffering=0) if self.rank == 0 else None
        self._unwritten = b""
        self._warned = False
        self._peaks: dict[str, int] = {}
        self._see_memory("load")

    def _see_memory(self, phase: str) -> int:
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

    def counted(self) -> dict[str, float]:
        """What is counted by now: the loop asks when it has given a step to the device."""
        if self._file is None:
            return {}
        graphs = self.backend.graph.counters()
        return {
            "shapes": len(self.shapes),
            "peak_memory": self._see_memory("training"),
            **{f"graph_{name}": value for name, value in graphs.items()},
        }

    def step(
        self,
        index: int,
        *,
        loss: float | None,
        lr: float,
        grad_norm: float,
        skipped: bool,
        slots: int,
        seconds: float,
        counted: Mapping[str, float],
    ) -> None:
        """Record one optimizer step.

        Args:
            loss: nats per loss token; None where the step had none.
            slots: places for tokens in the batches of all ranks, padding among them.
            seconds: wall clock of the step.
            counted: of `counted`, when the step was done.
        """
        volume = self.volume(index)
        self.history.add(
            index, loss=loss, tokens=volume.tokens, seconds=seconds, timed=self.warmup == 0
        )
        self.warmup = max(0, self.warmup - 1)
        if self._file is None:
            return
        metrics: dict[str, Any] = {
            **({} if loss is None else {"loss": loss, "grad_norm": grad_norm}),
            "lr": lr,
            "epoch": round(self.epoch(index), 6),
            "tokens": volume.tokens,
            "num_loss_tokens": volume.num_loss_tokens,
            "padding": round(1 - volume.tokens / slots, 6),
            "seconds": seconds,
            "tokens_per_s": volume.tokens / seconds,
            **counted,
        }
        if self.peak_flops:
            operations = self.flops.of(volume.tokens, volume.tokens / max(1, volume.sequences))
            metrics["mfu"] = operations / seconds / (self.peak_flops * self.world_size)
        if skipped:
            metrics["skipped"] = 1
        if loss is None:
            self.events.message(
                f"step {index + 1}: none of its rows holds anything to learn within "
                "data.max_length, so nothing was trained in it",
                "warning",
            )
        left = (self.steps - index - 1) * (self.history.step_seconds() or 0.0)
        self._write({"step": index + 1, **metrics, "remaining_s": round(left, 3)})
        if (index + 1) % self.log_every == 0 or index + 1 == self.steps:
            self.events.send(
                "step",
                step=index + 1,
                steps=self.steps,
                elapsed_s=self.history.seconds,
                memory_kind=self._memory_kind,
                **finite(metrics),
            )
        self.trackers.log(index + 1, {f"train/{name}": v for name, v in metrics.items()})
        self._system_samples()

    def evaluation(self, step: int, name: str, loss: float, tokens: int) -> None:
        """Record one evaluation after `step` steps; `loss` in nats per loss token."""
        record = {"step": step, "name": name, "eval_loss": loss, "eval_tokens": tokens}
        self.history.evaluations.append(record)
        if self._file is None:
            return
        self._see_memory("training")
        perplexity = math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
        self._write({**record, "perplexity": perplexity})
        self.events.send("evaluation", **finite(record), perplexity=finite(perplexity))
        self.trackers.log(step, {f"{name}/loss": loss, f"{name}/perplexity": perplexity})
        self._system_samples()

    def _system_samples(self) -> None:
        """Write what was sampled since the last call; it belongs to the latest step."""
        for at, values in self.system.drain() if self.system else ():
            self._write({"time": at, "system": dict(values)})
            named = {f"system/{name}": value for name, value in values.items()}
            self.trackers.log(self.history.step, named)

    def _write(self, record: dict[str, Any]) -> None:
        record = {"time": time.time(), **record}
        self._unwritten += json.dumps(finite(record)).encode() + b"\n"
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
