"""Tables in Markdown: rows of figures, and what is said of contenders over all rounds: medians,
paired ratios and their intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any, TypeVar

from benchmarks.entrants import Entrant
from benchmarks.measure import LAST_STEPS, RunOutcome

Item = TypeVar("Item")

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


# -- contenders ------------------------------------------------------------------------------------


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


def summarise(outcomes: Sequence[RunOutcome], entrants: Sequence[Entrant]) -> list[TableRow]:
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


def as_record(outcomes: Sequence[RunOutcome], entrants: Sequence[Entrant]) -> dict[str, Any]:
    """All that was measured of a workload, for a file of JSON."""
    return {
        "summary": [dataclasses.asdict(row) for row in summarise(outcomes, entrants)],
        "runs": [{**dataclasses.asdict(o), "final_loss": o.final_loss} for o in outcomes],
    }
