"""Metrics of a run: worked out once, sent to ``metrics.jsonl``, the terminal and trackers.

Rates count real tokens, never padding. MFU is left out where the device's peak is unknown; it
counts the model's own operations, so recomputation lowers it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import Backend, Tracker
from anygauge.interface.events import EventWriter
from anygauge.models.flops import StepFlops

LARGEST_EXPONENT = 700.0
"""Beyond it exp overflows a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """How much one step holds over all ranks: real tokens, learned tokens, sequences."""

    tokens: int
    supervised_tokens: int
    sequences: int


class RunMeter:
    """Collects what the loop measures; only rank 0 writes anything."""

    def __init__(
        self,
        *,
        path: Path,
        rank: int,
        steps: int,
        world_size: int,
        volume: Callable[[int], Volume],
        epoch: Callable[[int], float],
        flops: StepFlops,
        peak_flops: float | None,
        backend: Backend,
        events: EventWriter,
        trackers: Sequence[Tracker],
        log_every: int,
    ) -> None:
        """Args: peak_flops: of one device, operations per second; None where unknown."""
        self._file = path.open("w", encoding="utf-8") if rank == 0 else None
        self._steps = steps
        self._world_size = world_size
        self._volume = volume
        self._epoch = epoch
        self._flops = flops
        self._peak_flops = peak_flops
        self._backend = backend
        self._events = events
        self._trackers = trackers
        self._log_every = log_every
        self.evaluations: list[dict[str, Any]] = []
        self.last_loss = math.nan
        self.first_loss = math.nan
        self.tokens = 0
        self.seconds = 0.0

    def step(
        self, index: int, *, loss: float, lr: float, grad_norm: float, skipped: bool, seconds: float
    ) -> None:
        """Record one optimizer step."""
        volume = self._volume(index)
        self.tokens += volume.tokens
        self.seconds += seconds
        self.last_loss = loss
        if index == 0:
            self.first_loss = loss
        if self._file is None:
            return
        metrics: dict[str, Any] = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "epoch": round(self._epoch(index), 6),
            "tokens": volume.tokens,
            "supervised_tokens": volume.supervised_tokens,
            "seconds": seconds,
            "tokens_per_s": volume.tokens / seconds,
            "peak_memory": self._backend.placement.memory().peak,
        }
        if self._peak_flops:
            operations = self._flops.of(volume.tokens, volume.tokens / max(1, volume.sequences))
            metrics["mfu"] = operations / seconds / (self._peak_flops * self._world_size)
        if skipped:
            metrics["skipped"] = 1
        self._write({"step": index + 1, **metrics})
        if (index + 1) % self._log_every == 0 or index + 1 == self._steps:
            self._events.send(
                "step",
                step=index + 1,
                steps=self._steps,
                elapsed_s=self.seconds,
                **{name: _finite(value) for name, value in metrics.items()},
            )
        for tracker in self._trackers:
            tracker.log(index + 1, {f"train/{name}": value for name, value in metrics.items()})

    def evaluation(self, step: int, name: str, loss: float, tokens: int) -> None:
        """Record one evaluation after `step` steps; `loss` in nats per supervised token."""
        record = {"step": step, "name": name, "eval_loss": loss, "eval_tokens": tokens}
        self.evaluations.append(record)
        if self._file is None:
            return
        self._write(record)
        self._events.send(
            "evaluation",
            **{key: _finite(value) for key, value in record.items()},
            perplexity=_finite(math.exp(loss) if loss < LARGEST_EXPONENT else math.inf),
        )
        for tracker in self._trackers:
            tracker.log(step, {f"{name}/loss": loss})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End files and trackers."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _finite(value: Any) -> Any:
    """JSON has no inf or nan: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
