"""The folder that is written: ``results.json`` and ``page.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.gpu.result import OK, Result
from benchmarks.table import cell, line, shown, table


def write(folder: Path, machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write everything anew; called after every part, so that an end in between keeps the rest."""
    record = {"machine": dict(machine), "parts": [result.record() for result in results]}
    write_text(folder / "results.json", json.dumps(record, indent=2) + "\n")
    write_text(folder / "page.md", page(machine, results))


def page(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The page in Markdown."""
    lines = [f"# {machine['card']}", ""]
    lines += ["| what | value |", "|---|---|"]
    lines += [line([name, shown(name, value)]) for name, value in machine.items()]
    lines += ["", "| part | result | seconds |", "|---|---|---:|"]
    for result in results:
        said = result.status if result.status == OK else f"**{result.status}**"
        problem = result.problem.partition("\n")[0]
        lines.append(
            f"| {cell(result.title)} | {said}{f': {cell(problem)}' if problem else ''} | "
            f"{result.seconds:.0f} of {result.allowed:.0f} |"
        )
    for result in results:
        lines += ["", f"## {result.title}", ""]
        if result.problem:
            lines += [f"**{result.status}**", "", "```", result.problem, "```", ""]
        lines += table(result.rows)
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"
