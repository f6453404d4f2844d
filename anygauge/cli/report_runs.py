"""What a report shows of a run, read from its folder alone, which a stranger may have made.

Only numbers and short texts are taken, nothing is followed out of the folder, and what is not as a
run writes it is left out.
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
from anygauge.util.text import escape, flatten_values, format_bytes, format_time, near_file

LONGEST_LINE = 1 << 16
LONGEST_TEXT = 300
MOST_EVENTS = 200
OTHER = ("environment", "name", "output")
"""Fields of a run file that two runs need not share to be compared; the first may hold secrets."""

Points = Sequence[tuple[int, float]]


def number(value: Any) -> float | None:
    """A finite number; None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def text(value: Any) -> str:
    """A short text of a value; "" for none."""
    if value is None or value == {} or value == []:
        return ""
    shown = escape(value if isinstance(value, str) else json.dumps(value, default=str))
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}..."


def part(value: Any, *names: str) -> Any:
    """What nested mappings have under these names; None where one is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run, as its folder shows it.

    Attributes:
        label: tells it from the others of a report.
        run, job, report, versions: its files of these names; empty where one is missing.
        steps: the fields of each step that are numbers, by step.
        evaluations: the same of each evaluation, with its ``name``.
        ranks: how each rank ended.
        unreadable: lines of metrics.jsonl that are no record.
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
    unreadable: int = 0

    def series(self, name: str) -> Points:
        """(Step, value) of a field of the steps."""
        return [(int(each["step"]), each[name]) for each in self.steps if name in each]

    def evaluated(self) -> Mapping[str, Points]:
        """Evaluation set -> (steps done before, loss)."""
        found: dict[str, list[tuple[int, float]]] = {}
        for each in self.evaluations:
            found.setdefault(each["name"], []).append((int(each["step"]), each["eval_loss"]))
        return found

    def status(self) -> str:
        """How it ended, in words."""
        if self.report:
            return "finished"
        states = {text(rank.get("state")) for rank in self.ranks}
        return f"not finished ({', '.join(sorted(filter(None, states))) or 'no rank has ended'})"

    def memory(self) -> dict[str, dict[str, float]]:
        """Phase -> bytes ``planned`` and ``measured``, where they are known."""
        planned = part(self.report, "memory", "predicted") or part(self.job, "expected_memory")
        measured = part(self.report, "memory", "measured")
        peaks = [value for _, value in self.series("peak_memory")]
        found: dict[str, dict[str, float]] = {}
        for kind, given in (("planned", planned), ("measured", measured)):
            for phase, value in given.items() if isinstance(given, Mapping) else ():
                phase = phase if phase in ("load", "save") else "training"
                before = found.setdefault(phase, {}).get(kind, 0.0)
                found[phase][kind] = max(before, number(value) or 0.0)
        if not measured and peaks:
            found.setdefault("training", {})["measured"] = max(peaks)
        return found

    def time_split(self) -> dict[str, float]:
        """Part of the latest start -> seconds; without a report, of the time between two lines."""
        total, start = number(self.report.get("seconds")), number(self.report.get("start_s"))
        ended = max((number(rank.get("finished")) or 0.0 for rank in self.ranks), default=0.0)
        timed = [each for each in self.steps if "time" in each and "seconds" in each]
        if total is None or start is None:
            if not timed:
                return {}
            began, start = timed[0]["time"] - timed[0]["seconds"], 0.0
            total = timed[-1]["time"] - began
        else:
            began = (ended or math.inf) - total
            timed = [each for each in timed if each["time"] > began] or timed
        extra = min(number(self.report.get("warmup_extra_s")) or 0.0, total)
        training = sum(each["seconds"] for each in timed) - extra
        return {
            "start-up": start,
            "warm-up": extra,
            "steps": max(0.0, training),
            "evaluation, saving": max(0.0, total - start - extra - training),
        }

    def events(self) -> list[tuple[float, str]]:
        """(Seconds since the epoch, what happened), by time; the latest, if there are many."""
        found = [(each["time"], "first step") for each in self.steps[:1] if "time" in each]
        for each in self.evaluations:
            what = f"{each['name']} after step {each['step']:.0f}: loss {each['eval_loss']:.4f}"
            found.append((each.get("time", 0.0), what))
        for each in self.steps:
            if "skipped" in each:
                what = f"step {each['step']:.0f} changed no weight: its gradient was not finite"
                found.append((each.get("time", 0.0), what))
        for path in (self.folder / "checkpoints").glob("step-*"):
            found.append((path.lstat().st_mtime, f"checkpoint {text(path.name)}"))
        for path in (self.folder / PROFILE).glob("*-*"):
            found.append((path.lstat().st_mtime, f"recorded steps: {PROFILE}/{text(path.name)}"))
        for path in (self.folder / ATTEMPTS).glob("*"):
            found.append((path.lstat().st_mtime, f"resumed: {ATTEMPTS}/{text(path.name)}"))
        for rank in self.ranks:
            who = f"rank {text(rank.get('rank'))}"
            why = text(rank.get("what"))
            began, ended = (number(rank.get(name)) for name in ("started", "finished"))
            found.append((began or 0.0, f"{who} started"))
            what = f"{who} ended: {text(rank.get('state'))}" + (f", {why}" if why else "")
            found.append((ended or number(rank.get("ended")) or math.inf, what))
        return sorted(found)[-MOST_EVENTS:]

    def facts(self) -> dict[str, str]:
        """What ran, and what came of it: a name and a text each."""
        run, job, report, launch = self.run, self.job, self.report, part(self.run, "launch")
        optimizer, adapter = part(run, "train", "optimizer"), part(run, "adapter")
        planned, took = part(report, "step_s", "predicted"), part(report, "step_s", "measured")
        nodes, devices = part(launch, "nodes"), part(launch, "devices")
        peaks = [value for _, value in self.series("peak_memory")]
        losses, done = self.series("loss"), [int(each["step"]) for each in self.steps]
        evaluated = self.evaluated().items()
        best = [f"{name} {min(v for _, v in points):.4f}" for name, points in evaluated]
        name, schedule = part(run, "model", "name"), part(run, "train", "schedule", "name")
        random = f"{text(part(run, 'model', 'config', 'model_type'))}, random weights"
        begun = [number(rank.get("started")) or 0.0 for rank in self.ranks]
        packages = ("anygauge", "torch", "transformers", "peft")
        found = {
            "status": self.status(),
            "latest start": when(min(begun)) if begun else "",
            "took": seconds(report.get("seconds")),
            "model": text(name) if name else random,
            "trained": f"{text(part(adapter, 'type'))}, r {text(part(adapter, 'r'))}"
            if adapter
            else "all weights",
            "rows": text(report.get("data")),
            "backend": text(job.get("backend")),
            "ranks": f"{text(nodes)} x {text(devices)}" if nodes and devices else "",
            "strategy": text(part(report, "choices", "strategy") or job.get("strategy")),
            "precision": text(part(report, "choices", "precision", "param_dtype")),
            "attention": text(part(report, "choices", "attention", "name")),
            "batch": f"{text(part(run, 'train', 'global_batch_size'))} sequences a step",
            "optimizer": f"{text(part(optimizer, 'name'))}, lr {text(part(optimizer, 'lr'))}, "
            f"{text(schedule)}",
            "steps": f"{max(done, default=0):,}",
            "loss": f"{losses[0][1]:.4f} to {losses[-1][1]:.4f}" if losses else "",
            "lowest evaluation loss": ", ".join(best),
            "tokens": f"{sum(value for _, value in self.series('tokens')):,.0f}",
            "tokens/s": f"{number(report.get('tokens_per_s')) or 0:,.1f}" if report else "",
            "a step": seconds(took) + (f" (planned {seconds(planned)})" if planned else ""),
            "peak memory of rank 0": format_bytes(max(peaks)) if peaks else "",
            "versions": ", ".join(f"{n} {text(self.versions.get(n))}" for n in packages),
        }
        return {label: value for label, value in found.items() if value}


def when(at: float) -> str:
    """A time of the clock, in UTC."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return "?"


def seconds(value: Any) -> str:
    """A duration in words; "" where it is no number."""
    found = number(value)
    return "" if found is None else format_time(found)


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Field of the run file -> its value in each run, where not all have the same."""
    flat = [
        dict(flatten_values({k: v for k, v in each.run.items() if k not in OTHER})) for each in runs
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    return {
        text(name): [text(each.get(name)) for each in flat]
        for name in names
        if any(each.get(name) != flat[0].get(name) for each in flat)
    }


def read_run(folder: Path, label: str) -> RunRecord:
    """Read a run's folder.

    Raises:
        UsageError: it is not one.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder}: {what}{near_file(folder)}; give the folder of a run")
    if not (folder / RESOLVED).is_file() and not (folder / METRICS).is_file():
        raise UsageError(
            f"{folder} is not the folder of a run: it has neither {RESOLVED} nor {METRICS}. "
            "`anygauge train` prints the folder first: <output>/<name>"
        )
    steps: dict[int, dict[str, float]] = {}
    evaluations: list[dict[str, Any]] = []
    unreadable = 0
    for line in _lines(folder / METRICS):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            record = dict(json.loads(line))
            numbers = {n: v for n, given in record.items() if (v := number(given)) is not None}
            if "eval_loss" in numbers and "step" in numbers:
                evaluations.append({**numbers, "name": text(record.get("name"))})
            elif "step" in numbers:
                steps[int(numbers["step"])] = numbers
            continue
        unreadable += 1
    files = {
        name: _mapping(folder / f"{name}.json") for name in ("run", "job", "report", "versions")
    }
    paths = sorted((folder / "ranks").glob("rank*.json"))
    return RunRecord(
        folder=folder,
        label=label,
        steps=[steps[at] for at in sorted(steps)],
        evaluations=evaluations,
        ranks=[_mapping(path) for path in paths],
        unreadable=unreadable,
        **files,
    )


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def _mapping(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}
