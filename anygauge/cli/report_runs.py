"""What a report shows of a run, read from its folder alone, which a stranger may have made.

Only finite numbers and short texts are taken; a file, line or value that is not as a run writes it
counts as missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import ATTEMPTS, PROFILE, UsageError
from anygauge.launch.run_directory import METRICS, RESOLVED
from anygauge.util.files import open_regular, read_json
from anygauge.util.hiding import is_secret, without_users
from anygauge.util.text import escape, flatten_values, near_file

LARGEST = 1e30
LONGEST_LINE = 1 << 16
LONGEST_TEXT = 300
MOST_EVENTS = 200
NOT_COMPARED = ("environment", "name", "output")
"""Fields of a run file; the first may hold secrets."""

Points = Sequence[tuple[int, float]]


def number(value: Any) -> float | None:
    """A number that can be drawn; None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else None


def text(value: Any) -> str:
    """A short text without control characters; "" for what is not of JSON, such as None."""
    if not isinstance(value, str | int | float | list | dict) or value in ([], {}):
        return ""
    shown = without_users(escape(value if isinstance(value, str) else json.dumps(value)))
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}..."


def part(value: Any, *names: str) -> Any:
    """What nested mappings have under these names; an empty mapping where one is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return {} if value is None else value


def when(at: Any) -> str:
    """A time of the clock, in UTC; "" for what is none."""
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, as its folder shows it.

    Attributes:
        label: tells it from the others of a report.
        run, job, report, versions: its JSON files of these names.
        steps: the fields of each step that are numbers, by step.
        evaluations: the same of each evaluation, with its ``name``.
        ranks: how each rank ended.
        unreadable: lines of metrics.jsonl that are not a record.
    """

    folder: Path
    label: str
    run: Mapping[str, Any]
    job: Mapping[str, Any]
    report: Mapping[str, Any]
    versions: Mapping[str, Any]
    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[Mapping[str, Any]]
    ranks: Sequence[Mapping[str, Any]]
    unreadable: int

    def series(self, name: str) -> Points:
        """(Step, value) of a field of the steps."""
        return [(int(each["step"]), each[name]) for each in self.steps if name in each]

    def evaluated(self) -> Mapping[str, Points]:
        """Evaluation set -> (steps done before, loss)."""
        found: dict[str, list[tuple[int, float]]] = {}
        for each in self.evaluations:
            found.setdefault(each["name"], []).append((int(each["step"]), each["eval_loss"]))
        return found

    def memory(self) -> dict[str, dict[str, float]]:
        """Phase -> bytes ``planned`` and ``measured``, where they are known."""
        planned = part(self.report, "memory", "predicted") or part(self.job, "expected_memory")
        measured = part(self.report, "memory", "measured")
        if not measured and (peaks := self.series("peak_memory")):
            measured = {"training": max(value for _, value in peaks)}
        found: dict[str, dict[str, float]] = {}
        for kind, given in (("planned", planned), ("measured", measured)):
            for name, value in given.items() if isinstance(given, Mapping) else ():
                phase = found.setdefault(name if name in ("load", "save") else "training", {})
                phase[kind] = max(phase.get(kind, 0.0), number(value) or 0.0)
        return {phase: found[phase] for phase in ("load", "training", "save") if phase in found}

    def time_split(self) -> dict[str, float]:
        """Part of the latest start -> seconds; without a report, from the first step on."""
        timed = [each for each in self.steps if "time" in each and "seconds" in each]
        total, start = number(self.report.get("seconds")), number(self.report.get("start_s"))
        if total is not None and start is not None:
            ended = max((number(rank.get("finished")) or 0.0 for rank in self.ranks), default=0.0)
            timed = [each for each in timed if each["time"] > ended - total]
        elif timed:
            total, start = timed[-1]["time"] - timed[0]["time"] + timed[0]["seconds"], 0.0
        else:
            return {}
        training = sum(each["seconds"] for each in timed)
        warm_up = min(training, number(self.report.get("warmup_extra_s")) or 0.0)
        return {
            "start-up": start,
            "warm-up": warm_up,
            "steps": training - warm_up,
            "evaluation, saving": max(0.0, total - start - training),
        }

    def events(self) -> list[tuple[float, str]]:
        """(Seconds since the epoch, what happened), by time; the latest, if there are many."""
        found = []
        for each in self.evaluations:
            what = f"{each['name']} after step {each['step']:.0f}: loss {each['eval_loss']:.4f}"
            found.append((each.get("time", 0.0), what))
        for step in (each for each in self.steps if "skipped" in each):
            what = f"step {step['step']:.0f} changed no weight: its gradient was not finite"
            found.append((step.get("time", 0.0), what))
        for pattern in ("checkpoints/step-*", f"{PROFILE}/*-*", f"{ATTEMPTS}/*"):
            for path in self.folder.glob(pattern):
                found.append((path.lstat().st_mtime, f"{path.parent.name}/{text(path.name)}"))
        for rank in self.ranks:
            who, why = f"rank {text(rank.get('rank'))}", text(rank.get("what"))
            found.append((number(rank.get("started")) or 0.0, f"{who} started"))
            what = f"{who} ended: {text(rank.get('state'))}" + (f", {why}" if why else "")
            found.append((number(rank.get("ended")) or math.inf, what))
        return sorted(found)[-MOST_EVENTS:]


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Fields of the run file that are not the same in all: the name, and its value in each."""
    flat = [
        dict(flatten_values({k: v for k, v in each.run.items() if k not in NOT_COMPARED}))
        for each in runs
    ]
    return [
        [name, *(text(each.get(name)) for each in flat)]
        for name in dict.fromkeys(name for each in flat for name in each)
        if not is_secret(name) and any(each.get(name) != flat[0].get(name) for each in flat)
    ]


def read_run(folder: Path, label: str) -> RunRecord:
    """Read a run's folder.

    Raises:
        UsageError: it is not one.
    """
    if not folder.is_dir():
        near = near_file(folder) or ";"
        what = "it is a file;" if folder.exists() else f"there is no such folder{near}"
        raise UsageError(f"{folder}: {what} give the folder of a run")
    if not (folder / RESOLVED).is_file() and not (folder / METRICS).is_file():
        raise UsageError(
            f"{folder} is not the folder of a run: it has neither {RESOLVED} nor {METRICS}. "
            "`anygauge train` prints the folder first: <output>/<name>"
        )
    steps: dict[int, dict[str, float]] = {}
    evaluations: list[dict[str, Any]] = []
    unreadable = 0
    for line in _lines(folder / METRICS):
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            unreadable += 1
            continue
        numbers = {n: v for n, given in record.items() if (v := number(given)) is not None}
        if "eval_loss" in numbers and "step" in numbers:
            evaluations.append({**numbers, "name": text(record.get("name"))})
        elif "step" in numbers:
            steps[int(numbers["step"])] = numbers
    names = ("run", "job", "report", "versions")
    run, job, report, versions = (_mapping(folder / f"{name}.json") for name in names)
    ranks = [_mapping(path) for path in sorted((folder / "ranks").glob("rank*.json"))]
    in_order = [steps[at] for at in sorted(steps)]
    files = folder, label, run, job, report, versions
    return RunRecord(*files, in_order, evaluations, ranks, unreadable)


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def _mapping(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}
