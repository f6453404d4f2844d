"""Evaluating and saving never need more of a device than training, counted by its allocator."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, run_file

CONFIG = {**TINY, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 2000}
ALL: Mapping[str, Any] = {"adapter": None}


def _case(ranks: int, strategy: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {"strategy": dict(strategy), "launch": {"devices": ranks}, **changes}


USUAL = {
    "single": _case(1, {"name": "single"}),
    **{name: _case(2, {"name": name}) for name in ("ddp", "fsdp", "zero")},
    "fsdp-all": _case(2, {"name": "fsdp"}, **ALL),
}
MORE = {
    "single-all": _case(1, {"name": "single"}, **ALL),
    "single-wide": _case(1, {"name": "single"}, model={"config": {**CONFIG, "vocab_size": 30_000}}),
    "ddp-all": _case(2, {"name": "ddp"}, **ALL),
    "tp": _case(2, {"name": "ddp", "tp": 2}),
    "tp-all": _case(2, {"name": "ddp", "tp": 2}, **ALL),
    "pp": _case(2, {"name": "ddp", "pp": 2}),
    "pp-all": _case(2, {"name": "ddp", "pp": 2}, **ALL),
    "cp": _case(2, {"name": "ddp", "cp": 2}),
    "fsdp-once": _case(2, {"name": "fsdp", "gather": "step"}),
    "fsdp-offload": _case(2, {"name": "fsdp", "offload": "both"}, **ALL),
    "hsdp": _case(4, {"name": "fsdp", "dp_replicate": 2}, **ALL),
    **{f"zero{n}": _case(2, {"name": "zero", "stage": n}) for n in (1, 2)},
    **{f"zero{n}-all": _case(2, {"name": "zero", "stage": n}, **ALL) for n in (1, 2, 3)},
    "zero-offload": _case(2, {"name": "zero", "offload": "optimizer"}, **ALL),
}
TRAINING, EVALUATION, SAVE = "training", "evaluation", "save"
PEAKS: dict[str, int] = {}


@contextlib.contextmanager
def within(phase: str, before: str | None, placement: Any) -> Iterator[None]:
    """A phase, within another one or not."""

    def see(name: str) -> None:
        PEAKS[name] = max(placement.memory().peak, PEAKS.get(name, 0))
        placement.reset_peak()

    if before is not None:
        see(before)
    placement.reset_peak()
    try:
        yield
    finally:
        see(phase)


def running(run: Any) -> Any:
    def call(self: Any) -> Any:
        assert self.backend.placement.memory().kind == "allocator"
        with within(TRAINING, None, self.backend.placement):
            return run(self)

    return call


def evaluating(evaluate: Any) -> Any:
    def call(self: Any, done: int) -> Any:
        with within(EVALUATION, TRAINING, self.backend.placement):
            return evaluate(self, done)

    return call


def saving(save: Any) -> Any:
    def call(job: Any, rank: Any, prepared: Any) -> Any:
        with within(SAVE, None, prepared.loop.backend.placement):
            found = save(job, rank, prepared)
        file = Path(job.run_directory) / f"phases{os.environ['RANK']}.json"
        file.write_text(json.dumps(PEAKS))
        return found

    return call


@contextlib.contextmanager
def noting_peaks() -> Iterator[None]:
    """Each rank writes ``phases{rank}.json``, phase -> bytes of the device's allocator, into the
    run's folder. Each phase begins a new peak with what is held then."""
    from anygauge.training import save
    from anygauge.training.loop import Loop

    with (
        mock.patch.object(Loop, "run", running(Loop.run)),
        mock.patch.object(Loop, "evaluate", evaluating(Loop.evaluate)),
        mock.patch.object(save, "save_result", saving(save.save_result)),
    ):
        yield


Found = Mapping[str, Sequence[Mapping[str, int]]]


def peaks(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> Found:
    """Train each case on simulated cards: case -> rank -> phase -> bytes."""
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    rows = folder / "rows.jsonl"
    text = "a row of plain words, each of which is learned, and no place is left over " * 20
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    parts = []
    for name, case in cases.items():
        section = {
            "config": CONFIG,
            "tokenizer": str(folder / "tokenizer"),
            **case.get("model", {}),
        }
        file = run_file(
            folder,
            name=name,
            backend="sim",
            data={"train": {"path": str(rows)}, "eval": {"path": str(rows)}, "packing": True},
            train={"steps": 3},
            **{**case, "model": section},
        )
        parts.append(RunPart(file=str(file)))
    runs = finished(parts, timeout_s=1800, within=noting_peaks)
    return {
        name: [json.loads(each.read_text()) for each in sorted(run.folder.glob("phases*.json"))]
        for name, run in zip(cases, runs, strict=True)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sequence[Mapping[str, int]]]:
    """The peaks of a case's ranks; the usual cases run at once, and so do the others."""

    @functools.cache
    def of(usual: bool) -> Found:
        return peaks(tmp_path_factory.mktemp("runs"), USUAL if usual else MORE)

    return lambda name: of(name in USUAL)[name]


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_evaluation_and_saving_need_no_more_than_training(
    name: str, found: Callable[[str], Sequence[Mapping[str, int]]]
) -> None:
    of_ranks = found(name)
    assert len(of_ranks) == {**USUAL, **MORE}[name]["launch"]["devices"]
    for phases in of_ranks:
        assert max(phases["evaluation"], phases["save"]) <= phases["training"], phases
