"""One part of ``make gpu``: its place in the table, its task, its report, and its process.

python -m benchmarks.gpu.part MODULE:FUNCTION TASK.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.util.files import write_text
from benchmarks.processes import raise_when_terminated
from benchmarks.table import TableRow

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
_OPERATIONS, _PYTESTS, _TRAINING = _HERE + "operations:", _HERE + "pytests:", _HERE + "training:"
_LLAMA = "A random Llama of {} parameters"
_SEVERAL = "Several devices: ddp, fsdp and zero beside loops by hand"

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part("parity", "A run on the device beside the same run on the host", 48,
             _HERE + "parity:run"),
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
        folder: for what the part writes.
        seconds: that it may take; at the end of them it is ended.
        gpus: cards of each machine that it may use.
        hostfile: of several machines; empty for this one alone.
        nodes: machines.
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

    def end(self, error: PartError) -> None:
        """The part is over before it has found all."""
        self.status, self.problem = error.status, error.problem
        self.save()

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        record = dataclasses.asdict(self)
        del record["path"]
        return record

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


def main(run: str, task: str) -> None:
    """Run one part; what it finds is in ``report.json`` of its folder."""
    context = Context(**json.loads(Path(task).read_text(encoding="utf-8")))
    report = Report(context.path / "report.json")
    module, _, function = run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context, report)
    except PartError as error:
        report.end(error)


if __name__ == "__main__":
    # What a part raises is of the module of this name.
    from benchmarks.gpu.part import main as run_part

    raise_when_terminated()
    run_part(sys.argv[1], sys.argv[2])
