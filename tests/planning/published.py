"""Runs whose memory or speed others have published (``published.yaml``), planned.

Run as a script, it prints the tables of docs/planning.md. With ``--fit`` it prints the constants of
`anygauge.planning.time` that meet `FITTED` best, and nothing of the other half.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from anygauge.config.schema import RunFile
from anygauge.planning import time as times
from anygauge.planning.fit import GIB, fit
from anygauge.planning.machines import Hardware
from anygauge.planning.plan import plan_run
from anygauge.planning.trials import Target, Trial, timed
from anygauge.registry import Registry

LENGTH = 2048
"""Tokens of a row, where a run does not say."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run.

    Attributes:
        run: sections of its run file.
        memory: GiB of one device; None where it is not said.
        fits: what the source says of it; None where it says nothing.
        tokens_per_s: of one device; None where it is not said.
    """

    name: str
    where: str
    machine: str
    ranks: int
    run: Mapping[str, Any]
    memory: float | None = None
    fits: bool | None = None
    tokens_per_s: float | None = None

    def run_file(self, nodes: int) -> RunFile:
        train = {"steps": 2, "micro_batch_size": 1, **self.run.get("train", {})}
        train.setdefault("global_batch_size", train["micro_batch_size"] * self.ranks)
        return RunFile.model_validate(
            {
                "kernels": {"linear_cross_entropy": "reference"},  # their losses hold all logits
                **self.run,
                "model": {"tokenizer": "none", **self.run["model"]},
                "data": {
                    "train": {"path": "rows.jsonl"},
                    "max_length": LENGTH,
                    **self.run.get("data", {}),
                },
                "train": train,
                "launch": {"nodes": nodes, "devices": self.ranks // nodes},
            }
        )


_FILE = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
ERRORS: Mapping[str, tuple[float, float, str]] = _FILE["errors"]
"""Errors of memory that are known to be larger than others', between which bounds, and why."""


def _read() -> Iterator[Published]:
    for fields in _FILE["runs"]:
        lengths: Mapping[int, Sequence[float]] = fields.pop("lengths", {})
        if not lengths:
            yield Published(**fields)
        for length, (seconds, *size) in lengths.items():
            of = Published(**{**fields, "name": f"{fields['name']}-{length}"})
            tokens = of.run["train"]["global_batch_size"] // of.ranks * length
            yield Published(
                **{
                    **vars(of),
                    "run": {**of.run, "data": {"max_length": length}},
                    "memory": size[0] * 1e9 / GIB / of.ranks if size else None,
                    "fits": True if size else None,
                    "tokens_per_s": tokens / seconds,
                }
            )


RUNS = {of.name: of for of in _read()}
_TIMED = [of for of in RUNS.values() if of.tokens_per_s is not None]
FITTED, REPORTED = _TIMED[::2], _TIMED[1::2]
"""The constants were fixed on the first, so that the errors of the second tell what they are worth.
Both have short and long rows, since these take turns."""
CONSTANTS = ("COPIED", "SENT", "ISSUE", "OVERLAP")


@cache
def _registry() -> tuple[Registry, Hardware]:
    registry = Registry.load()
    return registry, Hardware.load(registry)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run that was planned."""

    of: Published
    trial: Trial

    @property
    def tokens_per_s(self) -> float:
        """Of one device, by the constants of time as they are now."""
        time, why = timed(self.trial.run, self.trial.memory, self.trial.target, _registry()[0])
        assert time is not None, why
        return time.tokens_per_s / self.of.ranks

    @property
    def time_error(self) -> float:
        """Planned over published speed, less one."""
        assert self.of.tokens_per_s is not None
        return self.tokens_per_s / self.of.tokens_per_s - 1

    @property
    def left(self) -> float:
        """GiB that stay free on a device."""
        assert self.trial.fit is not None
        return self.trial.fit.left / GIB

    @property
    def memory_error(self) -> float:
        """Needed over published memory, less one."""
        assert self.trial.fit is not None and self.of.memory is not None
        return self.trial.fit.needed / GIB / self.of.memory - 1


def planned(of: Published) -> Planned:
    """Plan a run."""
    registry, hardware = _registry()
    machine = hardware.machine(of.machine)
    card = hardware.card(machine.card)
    run = of.run_file(max(1, of.ranks // machine.cards))
    found = plan_run(run, registry, registry.create_backend(card.backend), of.ranks)
    held = fit(found, card, of.ranks, run.launch.devices)
    target = Target(backend=card.backend, card=card, machine=machine)
    return Planned(of=of, trial=Trial(run=run, target=target, memory=found, fit=held))


def fitted(found: Sequence[Planned]) -> dict[str, float]:
    """The constants whose errors are least in sum; what a rate reaches is at most all.

    Not their squares: runs that no model of time explains would decide.
    """

    def loss() -> float:
        return sum(abs(math.log1p(one.time_error)) for one in found)

    best, step = loss(), 1.3
    while step > 1.002:
        moved = False
        for name in CONSTANTS:
            for factor in (step, 1 / step):
                before = getattr(times, name)
                if name != "ISSUE" and before * factor > 1:
                    continue
                setattr(times, name, before * factor)
                if loss() < best - 1e-9:
                    best, moved = loss(), True
                else:
                    setattr(times, name, before)
        step = step if moved else math.sqrt(step)
    return {name: getattr(times, name) for name in CONSTANTS}


def main(*names: str) -> None:
    """Print a row for each run, or the constants."""
    if names == ("--fit",):
        print(fitted([planned(of) for of in FITTED]))
        return
    speeds = {True: [""], False: [""]}
    errors: dict[bool, list[float]] = {True: [], False: []}
    print("| run | published, GiB | needed | of | error |\n|---|---:|---:|---:|---:|")
    for of in RUNS.values() if not names else [RUNS[name] for name in names]:
        one = planned(of)
        if of.fits is not None and one.trial.fit is not None:
            error = "" if of.memory is None else f"{one.memory_error:+.0%}"
            said = "" if of.memory is None else f"{of.memory:.1f}"
            needed, memory = one.trial.fit.needed / GIB, one.trial.fit.memory / GIB
            print(f"| `{of.name}` | {said} | {needed:.1f} | {memory:.1f} | {error} |", flush=True)
        if of.tokens_per_s is not None:
            half = of in FITTED
            errors[half].append(abs(one.time_error))
            cells = f"{of.tokens_per_s:,.0f} | {one.tokens_per_s:,.0f} | {one.time_error:+.0%}"
            speeds[half].append(f"| `{of.name}` | {cells} |")
    print("\n| run | published | planned | error |\n|---|---:|---:|---:|")
    for half, said in ((True, "fitted"), (False, "the others")):
        print("\n".join(speeds[half]))
        if errors[half]:
            print(f"{said}: median error {statistics.median(errors[half]):.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
