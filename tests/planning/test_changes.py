"""Changes that make a run fit: which are tried, in which order, and lines that can be pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import UnsupportedError
from anygauge.planning.changes import ENOUGH, MOST_TRIALS, Change, _Search, candidates, nearest
from anygauge.planning.fit import GIB
from anygauge.planning.memory import ACTIVATIONS, OPTIMIZER, WEIGHTS
from anygauge.planning.trials import Target, Trial, changed
from anygauge.registry import Registry
from tests.helpers.runs import TINY
from tests.planning.standins import CARD, TARGET, Tried, machine, run

REGISTRY = Registry.load()
FULL = {"train": {"gradient_checkpointing": False}, "strategy": {"name": "ddp"}}


def paths(run: RunFile, target: Target = TARGET) -> list[list[str]]:
    return [sorted(ladder[0].lines) for ladder in candidates(run, target, REGISTRY)]


def test_what_costs_least_comes_first_and_shorter_rows_last() -> None:
    found = paths(run(**FULL), Target(backend="cpu", card=CARD, machine=machine()))
    assert found == [
        ["strategy"],
        ["strategy"],
        ["train.micro_batch_size"],
        ["train.gradient_checkpointing"],
        ["train.optimizer.name"],
        ["train.activation_offloading"],
        ["strategy"],
        ["strategy"],
        ["strategy"],
        ["adapter"],
        ["launch.devices", "launch.nodes"],
        ["data.max_length"],
    ]


def test_what_a_run_has_already_is_not_proposed() -> None:
    small = run(
        adapter={"r": 8},
        model={"name": "some/model", "config": None, "tokenizer": None, "quantise": "nf4"},
        train={
            "micro_batch_size": 1,
            "activation_offloading": True,
            "optimizer": {"name": "adamw_8bit"},
        },
        strategy={"name": "fsdp", "offload": "both"},
        data={"max_length": 200},
    )
    found = paths(small)
    assert found == [["strategy"], ["strategy"], ["launch.devices", "launch.nodes"]]
    assert paths(run(adapter={"r": 64}))[-4:-1] == [
        ["model.quantise"],
        ["adapter.r"],
        ["launch.devices", "launch.nodes"],
    ]


def strategies(**section: Any) -> list[dict[str, Any]]:
    ladders = candidates(run(strategy=section), TARGET, REGISTRY)
    return [dict(one[0].lines["strategy"]) for one in ladders if "strategy" in one[0].lines]


def test_a_strategy_is_proposed_that_takes_less_than_the_runs() -> None:
    zero, fsdp = {"name": "zero", "stage": 3}, {"name": "fsdp"}
    zeros = [{**zero, "offload": "optimizer"}, {**zero, "offload": "both"}]
    fsdps = [{**fsdp, "offload": "both"}]
    assert strategies(name="ddp") == [zero, fsdp, *zeros, *fsdps]
    assert strategies(name="zero", stage=2) == [zero, fsdp, *zeros, *fsdps]
    assert strategies(name="zero") == [fsdp, *zeros, *fsdps]
    assert strategies(**zeros[0]) == [zeros[1], *fsdps]
    assert strategies(**zeros[1]) == fsdps
    assert strategies(name="fsdp", dp_replicate=2) == [fsdp, zero, *fsdps, *zeros]
    assert strategies(name="ddp", tp=2) == [{**fsdp, "tp": 2}, {**fsdp, "tp": 2, "offload": "both"}]


def test_the_global_batch_is_kept() -> None:
    (fewer,) = (
        one
        for one in candidates(run(), TARGET, REGISTRY)
        if "train.micro_batch_size" in one[0].lines
    )
    assert [change.lines["train.micro_batch_size"] for change in fewer] == [4, 2, 1]


@pytest.mark.parametrize(
    "sections", [FULL, {"adapter": {"r": 32}, "strategy": {"name": "zero", "stage": 2}}]
)
def test_lines_can_be_pasted_and_set(sections: dict[str, Any], tmp_path: Path) -> None:
    values = {
        "model": {"config": TINY, "tokenizer": "none"},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}, "max_length": 1024},
        "train": {"global_batch_size": 64, "micro_batch_size": 8, **sections.get("train", {})},
        "launch": {"devices": 8},
        **{k: v for k, v in sections.items() if k != "train"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    plain = load_run_file(path).run
    seen = 0
    for ladder in candidates(plain, TARGET, REGISTRY):
        for change in ladder:
            if "model.quantise" in change.lines:
                continue  # a configuration has no weights to quantise
            assert load_run_file(path, change.options).run == changed(plain, change.lines)
            pasted = yaml.safe_load(change.text)
            for section, given in pasted.items():
                both = {} if section == "strategy" else values.get(section, {})
                pasted[section] = {**both, **given}
            (tmp_path / "pasted.yaml").write_text(yaml.safe_dump({**values, **pasted}))
            assert load_run_file(tmp_path / "pasted.yaml").run == changed(plain, change.lines)
            seen += 1
    assert seen > 8


def test_a_run_goes_on_until_three_fit() -> None:
    def needed(run: RunFile) -> int:
        size = 80 if run.strategy.name == "ddp" else 20
        return size * GIB // (9 - run.train.micro_batch_size)

    tried = Tried(needed)
    found = nearest(run(**FULL), TARGET, tried, REGISTRY)
    assert [list(one.change.lines) for one in found] == [
        ["strategy"],
        ["strategy"],
        ["train.micro_batch_size"],
    ]
    assert found[2].change.lines == {"train.micro_batch_size": 4}, "the mildest that fits"
    assert len(found) == ENOUGH and all(one.trial.fits for one in found)
    assert len(tried.runs) == 6, "the run as it is among them"


@pytest.mark.parametrize(
    ("kind", "skipped"), [(WEIGHTS, 5), (ACTIVATIONS, 1), (OPTIMIZER, 4), ("any", 0)]
)
def test_what_cannot_be_enough_is_not_rehearsed_alone(kind: str, skipped: int) -> None:
    alone = [ladder for ladder in candidates(run(**FULL), TARGET, REGISTRY)]
    tried = Tried(lambda run: 4000 * GIB, kind=kind)
    _Search(run(**FULL), TARGET, tried, REGISTRY).single()
    assert len(tried.runs) == 1 + len(alone) - skipped


def test_what_is_refused_is_left_out() -> None:
    def needed(run: RunFile) -> int:
        if run.strategy.name != "ddp" or run.train.micro_batch_size == 1:
            raise UnsupportedError("not here")
        return (80 if run.train.micro_batch_size > 2 else 20) * GIB

    found = nearest(run(**FULL), TARGET, Tried(needed), REGISTRY)
    assert [dict(one.change.lines) for one in found] == [{"train.micro_batch_size": 2}]


def test_changes_are_added_up_where_none_is_enough_and_the_needless_left_out() -> None:
    def needed(run: RunFile) -> int:
        size = 200 * GIB
        size //= 2 if run.train.gradient_checkpointing else 1
        size //= 4 if run.strategy.name == "zero" and run.strategy.offload == "both" else 1  # type: ignore[attr-defined]
        size -= (8 - run.train.micro_batch_size) * GIB // 8
        return size

    tried = Tried(needed)
    (found,) = nearest(run(**FULL), TARGET, tried, REGISTRY)
    assert dict(found.change.lines) == {
        "train.gradient_checkpointing": True,
        "strategy": {"name": "zero", "stage": 3, "offload": "both"},
    }
    assert found.trial.fits


def test_nothing_helps() -> None:
    tried = Tried(lambda run: 4000 * GIB)
    assert nearest(run(**FULL), TARGET, tried, REGISTRY) == []
    assert len(tried.runs) <= 2 * MOST_TRIALS


def test_two_changes_of_one_section_are_one_line() -> None:
    change = Change(
        lines={"train.micro_batch_size": 1, "train.gradient_checkpointing": True}, costs=""
    )
    assert change.text == "train: {micro_batch_size: 1, gradient_checkpointing: true}"
    assert change.options == ["train.micro_batch_size=1", "train.gradient_checkpointing=true"]


def test_the_trial_is_of_the_changed_run() -> None:
    found: list[Trial] = [
        one.trial for one in nearest(run(**FULL), TARGET, Tried(lambda r: GIB), REGISTRY)
    ]
    assert [one.run.strategy.name for one in found] == ["zero", "fsdp", "ddp"]
