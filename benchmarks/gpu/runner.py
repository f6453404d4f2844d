"""Runs the parts one after the other, each in a process that is ended when its time is up.

A part that fails, or whose time is over, is named with its error; what it had found by then counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.context import Context
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.result import FAILED, LATE, OK, SKIPPED, Result, read_report
from benchmarks.gpu.run_part import SKIP_STATUS
from benchmarks.processes import Processes, run

GRACE_S = 10.0
"""Of a part's time, for its last words."""
LAST_LINES = 12
LEAST_S = 5.0
"""A part with less time than this is not begun."""


def run_parts(
    names: Sequence[str],
    context: Context,
    seconds: float,
    *,
    ended: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run parts in `seconds` altogether.

    Args:
        context: its folder gets one folder for each part.
        ended: called with each result.
    """
    end = time.monotonic() + seconds
    results = []
    for place, name in enumerate(names):
        rest = sum(PARTS[each].share for each in names[place:])
        allowed = max(0.0, end - time.monotonic()) * PARTS[name].share / rest
        folder = context.path / name
        result = run_part(PARTS[name], replace(context, folder=str(folder), seconds=allowed))
        results.append(result)
        ended(result)
    return results


def run_part(part: Part, context: Context) -> Result:
    """Run one part in a process of its own, and read what it found."""
    began = time.monotonic()
    if context.seconds < LEAST_S:
        return _result(part, context, began, LATE, "the parts before it left no time")
    context.path.mkdir(parents=True)
    task, log = context.path / "context.json", context.path / "log.txt"
    # For its last rows and the end of what it has started itself.
    replace(context, seconds=max(LEAST_S, context.seconds - GRACE_S)).save(task)
    argv = [sys.executable, "-m", "benchmarks.gpu.run_part", part.name, str(task)]
    ended = run(
        Processes(argv=argv, environments=[environment(context)], logs=[log]), context.seconds
    )
    if ended.problem is None:
        return _result(part, context, began, OK, "")
    if ended.status == SKIP_STATUS:
        return _result(part, context, began, SKIPPED, last_lines(log, 1))
    if ended.status is None:
        said = f"not done after its {context.seconds:.0f} s\n{last_lines(log)}"
        return _result(part, context, began, LATE, said)
    said = f"ended with status {ended.status}\n{last_lines(log)}"
    return _result(part, context, began, FAILED, said)


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
        # torch.compile's speed on a host is not what is asked for.
        **({"TORCH_COMPILE_DISABLE": "1"} if context.tiny else {}),
    }


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The end of what a part printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(lines[-count:])


def _result(part: Part, context: Context, began: float, status: str, problem: str) -> Result:
    rows, notes = read_report(context.path / "report.json")
    return Result(
        part=part.name,
        title=part.title,
        status=status,
        seconds=time.monotonic() - began,
        allowed=context.seconds,
        rows=rows,
        notes=notes,
        problem=problem,
    )
