"""One workload: its rows and model made once, then run by any contender."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from benchmarks.entrants import Entrant, processes
from benchmarks.errors import BenchmarkError
from benchmarks.measure import MeasureError, RunOutcome, outcome
from benchmarks.plan import ContenderPlan
from benchmarks.processes import ROOT, last_lines, run, shared_environment
from benchmarks.ratios import rotated
from benchmarks.rows import WrittenRows, write_rows
from benchmarks.texts import source

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "trl", "datasets")


def prepare(workload: str, plan: ContenderPlan) -> tuple[WrittenRows, ContenderPlan, str]:
    """Write rows, tokenizer and model of a workload; returns rows, the plan on them, and words.

    Raises:
        BenchmarkError: the workload cannot give the rows, or the model could not be made.
    """
    folder = Path(plan.output) / workload
    data = Path(plan.data) if plan.data else None
    length = plan.length if workload == "full" else plan.max_length
    rows = write_rows(
        workload,
        folder,
        data=data,
        count=plan.steps * plan.global_batch,
        length=length,
        vocabulary=plan.vocabulary,
        seed=plan.seed,
    )
    classes = max(rows.vocabulary, plan.classes)
    sizes = {"vocabulary": classes, "kv-heads": plan.kv_heads, "positions": length}
    names = ("layers", "hidden", "intermediate", "heads", "seed", "device")
    sizes |= {name: getattr(plan, name) for name in names} | {"dtype": plan.stored}
    model = folder / "model"
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.make_model", str(model)]
        + [f"--{name}={value}" for name, value in sizes.items()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if made.returncode:
        raise BenchmarkError(f"the model could not be made:\n{made.stderr[-2000:]}")
    fewest, mean, most = rows.lengths
    about = (
        f"{workload}: {source(workload, data)}; {fewest} to {most} tokens a row, mean "
        f"{mean:.0f}; {rows.dropped} longer rows left out; model of "
        f"{int(made.stdout.split()[-1]):,} parameters"
    )
    on_them = replace(
        plan,
        model=str(model),
        rows=str(rows.exact),
        has_prompts=rows.has_prompts,
        max_length=length,
    )
    return rows, on_them, about


def run_once(
    entrant: Entrant,
    plan: ContenderPlan,
    rows: WrittenRows,
    *,
    folder: Path,
    round_: int,
) -> RunOutcome:
    """Run one contender once; what goes wrong is part of the outcome."""
    if entrant.missing:
        remedy = f"not installed: {', '.join(entrant.missing)}; pip install 'anygauge[bench]'"
        return RunOutcome(name=entrant.name, round=round_, status="missing", problem=remedy)
    folder.mkdir(parents=True)
    plan = replace(
        plan,
        output=str(folder),
        layout=entrant.layout,
        deepspeed=entrant.deepspeed,
        compiled=entrant.compiled,
        rows=str(rows.pool if entrant.layout == "packed" else rows.exact),
    )
    began = time.time()
    ended = run(processes(entrant, plan, shared_environment(plan)), plan.timeout_s)
    problem = ended.problem
    if problem is None:
        try:
            return outcome(
                entrant,
                plan,
                round_=round_,
                expected=rows.tokens,
                began=began,
                wall_s=ended.seconds,
            )
        except MeasureError as error:
            problem = str(error)
    return RunOutcome(
        name=entrant.name,
        round=round_,
        status="failed",
        problem=f"{problem}; see {folder}",
        log=last_lines(folder),
        wall_seconds=ended.seconds,
    )


def each_run(
    entrants: Sequence[Entrant],
    plan: ContenderPlan,
    rows: WrittenRows,
    folder: Path,
) -> Iterator[RunOutcome]:
    """All rounds; each begins with another contender. What came of a run is told as it ends."""
    for round_ in range(plan.rounds):
        for entrant in rotated(entrants, round_):
            where = folder / f"round{round_ + 1}" / entrant.name
            found = run_once(entrant, plan, rows, folder=where, round_=round_ + 1)
            told = f"{found.status}: {found.problem}"
            if found.tokens_per_s:
                first = f"first step after {found.first_step_s:.1f} s"
                told = f"{found.tokens_per_s:,.0f} tokens/s, {first}"
            print(f"  round {round_ + 1} {entrant.title}: {told}", flush=True)
            print("".join(f"      {text}\n" for text in found.log), end="", flush=True)
            yield found


def all_of(runs: Iterable[RunOutcome]) -> list[RunOutcome]:
    """Runs that must not fail.

    Raises:
        BenchmarkError: one did.
    """
    found = []
    for each in runs:
        if each.status != "ok":
            raise BenchmarkError(f"{each.name}: {each.status}: {each.problem}")
        found.append(each)
    return found


def refuse_used(output: Path) -> None:
    """Raises: typer.BadParameter: the folder has something in it."""
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"--output {output} is not empty: name a new folder")


def conditions(plan: ContenderPlan) -> dict[str, Any]:
    """Machine, versions and settings, for the record."""
    versions = {}
    for package in ("anygauge", *PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "settings": asdict(plan),
    }
