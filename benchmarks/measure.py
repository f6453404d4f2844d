"""From what a run wrote to what is reported: speed, memory, traffic, losses.

Speed is real tokens over all ranks, padding not counted, per second between the ends of optimizer
steps on rank 0's clock, from the end of the last warm-up step to the end of the last step:
preparing data, building the model and saving lie outside, everything between two steps inside.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.entrants import Entrant
from benchmarks.plan import ContenderPlan

LAST_STEPS = 5
"""Steps whose mean is reported as the final loss: one step's depends on its few rows."""


class MeasureError(Exception):
    """A run ended well but what it wrote cannot be reported; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """What every step took part in.

    Attributes:
        times: end of each step, seconds since the epoch.
        tokens: real tokens of each step.
        losses: (summed loss in nats, loss tokens) of each step; (mean, 1) where the contender
            tells the mean alone.
        slots: places for tokens in the batches of each step, padding among them.
    """

    times: Sequence[float]
    tokens: Sequence[int]
    losses: Sequence[tuple[float, int]]
    slots: Sequence[float]

    @property
    def padding(self) -> float:
        """The share of all batches' places that held no token, from 0 to 1."""
        return 1 - sum(self.tokens) / sum(self.slots)

    def rate(self, warmup: int, last: int) -> float:
        """Tokens per second after the first `warmup` steps, at least 1, of the first `last`."""
        return sum(self.tokens[warmup:last]) / (self.times[last - 1] - self.times[warmup - 1])


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

    Raises:
        MeasureError: a step is missing, or other tokens were read than there are.
    """
    folder = Path(plan.output)
    if entrant.module is None:
        ranks = [anygauge_steps(folder)]
    else:
        ranks = [contender_steps(folder, rank) for rank in range(plan.ranks)]
    for steps in ranks:
        if len(steps.times) != plan.steps or not steps.losses:
            raise MeasureError(
                f"{len(steps.times)} of {plan.steps} steps and {len(steps.losses)} losses recorded"
            )
    whole = merged(ranks)
    if plan.layout != "packed" and sum(whole.tokens) != expected:
        raise MeasureError(f"read {sum(whole.tokens)} tokens in all, but its rows have {expected}")
    times, first, last = ranks[0].times, plan.warmup, plan.steps - plan.watched
    traffic, memory = traces(folder, plan.ranks, times[first - 1], times[last - 1])
    if plan.ranks > 1 and not entrant.independent and not traffic:
        raise MeasureError("no collective in any measured step: each rank trained by itself")
    apart = ranks if entrant.independent else [whole]
    trace = _json(folder / "traffic-rank0.json")
    peaks = [_json(folder / f"phases-rank{rank}.json") for rank in range(plan.ranks)]
    return RunOutcome(
        name=entrant.name,
        round=round_,
        status="ok",
        tokens_per_s=sum(steps.rate(first, last) for steps in apart),
        tokens=sum(whole.tokens),
        padding=whole.padding,
        step_seconds=[after - before for before, after in itertools.pairwise(times)],
        peak_memory=memory,
        sent={name: count / (last - first) for name, count in traffic.items()},
        losses=[total / max(1, loss_tokens) for total, loss_tokens in whole.losses],
        wall_seconds=wall_s,
        watched=_json(folder / "watched-rank0.json"),
        first_step_s=times[0] - began,
        cpu_seconds=trace.get("cpu_seconds"),
        modules=trace.get("modules"),
        phases=[each for each in peaks if each is not None],
    )


def anygauge_steps(folder: Path) -> StepCounts:
    """Steps from ``metrics.jsonl``.

    Raises:
        MeasureError: the file is not there, or its steps carry no time.
    """
    path = folder / "run" / "metrics.jsonl"
    if not path.is_file():
        raise MeasureError(f"no such file: {path}")
    records = [record for record in _lines(path) if "loss" in record and "seconds" in record]
    if any("time" not in record for record in records):
        raise MeasureError(f"{path}: steps carry no 'time', the end of the step")
    return StepCounts(
        times=[record["time"] for record in records],
        tokens=[record["tokens"] for record in records],
        losses=[(record["loss"], 1) for record in records],
        slots=[record["tokens"] / (1 - record["padding"]) for record in records],
    )


def contender_steps(folder: Path, rank: int) -> StepCounts:
    """Steps that a contender's rank recorded.

    Raises:
        MeasureError: the file is not there.
    """
    path = folder / f"steps-rank{rank}.jsonl"
    if not path.is_file():
        raise MeasureError(f"no such file: {path}")
    records = _lines(path)
    steps = [record for record in records if "time" in record]
    losses = [record for record in records if "time" not in record]
    return StepCounts(
        times=[step["time"] for step in steps],
        tokens=[step["tokens"] for step in steps],
        losses=[(each["loss_sum"], each["loss_tokens"]) for each in losses],
        slots=[step["slots"] for step in steps],
    )


def merged(ranks: Sequence[StepCounts]) -> StepCounts:
    """Steps of all ranks together, on the first rank's clock."""
    if len(ranks) == 1:
        return ranks[0]
    # Each rank of a trainer records its own mean.
    told = [steps.losses for steps in ranks if steps.losses]
    losses = [
        (sum(total for total, _ in step), sum(loss_tokens for _, loss_tokens in step))
        for step in zip(*told, strict=True)
    ]
    return StepCounts(
        times=ranks[0].times,
        tokens=[sum(step) for step in zip(*(steps.tokens for steps in ranks), strict=True)],
        losses=losses,
        slots=[sum(step) for step in zip(*(steps.slots for steps in ranks), strict=True)],
    )


def traces(
    folder: Path, ranks: int, begin: float, end: float
) -> tuple[dict[str, float], int | None]:
    """(bytes sent by operation between two times, peak memory), both over all ranks.

    Raises:
        MeasureError: a rank left no trace.
    """
    sent: dict[str, float] = {}
    memory: list[int | None] = []
    for rank in range(ranks):
        path = folder / f"traffic-rank{rank}.json"
        if not path.is_file():
            raise MeasureError(f"no such file: {path}: was the rank ended by a signal?")
        record = json.loads(path.read_text(encoding="utf-8"))
        memory.append(record["peak_memory"])
        for moment, operation, count in record["calls"]:
            if begin < moment <= end:
                sent[operation] = sent.get(operation, 0.0) + count
    known = [peak for peak in memory if peak is not None]
    return sent, sum(known) if len(known) == ranks else None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
