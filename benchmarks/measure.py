"""From what a run wrote to what is reported: speed, memory, traffic, losses; and tables of them.

Speed is real tokens over all ranks, padding not counted, per second between the ends of optimizer
steps on rank 0's clock, from the end of the last warm-up step to the end of the last step:
preparing data, building the model and saving lie outside, everything between two steps inside.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple, TypeVar

from benchmarks.contender_plan import ContenderPlan
from benchmarks.entrants import Entrant

Item = TypeVar("Item")

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
        paths = [folder / f"steps-rank{rank}.jsonl" for rank in range(plan.ranks)]
        ranks = [[Step(**step) for step in _lines(path)] for path in paths]
    for steps in ranks:
        if len(steps) != plan.steps:
            raise MeasureError(f"{len(steps)} of {plan.steps} steps recorded")
    whole = [Step(each[0].time, *map(sum, list(zip(*each, strict=True))[1:]))
             for each in zip(*ranks, strict=True)]  # fmt: skip
    tokens = sum(step.tokens for step in whole)
    if plan.layout != "packed" and tokens != expected:
        raise MeasureError(f"read {tokens} tokens in all, but its rows have {expected}")
    times, first, last = [step.time for step in whole], plan.warmup, plan.steps - plan.watched
    paths = [folder / f"traffic-rank{rank}.json" for rank in range(plan.ranks)]
    records = [json.loads(_text(path)) for path in paths]
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


def sent_between(records: Sequence[Any], begin: float, end: float) -> Counter[str]:
    """Bytes by operation that all ranks sent between two times."""
    sent: Counter[str] = Counter()
    for record in records:
        for moment, operation, count in record["calls"]:
            if begin < moment <= end:
                sent[operation] += count
    return sent


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines() if line]


def _text(path: Path) -> str:
    if not path.is_file():
        raise MeasureError(f"no such file: {path}: was the rank ended by a signal?")
    return path.read_text(encoding="utf-8")


CONFIDENCE = 0.95
T_QUANTILES = (
    *(12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)
"""Half-widths, in standard errors, of Student's two-sided interval by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired ratios of several rounds.

    Attributes:
        median: of the ratios.
        low, high: interval of the geometric mean; None with fewer than two rounds.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int


def rotated(items: Sequence[Item], round_: int) -> list[Item]:
    """Each round begins one further on, so that no contender is always first or always last."""
    shift = round_ % len(items) if items else 0
    return [*items[shift:], *items[:shift]]


def paired(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over / under, round by round.

    The interval is Student's on the logarithms: ratios are multiplicative, and resampling a
    handful of rounds would give intervals that are too narrow.
    """
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) < 2:
        return Ratio(median(ratios), None, None, len(ratios))
    logs = [math.log(ratio) for ratio in ratios]
    quantile = T_QUANTILES[min(len(logs) - 1, len(T_QUANTILES)) - 1]
    reach = quantile * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return Ratio(median(ratios), math.exp(middle - reach), math.exp(middle + reach), len(ratios))


# -- tables ----------------------------------------------------------------------------------------

MIB = 2**20
Figure = float | int | str | Ratio | None
SHARES = ("MFU", "device busy", "padding", "of copy, forward", "of copy, backward")
"""Headings of figures that are shown in per cent."""
SMALL = 1e-2
"""Numbers below it are shown with their power of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One line of a table.

    Attributes:
        case: what was done; rows of one case stand together and are compared.
        name: who or what did it.
        figures: heading -> value; a heading names its unit.
        predicted: heading -> what the planner predicts of the figure with that heading.
        note: what the figures cannot say.
    """

    case: str
    name: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    predicted: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""


def table(rows: Sequence[TableRow]) -> list[str]:
    """Rows as Markdown; beside a figure that somebody predicted stands what was planned."""
    if not rows:
        return ["Nothing was found."]
    headings = list(dict.fromkeys(h for row in rows for h in (*row.figures, *row.predicted)))
    predicted = {heading for row in rows for heading in row.predicted}
    cases, notes = any(row.case for row in rows), any(row.note for row in rows)
    head = ["case"] * cases + ["contender"]
    for heading in headings:
        head += [heading] + ["planned"] * (heading in predicted)
    head += ["note"] * notes
    lines = [line(head), line(["---"] * (cases + 1) + ["---:"] * (len(head) - cases - 1))]
    before = None
    for row in rows:
        cells = ["" if row.case == before else row.case] * cases + [row.name]
        before = row.case
        for heading in headings:
            cells.append(shown(heading, row.figures.get(heading)))
            if heading in predicted:
                cells.append(shown(heading, row.predicted.get(heading)))
        lines.append(line(cells + [row.note] * notes))
    return lines


def shown(heading: str, value: Figure) -> str:
    """A figure as text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, Ratio):
        interval = "" if value.low is None else f" [{value.low:.3f}, {value.high:.3f}]"
        return f"{value.median:.3f}{interval}"
    if heading in SHARES:
        return f"{value:.1%}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < SMALL else f"{value:.5g}"


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(map(cell, cells)) + " |"


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def in_order(found: Sequence[RunOutcome], entrant: Entrant) -> list[RunOutcome]:
    """A contender's runs, round by round."""
    return sorted((each for each in found if each.name == entrant.name), key=lambda o: o.round)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def speed_ratio(over: Iterable[RunOutcome], under: Iterable[RunOutcome]) -> Ratio | None:
    """Of tokens per second, paired by round; None where there is no round in which both trained."""
    first, second = ({o.round: o.tokens_per_s for o in runs if o.tokens_per_s}
                     for runs in (over, under))  # fmt: skip
    both = [round_ for round_ in first if round_ in second]
    return paired([first[r] for r in both], [second[r] for r in both]) if both else None


def summarize(outcomes: Sequence[RunOutcome], entrants: Sequence[Entrant]) -> list[TableRow]:
    """A row for each contender that has run: medians of its rounds, and the speed of each of ours
    as a multiple of its own, where both ran in a round."""
    ran = [each for each in entrants if any(o.name == each.name for o in outcomes)]
    rows = []
    for entrant in ran:
        runs = [o for o in outcomes if o.name == entrant.name]
        done = [o for o in runs if o.tokens_per_s]
        failed = [o for o in runs if o.status != "ok"]
        figures: dict[str, Figure] = {"tokens/s": middle(o.tokens_per_s for o in done)}
        for ours in (each for each in ran if each.module is None):
            theirs = [] if ours is entrant else [o for o in outcomes if o.name == ours.name]
            figures[f"{ours.name} / this"] = speed_ratio(theirs, runs)
        sent = [None if o.sent is None else sum(o.sent.values()) / MIB for o in done]
        figures |= {
            "padding": middle(o.padding for o in done),
            "peak MiB": middle(o.peak_memory and o.peak_memory / MIB for o in done),
            "sent MiB/step": middle(sent),
            "final loss": middle(o.final_loss for o in done),
            "tokens": middle(o.tokens for o in done),
            "rounds": len(done),
        }
        note = f"{failed[0].status}: {failed[0].problem}" if failed else ""
        rows.append(TableRow(case="", name=entrant.title, figures=figures, note=note))
    return rows


LEGEND = (
    "tokens/s: real tokens over all ranks, padding not counted, between the ends of optimizer "
    "steps after warm-up; median of the rounds.",
    f"x / this: median of the paired ratios of tokens/s, round by round; in brackets the "
    f"{CONFIDENCE:.0%} interval of their geometric mean (Student's t on the logarithms).",
    "padding: share of the batches' places that hold no token.",
    "peak MiB: resident memory of all ranks, each at its own peak, libraries included. "
    "sent: what a ring algorithm sends for the collectives of a step, over all ranks.",
    f"final loss: mean per loss token of the last {LAST_STEPS} steps; orders of rows differ, "
    "and packed contenders learn from more rows.",
)


def markdown(title: str, rows: Sequence[TableRow]) -> str:
    """A section with the table and its legend."""
    return "\n".join([f"### {title}", "", *table(rows), "", *(f"- {text}" for text in LEGEND), ""])
