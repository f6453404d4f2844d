"""Outcomes as a table, in Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.entrants import ENTRANTS
from benchmarks.measure import LAST_STEPS, RunOutcome
from benchmarks.ratios import CONFIDENCE, Ratio, paired

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ContenderRow:
    """A contender over all rounds: medians, and anygauge's speed as a multiple of its speed.

    Attributes:
        ratios: name of an anygauge variant -> its rounds over this contender's, where both ran.
        problem: why there are no figures.
    """

    name: str
    layout: str
    rounds: int
    tokens_per_s: float | None
    padding: float | None
    peak_memory: float | None
    sent: float | None
    final_loss: float | None
    tokens: float | None
    ratios: Mapping[str, Ratio]
    problem: str = ""


def summarise(outcomes: Sequence[RunOutcome], names: Sequence[str]) -> list[ContenderRow]:
    """One row for each name that has been run, in the order of `names`."""
    good = {(o.name, o.round): o for o in outcomes if o.status == "ok"}
    ours = [name for name in names if ENTRANTS[name].module is None]
    rows = []
    for name in names:
        runs = [o for o in outcomes if o.name == name]
        if not runs:
            continue
        done = [o for o in runs if o.status == "ok"]
        failed = [o for o in runs if o.status != "ok"]
        ratios = {}
        for variant in ours:
            both = [
                (good[variant, o.round].tokens_per_s, o.tokens_per_s)
                for o in done
                if (variant, o.round) in good
            ]
            pairs = [(a, b) for a, b in both if a and b]
            if pairs and variant != name:
                ratios[variant] = paired([a for a, _ in pairs], [b for _, b in pairs])
        rows.append(
            ContenderRow(
                name=name,
                layout=ENTRANTS[name].layout,
                rounds=len(done),
                tokens_per_s=_median([o.tokens_per_s for o in done]),
                padding=_median([o.padding for o in done]),
                peak_memory=_median([o.peak_memory for o in done]),
                sent=_median([None if o.sent is None else sum(o.sent.values()) for o in done]),
                final_loss=_median([o.final_loss for o in done]),
                tokens=_median([o.tokens for o in done]),
                ratios=ratios,
                problem=f"{failed[0].status}: {failed[0].problem}" if failed else "",
            )
        )
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def columns(rows: Sequence[ContenderRow]) -> tuple[list[str], list[list[str]]]:
    """(headings, cells of each row) as text."""
    ours = list(dict.fromkeys(variant for row in rows for variant in row.ratios))
    headings = ["contender", "tokens/s", *(f"{variant} / this" for variant in ours)]
    headings += ["padding", "peak MiB", "sent MiB/step", "final loss", "tokens", "rounds"]
    cells = []
    for row in rows:
        line = [ENTRANTS[row.name].title, _number(row.tokens_per_s, ",.0f")]
        line += [_ratio(row.ratios.get(variant)) for variant in ours]
        line += [
            _number(row.padding, ".1%"),
            _number(None if row.peak_memory is None else row.peak_memory / MIB, ",.0f"),
            _number(None if row.sent is None else row.sent / MIB, ",.1f"),
            _number(row.final_loss, ".4f"),
            _number(row.tokens, ",.0f"),
            str(row.rounds),
        ]
        cells.append(line)
    return headings, cells


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.3f}"
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


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


def remarks(rows: Sequence[ContenderRow]) -> list[str]:
    """What went wrong."""
    return [f"{ENTRANTS[row.name].title}: {row.problem}" for row in rows if row.problem]


def markdown(title: str, rows: Sequence[ContenderRow]) -> str:
    """A section with the table, its legend and remarks."""
    headings, cells = columns(rows)
    lines = [f"### {title}", "", _line(headings), _line(["---", *["---:"] * (len(headings) - 1)])]
    lines += [_line(line) for line in cells]
    lines += ["", *(f"- {text}" for text in (*LEGEND, *remarks(rows))), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(conditions: Mapping[str, Any], results: Mapping[str, Sequence[RunOutcome]]) -> str:
    """Everything that was measured.

    Args:
        conditions: machine, versions and settings.
        results: workload -> outcomes.
    """
    workloads = {}
    for workload, outcomes in results.items():
        names = list(dict.fromkeys(outcome.name for outcome in outcomes))
        workloads[workload] = {
            "summary": [dataclasses.asdict(row) for row in summarise(outcomes, names)],
            "runs": [{**dataclasses.asdict(o), "final_loss": o.final_loss} for o in outcomes],
        }
    return json.dumps({"conditions": conditions, "workloads": workloads}, indent=2) + "\n"
