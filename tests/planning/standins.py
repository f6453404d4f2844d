"""Runs whose memory is a formula, so that answers are tested without a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import Card, Precision
from anygauge.planning.fit import GIB, fit
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Peak, RunMemory, Work
from anygauge.planning.trials import Target, Trial
from tests.helpers.runs import TINY

CARD = Card(name="square", memory=40 * GIB, reserved=GIB)
TARGET = Target(backend="cpu", card=CARD)


def peak(total: int, **kinds: int) -> Peak:
    return Peak(total=total, kinds=kinds or {"tensors": total})


def memory(step: int, host: int | None = None, kind: str = "tensors") -> RunMemory:
    """Of a run whose largest phase is `step`, in bytes, all of one kind."""
    return RunMemory(
        work=Work(),
        model_flops=(0.0, 0.0),
        device={
            phase: peak(step // part, **{kind: step // part})
            for phase, part in (("load", 4), ("backward", 1), ("update", 2))
        },
        host={} if host is None else {"load": peak(host), "backward": peak(0)},
        strategy="square",
        precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
        numbers=(1000, 100),
        per_layer=2**20,
        kernels={"attention": "fused", "linear_cross_entropy": "chunked"},
    )


def run(**sections: Any) -> RunFile:
    """A run on eight ranks."""
    values: dict[str, Any] = {
        "model": {"config": TINY, "tokenizer": "none"},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 1024},
        "train": {"global_batch_size": 64, "micro_batch_size": 8},
        "launch": {"devices": 8},
        "strategy": {"name": "zero"},
    }
    for name, section in sections.items():
        whole = not isinstance(section, dict) or name == "strategy"
        values[name] = section if whole else {**values.get(name, {}), **section}
    return RunFile.model_validate(values)


class Tried:
    """A `Try` that takes what a formula says.

    Args:
        needed, host: of a rank's device, and of its host, in bytes.
        more: fields of its `RunMemory`.

    Attributes:
        runs: those that were tried.
    """

    def __init__(
        self,
        needed: Callable[[RunFile], int],
        host: Callable[[RunFile], int] | None = None,
        **more: Any,
    ) -> None:
        self.runs: list[RunFile] = []
        self._needed, self._host, self._more = needed, host, more

    def __call__(self, run: RunFile, target: Target) -> Trial:
        self.runs.append(run)
        found = memory(self._needed(run), None if self._host is None else self._host(run))
        found = replace(found, **self._more)
        ranks = run.launch.nodes * run.launch.devices
        assert target.card is not None
        held = fit(found, target.card, ranks, run.launch.devices, target.machine)
        return Trial(run=run, memory=found, fit=held)


def machine(**figures: Any) -> Machine:
    return Machine(name="eight", card="square", cards=8, **figures)
