"""``anygauge plan`` of runs whose memory is a formula, so that answers are tested without plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge import cli
from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.interface import Card, Precision, UnsupportedError
from anygauge.planning.fit import GIB
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Peak, RunMemory, Work
from anygauge.planning.trials import Plan
from tests.helpers.runs import TINY, merged

CARD = Card(name="square", memory=40 * GIB, reserved=GIB)
HARDWARE = """
[card.square]
memory = "40 GiB"
reserved = "1 GiB"
[machine.eight]
card = "square"
cards = 8
host_memory = "64 GiB"
[card.blank]
[card.small]
memory = "1 GiB"
[card.old]
memory = "40 GiB"
flops.float16 = "100 TFLOPS"
flops.float32 = "10 TFLOPS"
[card.fast]
memory = "40 GiB"
flops.bfloat16 = "100 TFLOPS"
bandwidth = "1 TB/s"
link = "100 GB/s"
[machine.quick]
card = "fast"
cards = 8
network = "50 GB/s"
"""
"""No backend drives these cards."""


def peak(total: int, **kinds: int) -> Peak:
    return Peak(total=total, kinds=kinds or {"tensors": total})


def memory(step: int, host: int | None = None, **more: Any) -> RunMemory:
    """Of a run whose largest phase is `step`, in bytes; `more` are other fields."""
    found = RunMemory(
        work=Work(),
        model_flops=(0.0, 0.0),
        device={
            phase: peak(step // (1 if phase == "backward" else 4))
            for phase in ("load", "forward", "loss", "backward", "update", "save", "evaluation")
        },
        host={} if host is None else {"load": peak(host), "backward": peak(0)},
        strategy="square",
        precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
        numbers=(1000, 100),
        per_layer=2**20,
        kernels={"attention": "fused", "linear_cross_entropy": "chunked"},
    )
    return replace(found, **more)


def values(**sections: Any) -> dict[str, Any]:
    """A run file's, of eight ranks; `sections` are merged over it."""
    fields: dict[str, Any] = {
        "model": {"config": TINY, "tokenizer": "none"},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 1024},
        "train": {"steps": 100, "global_batch_size": 64, "micro_batch_size": 8},
        "launch": {"devices": 8},
        "strategy": {"name": "zero"},
    }
    strategy = sections.get("strategy", fields["strategy"])
    return {**merged(fields, sections), "strategy": strategy}


def run(**sections: Any) -> RunFile:
    return RunFile.model_validate(values(**sections))


class Formula:
    """In the place of `plan_run`.

    Args:
        needed, host: of a rank's device, and of its host, in bytes; it may refuse.
        more: fields of `RunMemory`.

    Attributes:
        runs: that were planned.
    """

    def __init__(
        self,
        needed: Callable[[RunFile], int],
        host: Callable[[RunFile], int] = lambda run: 0,
        **more: Any,
    ) -> None:
        self.runs: list[RunFile] = []
        self._needed, self._host, self._more = needed, host, more

    @classmethod
    def of(cls, needs: str, host: str = "0", **more: Any) -> Formula:
        """Of expressions; see answers.yaml for their names."""
        if "compiled" in more:
            more["uncompiled"] = {"backward": peak(100 * GIB)}
        return cls(lambda run: eval(needs, names(run)), lambda run: eval(host, names(run)), **more)

    def __call__(self, run: RunFile, registry: Any, backend: Any, world_size: int) -> RunMemory:
        self.runs.append(run)
        return memory(self._needed(run), self._host(run), strategy=run.strategy.name, **self._more)


def refuse(words: str) -> int:
    raise UnsupportedError(words)


def names(run: RunFile) -> dict[str, Any]:
    """What formulas are written with."""
    options = {"stage": 0, "offload": "none", "tp": 1, **values_of(run)["strategy"]}
    return {
        **{name: options[name] for name in ("stage", "offload", "tp")},
        "strategy": run.strategy.name,
        "batch": run.train.micro_batch_size,
        "length": run.data.max_length,
        "recomputes": run.train.activations.every == 1,
        "refuse": refuse,
        "GIB": GIB,
        "MIB": GIB // 1024,
    }


def in_words(run: RunFile) -> str:
    """A strategy, with what of it is not as usual."""
    has = names(run)
    words = [has["strategy"], *([] if has["offload"] == "none" else [has["offload"]])]
    return " ".join([*words, *([f"tp {has['tp']}"] if has["tp"] > 1 else [])])


class PlanCommand:
    """``anygauge plan`` of a run on eight square cards."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._folder, self._patch, self._capsys = folder, patch, capsys
        (folder / "cards.toml").write_text(HARDWARE)
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")

    def text(self, formula: Plan, *options: str, **sections: Any) -> str:
        """What it prints."""
        self._patch.setattr("anygauge.planning.plan.plan_run", formula)
        path = self._folder / "run.yaml"
        path.write_text(yaml.safe_dump(values(**{"launch": {}, **sections})))
        where = () if "--machine" in options else ("--machine", "eight")
        assert cli.run(["plan", str(path), "--hardware", "cards.toml", *where, *options]) == 0
        shown = self._capsys.readouterr()
        assert shown.err == ""
        return shown.out

    def record(self, formula: Plan, *options: str, **sections: Any) -> dict[str, Any]:
        """What it prints for programs."""
        found: dict[str, Any] = json.loads(self.text(formula, *options, "--json", **sections))
        return found


def machine(**figures: Any) -> Machine:
    return Machine(name="eight", card="square", cards=8, **figures)
