"""What the metrics of a run have come to, and how fast it was once it had warmed up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
        evaluations = [
            {**one, "eval_loss": _number(one["eval_loss"])} for one in record["evaluations"]
        ]
        losses = {name: _number(record[name]) for name in ("first_loss", "last_loss")}
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

    def evaluated(self, step: int) -> bool:
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


def _number(value: float | None) -> float:
    return math.nan if value is None else value
