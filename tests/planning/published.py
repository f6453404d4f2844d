"""Runs whose memory or speed others have published (``published.yaml``), planned.

Run as a script, it prints the figures of docs/planning-measured.md. With ``--fit`` it prints the
constants of `anygauge.planning.time` that meet `FITTED` best, and nothing of the other half.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from anygauge.planning import time as times
from anygauge.planning.fit import GIB, Fit
from anygauge.planning.trials import Target, Trial, Trials, estimate_step_time
from tests.planning.standins import HARDWARE, REGISTRY, run


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run; it is planned when somebody asks for its plan.

    Attributes:
        run: sections of its run file.
        memory: GiB of one device; 0 where it is not said.
        fits: what the source says of it; None where it says nothing.
        tokens_per_s: of one device; 0 where it is not said.
    """

    name: str
    where: str
    machine: str
    ranks: int
    run: Mapping[str, Any]
    memory: float = 0
    fits: bool | None = None
    tokens_per_s: float = 0

    @cached_property
    def target(self) -> Target:
        machine = HARDWARE.machine(self.machine)
        card = HARDWARE.card(machine.card)
        return Target(backend=card.backend, card=card, machine=machine)

    @cached_property
    def plan(self) -> Trial:
        assert self.target.machine is not None
        nodes = max(1, self.ranks // self.target.machine.cards)
        rows = self.run.get("train", {}).get("micro_batch_size", 1)
        usual = {
            "data": {"max_length": 2048},
            "train": {"micro_batch_size": rows, "global_batch_size": rows * self.ranks},
            "launch": {"nodes": nodes, "devices": self.ranks // nodes},
        }
        kernels = {"linear_cross_entropy": "reference"}  # their losses hold all logits
        return Trials(REGISTRY)(run(usual, {"kernels": kernels, **self.run}), self.target)

    @property
    def fit(self) -> Fit:
        assert self.plan.fit is not None
        return self.plan.fit

    @property
    def planned_per_s(self) -> float:
        """Tokens of one device, by the constants of time as they are now."""
        time, why = estimate_step_time(self.plan.run, self.plan.memory, self.target, REGISTRY)
        assert time is not None, why
        return time.tokens_per_s / self.ranks

    @property
    def time_error(self) -> float:
        """Planned over published speed, less one."""
        return self.planned_per_s / self.tokens_per_s - 1

    @property
    def memory_error(self) -> float:
        """Needed over published memory, less one."""
        return self.fit.needs / GIB / self.memory - 1


_FILE = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
ERRORS: Mapping[str, tuple[float, float, str]] = _FILE["errors"]
"""Errors of memory that are known to be larger than others', between which bounds, and why."""


def _read() -> Iterator[Published]:
    for fields in _FILE["runs"]:
        lengths: Mapping[int, Sequence[float]] = fields.pop("lengths", {})
        one = Published(**fields)
        if not lengths:
            yield one
        for length, (seconds, *size) in lengths.items():
            tokens = one.run["train"]["global_batch_size"] // one.ranks * length
            yield replace(
                one,
                name=f"{one.name}-{length}",
                run={**one.run, "data": {"max_length": length}},
                memory=size[0] * 1e9 / GIB / one.ranks if size else 0,
                fits=True if size else None,
                tokens_per_s=tokens / seconds,
            )


RUNS = {one.name: one for one in _read()}
_TIMED = [one for one in RUNS.values() if one.tokens_per_s]
FITTED, REPORTED = _TIMED[::2], _TIMED[1::2]
"""The constants were fixed on the first, so that the errors of the second tell what they are worth.
Both have short and long rows, since these take turns."""


def median_error(runs: Sequence[Published]) -> float:
    """Of their speeds."""
    return statistics.median(abs(one.time_error) for one in runs)


def fitted() -> dict[str, float]:
    """The constants whose errors are least in sum; what a rate reaches is at most all.

    Not their squares: runs that no model of time explains would decide.
    """
    constants = ("COPY_SHARE", "SEND_SHARE", "ISSUE_S", "OVERLAP")

    def loss() -> float:
        return sum(abs(math.log1p(one.time_error)) for one in FITTED)

    best, step = loss(), 1.3
    while step > 1.002:
        before = best
        for name, factor in product(constants, (step, 1 / step)):
            value = getattr(times, name)
            if name == "ISSUE_S" or value * factor <= 1:
                setattr(times, name, value * factor)
            if loss() < best - 1e-9:
                best = loss()
            else:
                setattr(times, name, value)
        step = step if best < before else math.sqrt(step)
    return {name: getattr(times, name) for name in constants}


def main() -> None:
    """Print a row for each run, or the constants."""
    if "--fit" in sys.argv:
        print(fitted())
        return
    print("| run | published, GiB | needed | of | error |\n|---|---:|---:|---:|---:|")
    for one in RUNS.values():
        if one.fits is not None:
            known = (f"{one.memory:.1f}", f"{one.memory_error:+.0%}") if one.memory else ("", "")
            held = f"{one.fit.needs / GIB:.1f} | {one.fit.memory / GIB:.1f}"
            print(f"| `{one.name}` | {known[0]} | {held} | {known[1]} |", flush=True)
    print("\n| run | published | planned | error | |\n|---|---:|---:|---:|---|")
    for one in _TIMED:
        cells = f"{one.tokens_per_s:,.0f} | {one.planned_per_s:,.0f} | {one.time_error:+.0%}"
        print(f"| `{one.name}` | {cells} | {'f' if one in FITTED else ''} |", flush=True)
    print(f"median error: f {median_error(FITTED):.1%}, the others {median_error(REPORTED):.1%}")


if __name__ == "__main__":
    main()
