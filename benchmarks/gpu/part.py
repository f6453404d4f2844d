"""The parts of ``make gpu``: their table, tasks and reports.

They run one after the other, each in a process that is ended when its time is up; ``results.json``
and ``page.md`` have what they found. A part that fails, or whose time is over, is named with its
error; what it had found by then counts.

python -m benchmarks.gpu.part MODULE:FUNCTION TASK.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.contender_processes import Processes, last_lines, raise_when_terminated, run
from benchmarks.measure import TableRow, line, shown, table

OK, FAILED, SKIPPED, LATE = "ok", "failed", "skipped", "out of time"


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        share: seconds of the 450 that `make gpu` has. It is a share of any other time, beside the
            other parts' shares; what a part leaves, later ones get.
        run: ``module:function``, called with a `Context` and a `Report`.
        quick: whether `make gpu` has it; `make gpu-full` has all.
    """

    name: str
    title: str
    share: float
    run: str
    quick: bool = True


_HERE = "benchmarks.gpu."
_OPERATIONS, _PYTESTS, _TRAINING = (
    _HERE + "time_operations:",
    _HERE + "pytests:",
    _HERE + "training:",
)
_LLAMA = "A random Llama of {} parameters"
_SEVERAL = "Several devices: ddp, fsdp and zero beside loops by hand"

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part("parity", "A run on the device beside the same run on the host", 48,
             _TRAINING + "parity"),
        Part("accuracy", "Kernels against float64", 20, _OPERATIONS + "accuracy"),
        Part("kernels", "The kernels' tests, with compiled kernels", 52, _PYTESTS + "kernels"),
        Part("softmax", "Softmax beside torch and Liger", 28, _OPERATIONS + "softmax"),
        Part("loss", "The loss beside torch and Liger", 30, _OPERATIONS + "loss"),
        Part("training", _LLAMA.format("0.5B") + " on one device", 152, _TRAINING + "one_device"),
        Part("attention", "Attention, padded and packed", 34, _OPERATIONS + "attention", False),
        Part("lora", "LoRA layers beside peft's", 26, _OPERATIONS + "lora", False),
        Part("compiled", "Beside a trainer with torch.compile", 68, _TRAINING + "compiled", False),
        Part("trl", "Rows of different length, beside TRL", 102, _TRAINING + "trl", False),
        Part("sharded", _SEVERAL, 136, _TRAINING + "sharded", False),
        Part("3b", _LLAMA.format("3B"), 85, _TRAINING + "llama_3b", False),
        Part("8b", _LLAMA.format("8B"), 136, _TRAINING + "llama_8b", False),
        Part("kit", "The conformance kit", 120, _PYTESTS + "kit"),
    )
}  # fmt: skip


def names(full: bool) -> list[str]:
    """Those of one of the two commands, in their order."""
    return [name for name, part in PARTS.items() if full or part.quick]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One part's task.

    Attributes:
        device: torch's name of the device type, which is also anygauge's name of the backend.
        seconds: that it may take; at the end of them it is ended.
        gpus: cards of each machine that it may use.
        hostfile: of several machines; empty for this one alone.
        tiny: sizes at which a host is done in seconds, to try the parts.
        full: all that the part knows to do, not the most important alone.
        machine: as `anygauge plan --machine` takes it: what trains there is only predicted. Empty:
            it is measured here, beside its prediction.
        card: name of the cards here, as the driver gives it; empty for the host.
    """

    device: str
    folder: str
    seconds: float
    gpus: int = 1
    hostfile: str = ""
    nodes: int = 1
    tiny: bool = False
    full: bool = False
    machine: str = ""
    card: str = ""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def ranks(self) -> int:
        """On all cards of all machines."""
        return self.gpus * self.nodes


class Clock:
    """Time that a part has left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 where time is over."""
        return max(0.0, self.end - time.monotonic())


class PartError(Exception):
    """A part ends without all that it should have found.

    Args:
        status: SKIPPED where it does not suit this machine, LATE, or FAILED.
        problem: why, for the page.
    """

    def __init__(self, status: str, problem: str) -> None:
        super().__init__(problem)
        self.status, self.problem = status, problem


@dataclass(slots=True)
class Report:
    """What a part has found: its process fills it, and the file is whole after every row, should
    that process be ended.

    Attributes:
        path: a JSON file.
        seconds: that the part took, of those that it was `allowed`.
        notes: sentences below the table.
        status: ok, failed, skipped or out of time.
        problem: why, with the end of the log.
    """

    path: Path
    part: str = ""
    title: str = ""
    status: str = OK
    seconds: float = 0.0
    allowed: float = 0.0
    rows: list[TableRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""

    def add(self, row: TableRow) -> None:
        """One more row."""
        self.rows.append(row)
        self.save()

    def note(self, text: str) -> None:
        """A sentence below the table."""
        if text not in self.notes:
            self.notes.append(text)
            self.save()

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {name: each for name, each in dataclasses.asdict(self).items() if name != "path"}

    def save(self) -> None:
        """Write it anew."""
        write_text(self.path, json.dumps(self.record, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """What a part wrote; without rows where it wrote nothing."""
        if not path.is_file():
            return cls(path)
        record = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, **{**record, "rows": [TableRow(**row) for row in record["rows"]]})


GRACE_S = 6.0
"""Of a part's time, for its last words."""
LAST_LINES = 12
LEAST_S = 5.0
"""A part with less time than this is not begun."""


def run_parts(names: Sequence[str], context: Context, seconds: float) -> Iterator[Report]:
    """Run parts in `seconds` altogether: what each has found, as it ends.

    Args:
        context: its folder gets one folder for each part.
    """
    end = time.monotonic() + seconds
    for place, name in enumerate(names):
        rest = sum(PARTS[each].share for each in names[place:])
        allowed = max(0.0, end - time.monotonic()) * PARTS[name].share / rest
        folder = context.path / name
        yield run_part(PARTS[name], replace(context, folder=str(folder), seconds=allowed))


def run_part(part: Part, context: Context) -> Report:
    """Run one part in a process of its own, and read what it found."""
    began = time.monotonic()
    report = Report(context.path / "report.json")
    if context.seconds < LEAST_S:
        report.status, report.problem = LATE, "the parts before it left no time"
    else:
        context.path.mkdir(parents=True)
        task, log = context.path / "context.json", context.path / "log.txt"
        # For its last rows and the end of what it has started itself.
        inside = replace(context, seconds=max(LEAST_S, context.seconds - GRACE_S))
        task.write_text(json.dumps(dataclasses.asdict(inside), indent=2) + "\n", encoding="utf-8")
        argv = [sys.executable, "-m", "benchmarks.gpu.part", part.run, str(task)]
        processes = Processes(argv=argv, environments=[environment(context)], logs=[log])
        done = run(processes, context.seconds)
        report = Report.read(report.path)
        if done.status != 0:
            report.status = LATE if done.status is None else FAILED
            how = f"ended with status {done.status}"
            how = f"not done after its {context.seconds:.0f} s" if done.status is None else how
            report.problem = "\n".join([how, *last_lines(context.path, LAST_LINES, "log.txt")])
    report.part, report.title = part.name, part.title
    report.seconds, report.allowed = time.monotonic() - began, context.seconds
    return report


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
        # A few kernels are compiled; processes that help with it are waited for at the end.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # torch.compile's speed on a host is not what is asked for.
        **({"TORCH_COMPILE_DISABLE": "1"} if context.tiny else {}),
    }


def write(folder: Path, machine: Mapping[str, Any], results: Sequence[Report]) -> None:
    """Write everything anew; called after every part, so that an end in between keeps the rest."""
    record = {"machine": dict(machine), "parts": [each.record for each in results]}
    write_text(folder / "results.json", json.dumps(record, indent=2) + "\n")
    write_text(folder / "page.md", page(machine, results))


def page(machine: Mapping[str, Any], results: Sequence[Report]) -> str:
    """The page in Markdown."""
    lines = [f"# {machine['card']}", "", "| what | value |", "|---|---|"]
    lines += [line([name, shown(name, value)]) for name, value in machine.items()]
    lines += ["", "| part | result | seconds |", "|---|---|---:|"]
    for result in results:
        status = result.status if result.status == OK else f"**{result.status}**"
        problem = result.problem.partition("\n")[0]
        took = f"{result.seconds:.0f} of {result.allowed:.0f}"
        lines.append(line([result.title, f"{status}: {problem}" if problem else status, took]))
    for result in results:
        lines += ["", f"## {result.title}", ""]
        if result.problem:
            lines += [f"**{result.status}**", "", "```", result.problem, "```", ""]
        lines += table(result.rows)
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"


def main(run: str, task: str) -> None:
    """Run one part; what it finds is in ``report.json`` of its folder."""
    context = Context(**json.loads(Path(task).read_text(encoding="utf-8")))
    report = Report(context.path / "report.json")
    module, _, function = run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context, report)
    except PartError as error:
        report.status, report.problem = error.status, error.problem
        report.save()


if __name__ == "__main__":
    # What a part raises is of the module of this name.
    from benchmarks.gpu.part import main as run_part

    raise_when_terminated()
    run_part(sys.argv[1], sys.argv[2])
