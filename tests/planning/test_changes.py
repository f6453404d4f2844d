"""What to change: in which order, what is left out, and options that can be pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import UnsupportedError
from anygauge.planning.changes import (
    BATCH,
    Choice,
    eight_changes,
    largest_batch,
    longest_rows,
    what_to_change,
)
from anygauge.planning.fit import GIB
from anygauge.planning.trials import changed
from anygauge.registry import Registry
from tests.helpers.runs import TINY
from tests.planning.standins import TARGET, Tried, run

REGISTRY = Registry.load()
ALL = {"train": {"gradient_checkpointing": False}, "strategy": {"name": "ddp"}}
ZERO, FSDP = {"name": "zero", "stage": 3}, {"name": "fsdp"}
SOME, BOTH = {**ZERO, "offload": "optimizer"}, {**ZERO, "offload": "both"}
FSDP_BOTH, HALVES = {**FSDP, "offload": "both"}, {**FSDP, "tp": 2}


def ways(run: RunFile, batch: int = 0, **more: Any) -> list[list[dict[str, Any]]]:
    trial = Tried(lambda run: 80 * GIB, **more)(run, TARGET)
    largest = Choice("batch", {BATCH: batch} if batch else {})
    found = eight_changes(trial, REGISTRY, largest, Choice("rows"))
    return [[dict(change.lines) for change in each] for each in found if each]


def suggested(run: RunFile, tried: Tried) -> list[Choice]:
    trial = tried(run, TARGET)
    batch = largest_batch(trial, TARGET, tried, REGISTRY)
    rows = longest_rows(trial, TARGET, tried)
    return list(what_to_change(trial, TARGET, tried, REGISTRY, batch, rows))


def test_eight_at_most_in_the_order_of_their_cost() -> None:
    kernels = {"linear_cross_entropy": "reference"}
    found = ways(run(**ALL, adapter={"r": 8}), kernels=kernels)
    assert [sorted({path for one in each for path in one}) for each in found] == [
        ["kernels.linear_cross_entropy"],
        ["strategy"],
        ["train.micro_batch_size"],
        ["train.gradient_checkpointing"],
        ["strategy"],
        ["strategy"],
        ["model.quantise"],
        ["data.max_length"],
    ]
    assert found[0] == [{"kernels.linear_cross_entropy": "chunked"}]
    assert found[6][1]["model.quantise"]["double_quantisation"] is True
    assert ways(run(**ALL))[-2] == [{"adapter": {"r": 16}}]


@pytest.mark.parametrize(("quantise", "left"), [("int8", []), ("nf4", [["model.quantise"]])])
def test_what_a_run_has_already_is_not_proposed(quantise: str, left: list[list[str]]) -> None:
    found = ways(
        run(
            model={"name": "a/b", "config": None, "tokenizer": None, "quantise": quantise},
            adapter={"r": 8},
            train={"micro_batch_size": 1},
            strategy=FSDP_BOTH,
            data={"max_length": 200},
        )
    )
    assert [list(one) for each in found for one in each] == left


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "ddp"}, [[FSDP, ZERO], [SOME], [FSDP_BOTH, BOTH]]),
        ({"name": "zero", "stage": 2}, [[ZERO, FSDP], [SOME], [BOTH, FSDP_BOTH]]),
        ({"name": "zero"}, [[SOME], [BOTH, FSDP_BOTH]]),
        (SOME, [[BOTH, FSDP_BOTH]]),
        (BOTH, []),
        (FSDP, [[SOME], [FSDP_BOTH, BOTH]]),
        ({"name": "ddp", "tp": 2}, [[HALVES], [{**HALVES, "offload": "both"}]]),
    ],
)
def test_a_strategy_is_proposed_that_takes_less_than_the_runs(
    section: dict[str, Any], expected: list[Any]
) -> None:
    found = [each for each in ways(run(strategy=section)) if "strategy" in each[0]]
    assert [[one["strategy"] for one in each] for each in found] == expected


@pytest.mark.parametrize(("fits", "expected"), [(0, 1), (5, 4), (2, 2), (7, 4)])
def test_a_smaller_batch_divides_the_global_one(fits: int, expected: int) -> None:
    assert [{"train.micro_batch_size": expected}] in ways(run(), fits)


@pytest.mark.parametrize(
    "sections", [ALL, {"adapter": {"r": 32}, "strategy": {"name": "zero", "stage": 2}}]
)
def test_lines_can_be_set(sections: dict[str, Any], tmp_path: Path) -> None:
    values = {
        "model": {"config": TINY, "tokenizer": "none"},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}, "max_length": 1024},
        **sections,
        "train": {"global_batch_size": 64, "micro_batch_size": 8, **sections.get("train", {})},
        "launch": {"devices": 8},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    plain = load_run_file(path).run
    found = [Choice("", one) for each in ways(plain) for one in each]
    # A configuration has no weights to quantise.
    found = [change for change in found if "model.quantise" not in change.lines]
    assert len(found) >= 6
    for change in found:
        assert load_run_file(path, change.options).run == changed(plain, change.lines)


def test_what_gains_nothing_is_left_out() -> None:
    def needed(run: RunFile) -> int:
        sharded = run.strategy.name != "ddp"
        return (20 if sharded else 80) * GIB - (0 if run.train.gradient_checkpointing else -GIB)

    found = suggested(run(**ALL), Tried(needed))
    strategy, recomputed = (["strategy"], True), (["train.gradient_checkpointing"], False)
    said = [(list(one.lines), one.fits) for one in found]
    assert said == [strategy, recomputed, strategy, strategy]
    assert found[0].lines == {"strategy": FSDP}
    assert found[0].trial is not None and found[0].trial.run.strategy.name == "fsdp"


def test_the_first_way_that_fits_is_taken_and_what_is_refused_passed_over() -> None:
    def needed(run: RunFile) -> int:
        if run.strategy.name == "fsdp" or run.train.micro_batch_size == 1:
            raise UnsupportedError("not here")
        return (20 if run.strategy.name == "zero" else 80) * GIB

    found = suggested(run(**ALL), Tried(needed))
    assert found[0].lines == {"strategy": ZERO}
    assert not [one for one in found if "train.micro_batch_size" in one.lines]


def test_nothing_helps() -> None:
    tried = Tried(lambda run: (4 - run.train.gradient_checkpointing) * 1000 * GIB)
    (one,) = suggested(run(**ALL), tried)
    assert list(one.lines) == ["train.gradient_checkpointing"] and not one.fits
    assert suggested(run(**ALL), Tried(lambda run: 4000 * GIB)) == []
    assert len(tried.runs) < 40
