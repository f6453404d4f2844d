"""The part `parity`: the same run on the device and on the host, step by step."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.entrants import run_file
from benchmarks.gpu.part import FAILED, LATE, Clock, Context, PartError, Report
from benchmarks.plan import ContenderPlan
from benchmarks.processes import Processes, cause, last_lines, started, wait
from benchmarks.session import prepare_rows
from benchmarks.table import TableRow

ALLOWED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 3e-2}
"""Relative difference of a step's loss that is not a fault: rounding that grows with the steps."""
NORMS = 3.0
"""Gradients' norms may differ by this multiple of it."""
PLAN = ContenderPlan(
    layers=4,
    hidden=128,
    intermediate=344,
    heads=4,
    kv_heads=2,
    steps=6,
    ranks=1,
    micro_batch=2,
    accumulation=2,
    max_length=96,
    vocabulary=400,
    checkpointing=False,
)
"""A small Llama with random weights, all of them trained on one rank."""


def run(context: Context, report: Report) -> None:
    """Losses and norms of gradients, in float32 and, where the device has it, bfloat16.

    All runs are started at once: what a run of this size needs is the time to begin.
    """
    clock = Clock(context.seconds)
    _, plan, _ = prepare_rows("generated", replace(PLAN, output=context.folder))
    dtypes = ("float32",) if context.tiny else tuple(ALLOWED)
    problems: dict[str, list[str]] = {FAILED: [], LATE: []}
    devices = tuple(dict.fromkeys((context.device, "cpu")))
    with ExitStack() as stack:
        running = {
            each: stack.enter_context(started(command(context.path, plan, *each)))
            for each in itertools.product(dtypes, devices)
        }
        for dtype in dtypes:
            found = {}
            for device in devices:
                name = f"{device}-{dtype}"
                ended = wait(running[dtype, device], clock.left)
                if ended.problem is None:
                    found[device] = steps(context.path / name)
                    continue
                log = last_lines(context.path / name)
                print(name, *log, sep="\n", flush=True)
                said = LATE if ended.status is None else cause(log) or ended.problem
                report.add(TableRow(case=dtype, name=f"run on {device}", note=said))
                problems[LATE if ended.status is None else FAILED].append(f"{name}: {said}")
            if len(found) == len(devices):
                problems[FAILED] += compare(report, dtype, context.device, found)
    for status, all_of in problems.items():
        if all_of:
            raise PartError(status, "; ".join(all_of))


def command(folder: Path, plan: ContenderPlan, dtype: Any, device: str) -> Processes:
    """One run, in a folder of its own; writes its run file."""
    name = f"{device}-{dtype}"
    fields = run_file(replace(plan, device=device, dtype=dtype), {"name": "single"})
    fields |= {
        "name": name,
        "model": {"config": plan.llama, "tokenizer": plan.model},
        "adapter": None,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", "anygauge.cli", "train", str(path), "--no-plan"]
    # One thread: several runs share the host's processors, and the model is small.
    threads = {"OMP_NUM_THREADS": "1"}
    return Processes(argv=argv, environments=[threads], logs=[folder / f"{name}.log"])


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def compare(
    report: Report, dtype: str, device: str, found: Mapping[str, list[dict[str, Any]]]
) -> list[str]:
    """Add a row for each figure; returns what differs by more than is allowed."""
    mine, host = found[device], found["cpu"]
    differ = []
    for figure in ("loss", "grad_norm"):
        allowed = ALLOWED[dtype] * (NORMS if figure == "grad_norm" else 1.0)
        off = max(abs(a[figure] / b[figure] - 1) for a, b in zip(mine, host, strict=True))
        figures = {
            f"first on {device}": mine[0][figure],
            "first on the host": host[0][figure],
            f"last on {device}": mine[-1][figure],
            "last on the host": host[-1][figure],
            "largest difference": off,
            "allowed": allowed,
        }
        report.add(TableRow(case=dtype, name=figure, figures=figures))
        if not off <= allowed:
            differ.append(f"{dtype}, {figure} differs by {off:.1e} of {allowed:.0e}")
    return differ
