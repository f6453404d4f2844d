"""What the planner says of a run before it is measured: ``anygauge plan --json``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from anygauge.registry import Hardware, Registry
from anygauge.registry.hardware import measured_files
from benchmarks.gpu.context import Context

PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one run.

    Attributes:
        figures: heading of a training part's table -> what is predicted of it.
        flops_per_token: operations of the model for a token, forward and backward.
        peak: operations per second of all cards together; 0 where it is not known.
        problem: why there is no prediction of the time, or none at all.
    """

    figures: Mapping[str, Any] = field(default_factory=dict)
    flops_per_token: float = 0.0
    peak: float = 0.0
    problem: str = ""


def predict(context: Context, run: Mapping[str, Any]) -> Prediction:
    """Plan a run for this machine, or for the one that `context.machine` names."""
    named = context.machine
    if context.card:
        known = Hardware.load(Registry.load(), measured_files()).of_devices([context.card])
        if known is None:
            return Prediction(
                problem=f"no description of {context.card} is known (docs/hardware.md)"
            )
        named = f"{known.name}:{context.gpus}"
    path = context.path / "predict.yaml"
    path.write_text(yaml.safe_dump(dict(run), sort_keys=False), encoding="utf-8")
    machine = ["--machine", named] if named else []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "anygauge.cli", "plan", str(path), "--json", *machine],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Prediction(problem=f"anygauge plan was not done after {PATIENCE_S:g} s")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        return Prediction(problem=f"anygauge plan ended with {done.returncode}: {said[-1]}")
    return prediction(found)


def prediction(plan: Mapping[str, Any]) -> Prediction:
    """From the JSON of a plan."""
    figures: dict[str, Any] = {}
    largest = [phase["total"] for phase in plan["device"].values()]
    if largest:
        figures["peak memory, GiB"] = max(largest) * plan["ranks"] / 2**30
    time = plan.get("time")
    if not time:
        return Prediction(figures=figures, problem=plan.get("untimed") or "its time is not known")
    figures["tokens/s"] = time["tokens_per_s"]
    figures["MFU"] = time["mfu"]
    return Prediction(
        figures=figures,
        flops_per_token=time["flops"] / time["tokens"],
        peak=time["peak"] or 0.0,
    )
