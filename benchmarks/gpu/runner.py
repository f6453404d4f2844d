"""Runs the parts one after the other, each in a process that is ended when its time is up, and
writes ``results.json`` and ``page.md``.

A part that fails, or whose time is over, is named with its error; what it had found by then counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.gpu.part import FAILED, LATE, OK, PARTS, Context, Part, Report
from benchmarks.processes import Processes, last_lines, run
from benchmarks.table import cell, line, shown, table

GRACE_S = 6.0
"""Of a part's time, for its last words."""
LAST_LINES = 12
LEAST_S = 5.0
"""A part with less time than this is not begun."""


def run_parts(
    names: Sequence[str],
    context: Context,
    seconds: float,
    *,
    ended: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Run parts in `seconds` altogether.

    Args:
        context: its folder gets one folder for each part.
        ended: called with what each has found.
    """
    end = time.monotonic() + seconds
    results = []
    for place, name in enumerate(names):
        rest = sum(PARTS[each].share for each in names[place:])
        allowed = max(0.0, end - time.monotonic()) * PARTS[name].share / rest
        folder = context.path / name
        results.append(run_part(PARTS[name], replace(context, folder=str(folder), seconds=allowed)))
        ended(results[-1])
    return results


def run_part(part: Part, context: Context) -> Report:
    """Run one part in a process of its own, and read what it found."""
    began = time.monotonic()
    report = Report(context.path / "report.json")
    if context.seconds < LEAST_S:
        report.status, report.problem = LATE, "the parts before it left no time"
    else:
        context.path.mkdir(parents=True)
        task, log = context.path / "context.json", context.path / "log.txt"
        # For its last rows and the end of what it has started itself.
        inside = replace(context, seconds=max(LEAST_S, context.seconds - GRACE_S))
        task.write_text(json.dumps(dataclasses.asdict(inside), indent=2) + "\n", encoding="utf-8")
        argv = [sys.executable, "-m", "benchmarks.gpu.part", part.run, str(task)]
        processes = Processes(argv=argv, environments=[environment(context)], logs=[log])
        done = run(processes, context.seconds)
        report = Report.read(report.path)
        if done.status != 0:
            report.status = LATE if done.status is None else FAILED
            how = f"ended with status {done.status}"
            how = f"not done after its {context.seconds:.0f} s" if done.status is None else how
            report.problem = "\n".join([how, *last_lines(context.path, LAST_LINES, "log.txt")])
    report.part, report.title = part.name, part.title
    report.seconds, report.allowed = time.monotonic() - began, context.seconds
    return report


def environment(context: Context) -> dict[str, str]:
    """Variables of every part's process: nothing is fetched, and nothing is kept at home."""
    home = context.path.parent
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(home / "triton"),
        "ANYGAUGE_CACHE": str(home / "cache"),
        # A few kernels are compiled; processes that help with it are waited for at the end.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # torch.compile's speed on a host is not what is asked for.
        **({"TORCH_COMPILE_DISABLE": "1"} if context.tiny else {}),
    }


def write(folder: Path, machine: Mapping[str, Any], results: Sequence[Report]) -> None:
    """Write everything anew; called after every part, so that an end in between keeps the rest."""
    record = {"machine": dict(machine), "parts": [each.record for each in results]}
    write_text(folder / "results.json", json.dumps(record, indent=2) + "\n")
    write_text(folder / "page.md", page(machine, results))


def page(machine: Mapping[str, Any], results: Sequence[Report]) -> str:
    """The page in Markdown."""
    lines = [f"# {machine['card']}", "", "| what | value |", "|---|---|"]
    lines += [line([name, shown(name, value)]) for name, value in machine.items()]
    lines += ["", "| part | result | seconds |", "|---|---|---:|"]
    for result in results:
        status = result.status if result.status == OK else f"**{result.status}**"
        problem = result.problem.partition("\n")[0]
        lines.append(
            f"| {cell(result.title)} | {status}{f': {cell(problem)}' if problem else ''} | "
            f"{result.seconds:.0f} of {result.allowed:.0f} |"
        )
    for result in results:
        lines += ["", f"## {result.title}", ""]
        if result.problem:
            lines += [f"**{result.status}**", "", "```", result.problem, "```", ""]
        lines += table(result.rows)
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"
