"""What the planner says of a run before it is measured: ``anygauge plan --json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import yaml

from anygauge.registry import Hardware, Registry
from anygauge.registry.hardware import measured_files
from benchmarks.gpu.part import Context
from benchmarks.processes import Processes, started, wait


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


class PlanProcess:
    """``anygauge plan`` of one run, for this machine or the one that `context.machine` names.

    Begins at once, beside others; `read` waits for it.

    Args:
        name: of its files.
        run: a run file's fields.
        stack: ends it at the latest.
    """

    def __init__(
        self, context: Context, name: str, run: Mapping[str, Any], stack: ExitStack
    ) -> None:
        self._log = context.path / f"plan-{name}.json"
        self._problem, machine = "", context.machine
        if context.card:
            known = Hardware.load(Registry.load(), measured_files()).of_devices([context.card])
            if known is None:
                self._problem = f"no description of {context.card} is known (docs/hardware.md)"
                return
            machine = f"{known.name}:{context.gpus}"
        path = context.path / f"plan-{name}.yaml"
        path.write_text(yaml.safe_dump(dict(run), sort_keys=False), encoding="utf-8")
        argv = [sys.executable, "-m", "anygauge.cli", "plan", str(path), "--json"]
        argv += ["--machine", machine] if machine else []
        self._running = stack.enter_context(
            started(Processes(argv=argv, environments=[{}], logs=[self._log]))
        )

    def read(self, timeout_s: float) -> Prediction:
        """What was planned, or why nothing was."""
        if self._problem:
            return Prediction(problem=self._problem)
        ended = wait(self._running, timeout_s)
        if ended.problem is not None and ended.status is None:
            return Prediction(problem=f"anygauge plan was not done after {timeout_s:.0f} s")
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        try:
            return prediction(json.JSONDecoder().raw_decode(text, text.index("{"))[0])
        except ValueError:
            last = (text.splitlines() or ["it printed nothing"])[-1]
            return Prediction(problem=f"anygauge plan ended with {ended.status}: {last}")


def prediction(plan: Mapping[str, Any]) -> Prediction:
    """From the JSON of a plan."""
    largest = max((phase["total"] for phase in plan["device"].values()), default=0)
    figures = {"peak memory, GiB": largest * plan["ranks"] / 2**30} if largest else {}
    if not (time := plan.get("time")):
        return Prediction(figures=figures, problem=plan.get("untimed") or "its time is not known")
    return Prediction(
        figures={**figures, "tokens/s": time["tokens_per_s"], "MFU": time["mfu"]},
        flops_per_token=time["flops"] / time["tokens"],
        peak=time["peak"] or 0.0,
    )
