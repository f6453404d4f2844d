"""The folder that is written: ``results.json`` and ``page.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.gpu.result import OK, Figure, Result, TableRow

FORMS: Mapping[str, str] = {
    "MFU": ".1%",
    "device busy": ".1%",
    "of copy, forward": ".0%",
    "of copy, backward": ".0%",
    "tokens/s": ",.0f",
    "operations per step": ",.0f",
    "first / its time": ".2f",
    "first / this": ".3f",
}
SMALL = 1e-2
"""Numbers below it are shown with their power of ten."""


def write(folder: Path, machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write everything anew; called after every part, so that an end in between keeps the rest."""
    record = {"machine": dict(machine), "parts": [result.record() for result in results]}
    write_text(folder / "results.json", json.dumps(record, indent=2) + "\n")
    write_text(folder / "page.md", page(machine, results))


def page(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The page in Markdown."""
    lines = [f"# {machine['card']}", ""]
    lines += ["| what | value |", "|---|---|"]
    lines += [_line([name, _shown(name, value)]) for name, value in machine.items()]
    lines += ["", "| part | result | seconds |", "|---|---|---:|"]
    for result in results:
        said = result.status if result.status == OK else f"**{result.status}**"
        problem = result.problem.partition("\n")[0]
        lines.append(
            f"| {_cell(result.title)} | {said}{f': {_cell(problem)}' if problem else ''} | "
            f"{result.seconds:.0f} of {result.allowed:.0f} |"
        )
    for result in results:
        lines += ["", f"## {result.title}", ""]
        if result.problem:
            lines += [f"**{result.status}**", "", "```", result.problem, "```", ""]
        lines += table(result.rows)
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"


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
    lines = [_line(head), _line(["---"] * (cases + 1) + ["---:"] * (len(head) - cases - 1))]
    before = None
    for row in rows:
        cells = ["" if row.case == before else row.case] * cases + [row.name]
        before = row.case
        for heading in headings:
            cells.append(_shown(heading, row.figures.get(heading)))
            if heading in predicted:
                cells.append(_shown(heading, row.predicted.get(heading)))
        lines.append(_line(cells + [row.note] * notes))
    return lines


def _shown(heading: str, value: Figure) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and heading in FORMS:
        return format(value, FORMS[heading])
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1e}" if 0 < abs(value) < SMALL else f"{value:,.4g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
