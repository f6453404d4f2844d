"""From what a run wrote to what is reported: speed, memory, traffic, losses.

Speed is real tokens over all ranks, padding not counted, per second between the ends of optimizer
steps on rank 0's clock, from the end of the last warm-up step to the end of the last step:
preparing data, building the model and saving lie outside, everything between two steps inside.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.entrants import Entrant
from benchmarks.plan import ContenderPlan

LAST_STEPS = 5
"""Steps whose mean is reported as the final loss: one step's depends on its few rows."""


class MeasureError(Exception):
    """A run ended well but what it wrote cannot be reported; says why."""


class Step(NamedTuple):
    """One optimizer step of a rank, or of all ranks together.

    Attributes:
        time: its end, seconds since the epoch.
        tokens: real ones.
        slots: places for tokens in its batches, padding among them.
        loss_sum, loss_tokens: summed loss in nats, and of how many tokens; the mean and 1 where
            the contender reports the mean alone.
    """

    time: float
    tokens: int
    slots: float
    loss_sum: float
    loss_tokens: int


def rate(steps: Sequence[Step], warmup: int, last: int) -> float:
    """Tokens per second after the first `warmup` steps, at least 1, of the first `last`."""
    tokens = sum(step.tokens for step in steps[warmup:last])
    return tokens / (steps[last - 1].time - steps[warmup - 1].time)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """One run of one contender.

    Attributes:
        status: ok, failed, or missing (a package is not installed).
        problem: what went wrong, with the last lines of the log.
        peak_memory: bytes of all ranks, each at its own peak: of the device's allocator where
            there is one, else resident.
        watched: what `shim/benchmark_watch.py` found in rank 0's last steps; None where it did
            not watch.
        sent: bytes per step over all ranks, by operation.
        first_step_s: from the command to the end of the first step.
        cpu_seconds, modules: of rank 0, from its start to its end.
        phases: of each rank, phase -> bytes at its peak, where the plan evaluates.
    """

    name: str
    round: int
    status: str
    problem: str = ""
    log: Sequence[str] = ()
    tokens_per_s: float | None = None
    tokens: int | None = None
    padding: float | None = None
    step_seconds: Sequence[float] = ()
    peak_memory: int | None = None
    sent: Mapping[str, float] | None = None
    losses: Sequence[float] = ()
    wall_seconds: float | None = None
    watched: Mapping[str, Any] | None = None
    first_step_s: float | None = None
    cpu_seconds: float | None = None
    modules: float | None = None
    phases: Sequence[Mapping[str, int]] = ()

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last steps."""
        return fmean(self.losses[-LAST_STEPS:]) if self.losses else None


def outcome(
    entrant: Entrant, plan: ContenderPlan, *, round_: int, expected: int, began: float,
    wall_s: float,
) -> RunOutcome:  # fmt: skip
    """Read what a run that ended well wrote into ``plan.output``.

    Args:
        expected: tokens of the rows, for a contender that reads each once.
        began: when the run was started, seconds since the epoch.
        wall_s: that it took.
    """
    folder = Path(plan.output)
    if entrant.module is None:
        ranks = [anygauge_steps(folder)]
    else:
        ranks = [contender_steps(folder, rank) for rank in range(plan.ranks)]
    for steps in ranks:
        if len(steps) != plan.steps:
            raise MeasureError(f"{len(steps)} of {plan.steps} steps recorded")
    whole = [Step(each[0].time, *map(sum, list(zip(*each, strict=True))[1:]))
             for each in zip(*ranks, strict=True)]  # fmt: skip
    tokens = sum(step.tokens for step in whole)
    if plan.layout != "packed" and tokens != expected:
        raise MeasureError(f"read {tokens} tokens in all, but its rows have {expected}")
    times, first, last = [step.time for step in whole], plan.warmup, plan.steps - plan.watched
    records = [trace_of(folder / f"traffic-rank{rank}.json") for rank in range(plan.ranks)]
    traffic = sent_between(records, times[first - 1], times[last - 1])
    memory = [record["peak_memory"] for record in records]
    if plan.ranks > 1 and not entrant.independent and not traffic:
        raise MeasureError("no collective in any measured step: each rank trained by itself")
    apart = ranks if entrant.independent else [whole]
    peaks = [_json(folder / f"phases-rank{rank}.json") for rank in range(plan.ranks)]
    return RunOutcome(
        name=entrant.name,
        round=round_,
        status="ok",
        tokens_per_s=sum(rate(steps, first, last) for steps in apart),
        tokens=tokens,
        padding=1 - tokens / sum(step.slots for step in whole),
        step_seconds=[after - before for before, after in itertools.pairwise(times)],
        peak_memory=None if None in memory else sum(memory),
        sent={name: count / (last - first) for name, count in traffic.items()},
        losses=[step.loss_sum / max(1, step.loss_tokens) for step in whole],
        wall_seconds=wall_s,
        watched=_json(folder / "watched-rank0.json"),
        first_step_s=times[0] - began,
        cpu_seconds=records[0].get("cpu_seconds"),
        modules=records[0].get("modules"),
        phases=[each for each in peaks if each is not None],
    )


def anygauge_steps(folder: Path) -> list[Step]:
    """Steps from ``metrics.jsonl``."""
    path = folder / "run" / "metrics.jsonl"
    records = [record for record in _lines(path) if "loss" in record and "seconds" in record]
    if any("time" not in record for record in records):
        raise MeasureError(f"{path}: steps carry no 'time', the end of the step")
    return [
        Step(each["time"], each["tokens"], each["tokens"] / (1 - each["padding"]), each["loss"], 1)
        for each in records
    ]


def contender_steps(folder: Path, rank: int) -> list[Step]:
    """Steps that a contender's rank recorded."""
    return [Step(**step) for step in _lines(folder / f"steps-rank{rank}.jsonl")]


def sent_between(records: Sequence[Any], begin: float, end: float) -> Counter[str]:
    """Bytes by operation that all ranks sent between two times."""
    sent: Counter[str] = Counter()
    for record in records:
        for moment, operation, count in record["calls"]:
            if begin < moment <= end:
                sent[operation] += count
    return sent


def trace_of(path: Path) -> Any:
    """What a rank left when it ended."""
    if not path.is_file():
        raise MeasureError(f"no such file: {path}: was the rank ended by a signal?")
    return _json(path)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise MeasureError(f"no such file: {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
