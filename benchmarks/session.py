"""One workload: its rows and model made once, then run by any contender."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.entrants import Entrant, processes
from benchmarks.errors import BenchmarkError
from benchmarks.measure import MeasureError, RunOutcome, outcome
from benchmarks.plan import ContenderPlan, Dtype
from benchmarks.processes import ROOT, last_lines, run, shared_environment
from benchmarks.rows import WrittenRows, write_rows
from benchmarks.texts import source

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "trl", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What the command line asks for; see its help.

    Attributes:
        stored: type of the model's file.
        kv_heads: of keys and values; 0: as many as heads.
        device, watched, hostfile, nodes: see `ContenderPlan`.
    """

    output: Path
    steps: int
    hidden: int
    intermediate: int
    heads: int
    layers: int
    length: int
    max_length: int
    micro_batch: int
    data: Path | None = None
    rounds: int = 1
    warmup: int = 1
    ranks: int = 2
    vocabulary: int = 4096
    classes: int = 0
    accumulation: int = 1
    dtype: Dtype = "float32"
    checkpointing: bool = True
    lr: float = 1e-3
    seed: int = 0
    timeout_s: float = 600
    device: str = "cpu"
    stored: Dtype = "float32"
    watched: int = 0
    hostfile: str = ""
    nodes: int = 1
    kv_heads: int = 0

    def plan(self, **more: Any) -> ContenderPlan:
        """What of it every contender is told; `more` are its other fields."""
        told = (
            *("steps", "ranks", "micro_batch", "accumulation", "dtype", "checkpointing"),
            *("lr", "seed", "device", "watched", "hostfile", "nodes"),
        )
        return ContenderPlan(**{name: getattr(self, name) for name in told}, **more)


def prepare(workload: str, settings: SessionSettings) -> tuple[WrittenRows, ContenderPlan, str]:
    """Write rows, tokenizer and model of a workload; returns rows, a plan on them, and words.

    Raises:
        BenchmarkError: the workload cannot give the rows, or the model could not be made.
    """
    folder = settings.output / workload
    length = settings.length if workload == "full" else settings.max_length
    rows = write_rows(
        workload,
        folder,
        data=settings.data,
        count=settings.steps * settings.micro_batch * settings.accumulation * settings.ranks,
        length=length,
        vocabulary=settings.vocabulary,
        seed=settings.seed,
    )
    sizes = {
        "vocabulary": max(rows.vocabulary, settings.classes),
        "layers": settings.layers,
        "hidden": settings.hidden,
        "intermediate": settings.intermediate,
        "heads": settings.heads,
        "kv-heads": settings.kv_heads,
        "positions": length,
        "seed": settings.seed,
    }
    model = folder / "model"
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.make_model", str(model)]
        + [f"--{name}={value}" for name, value in sizes.items()]
        + [f"--dtype={settings.stored}", f"--device={settings.device}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if made.returncode:
        raise BenchmarkError(f"the model could not be made:\n{made.stderr[-2000:]}")
    fewest, mean, most = rows.lengths
    about = (
        f"{workload}: {source(workload, settings.data)}; {fewest} to {most} tokens a row, mean "
        f"{mean:.0f}; {rows.dropped} longer rows left out; model of "
        f"{int(made.stdout.split()[-1]):,} parameters"
    )
    plan = settings.plan(
        model=str(model),
        rows=str(rows.exact),
        has_prompts=rows.has_prompts,
        output="",
        max_length=length,
    )
    return rows, plan, about


def run_once(
    entrant: Entrant,
    plan: ContenderPlan,
    rows: WrittenRows,
    settings: SessionSettings,
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
    ended = run(processes(entrant, plan, shared_environment(plan)), settings.timeout_s)
    problem = ended.problem
    if problem is None:
        try:
            return outcome(
                entrant,
                plan,
                round_=round_,
                warmup=settings.warmup,
                expected=rows.tokens,
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


def conditions(settings: SessionSettings) -> dict[str, Any]:
    """Machine, versions and settings, for the record."""
    versions = {}
    for package in ("anygauge", *PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    fields = {name: getattr(settings, name) for name in settings.__slots__}
    return {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()},
    }
