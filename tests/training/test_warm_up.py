"""Widths that come later are computed in the first steps of a process, and nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anygauge.interface import Graph, NonFiniteLossError, ShapeKind, ShapePolicy
from anygauge.training.to_device import ToDevice
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, run_file, trained_here

COLD = ShapePolicy(kind=ShapeKind.BUCKETED, multiple=8, buckets=12)
WARM = ShapePolicy(kind=ShapeKind.BUCKETED, multiple=8, buckets=12, warm_up=2)
STEPS = 7
CLOCKS = {"time", "seconds", "tokens_per_s", "peak_memory", "remaining_s"}
DROPOUT: dict[str, Any] = {"adapter": {"r": 4, "dropout": 0.5}}


def fields(**train: Any) -> dict[str, Any]:
    """Rows of up to 96 tokens in steps of few, and dropout, which would show another draw."""
    shared = {"steps": STEPS, "micro_batch_size": 1, "global_batch_size": 2, **train}
    return {**DROPOUT, "data": {"eval_fraction": 0.2}, "train": shared}


def numbers(run: Run, *left_out: str) -> list[dict[str, Any]]:
    """The records without what a clock or a meter of memory says."""
    hidden = CLOCKS | set(left_out)
    found = [r for r in run.records if "step" in r]
    return [{key: value for key, value in r.items() if key not in hidden} for r in found]


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each micro-batch that is moved: its width, and whether it has rows."""
    seen: list[tuple[int, bool]] = []
    usual = ToDevice.__call__

    def noting(self: Any, batch: Any) -> Any:
        seen.append((int(batch.input_ids.shape[1]), batch.tokens > 0))
        return usual(self, batch)

    monkeypatch.setattr(ToDevice, "__call__", noting)
    return seen


def here(folder: Path, shapes: ShapePolicy, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Run:
    monkeypatch.setattr(Graph, "shapes", shapes)
    folder.mkdir(exist_ok=True)
    return trained_here(run_file(folder, strategy={"name": "single"}, **changes))


def test_all_widths_come_in_the_first_two_steps_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, widths: list[tuple[int, bool]]
) -> None:
    given = fields()
    cold = here(tmp_path / "cold", COLD, monkeypatch, **given)
    usual, widths[:] = list(widths), []
    warm = here(tmp_path / "warm", WARM, monkeypatch, **given)
    assert numbers(warm, "shapes") == numbers(cold, "shapes")
    of_run = {width for width, _ in usual[: 2 * STEPS]}
    assert len(of_run) > 2, "there is a width that the first steps have not"
    assert warm.steps("shapes")[0] == len(of_run) > cold.steps("shapes")[1]
    dummies = [each for each in widths if not each[1]]
    assert [each for each in widths if each[1]] == usual
    assert len(dummies) == sum(len(of_run - {w for w, _ in usual[at : at + 2]}) for at in (0, 2))
    # Those of a step begin with the widest, so that a lack of memory shows early.
    of_step_1 = widths[2 : 2 + len(of_run - {w for w, _ in usual[:2]})]
    assert of_step_1 == sorted(of_step_1, reverse=True) and not any(rows for _, rows in of_step_1)


def test_a_run_without_several_widths_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, widths: list[tuple[int, bool]]
) -> None:
    one = ShapePolicy(kind=ShapeKind.BUCKETED, buckets=1, warm_up=2)
    run = here(tmp_path, one, monkeypatch, **fields())
    assert run.steps("shapes") == [1] * STEPS and all(rows for _, rows in widths)


def test_what_is_not_finite_is_found_in_its_own_step_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that has dummies, too: nothing of them is reported."""
    from anygauge.training import setup

    usual, messages = setup.model_loss, []
    for name, shapes in (("cold", COLD), ("warm", WARM)):
        calls: list[None] = []

        def spoiled(outputs: Any, calls: list[None] = calls) -> Any:
            loss = usual(outputs)
            calls.extend([None] if loss.requires_grad and not loss.is_meta else [])
            return loss * float("nan") if len(calls) == 1 else loss

        monkeypatch.setattr(setup, "model_loss", spoiled)
        with pytest.raises(NonFiniteLossError) as error:
            here(tmp_path / name, shapes, monkeypatch, **fields())
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "at step 1, with rows" in messages[0]


def prepared(prepare_run: Any) -> Any:
    """The processes of all runs begin alike; a run's name is the first that differs."""

    def preparing(job: Any, run: Any, *args: Any) -> Any:
        with mock.patch.object(Graph, "shapes", WARM if run.name == "warm" else COLD):
            return prepare_run(job, run, *args)

    return preparing


@contextlib.contextmanager
def buckets() -> Iterator[None]:
    """Ranks of a device with buckets, which the run's name says whether it warms up."""
    from anygauge.training import setup

    with mock.patch.object(setup, "prepare_run", prepared(setup.prepare_run)):
        yield


STRATEGIES: Mapping[str, dict[str, Any]] = {
    "zero3": {"name": "zero"},
    "zero2": {"name": "zero", "stage": 2},
    "zero1": {"name": "zero", "stage": 1},
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "tensor": {"name": "ddp", "tp": 2},
    "sequences": {"name": "fsdp", "cp": 2},
    "stages": {"name": "ddp", "pp": 2},
}
QUICK = ("zero3", "ddp", "fsdp")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in STRATEGIES]
)
def test_no_strategy_has_other_losses_for_it(name: str, tmp_path: Path) -> None:
    """Two ranks, two micro-batches in a step; equal to the last digit."""
    shared = {**fields(global_batch_size=4), "strategy": STRATEGIES[name]}
    files = [
        run_file(tmp_path, name=each, launch={"devices": 2}, **shared) for each in ("cold", "warm")
    ]
    cold, warm = finished([RunPart(file=str(each)) for each in files], within=buckets)
    assert numbers(warm, "shapes") == numbers(cold, "shapes")
    first = {each.folder.name: each.steps("shapes")[0] for each in (cold, warm)}
    # A schedule of stages has one width in a step, and all its micro-batches under way.
    assert (first["warm"] > first["cold"]) == (name != "stages")
    assert ("warm-up: each of the run's widths" in warm.out) == (name != "stages")
    assert "warm-up" not in cold.out


def test_a_resumed_run_has_it_again_and_goes_on_exactly(tmp_path: Path) -> None:
    shared = {**fields(schedule={"name": "constant"}), "launch": {"devices": 2}}
    whole = run_file(tmp_path, name="cold", **shared)
    file = run_file(tmp_path, name="warm", checkpoint={"every": 3, "resume": "auto"}, **shared)
    reference, _, resumed = finished(
        [
            RunPart(file=str(whole)),
            RunPart(file=str(file), overrides=("train.steps=3",)),
            RunPart(file=str(file)),
        ],
        within=buckets,
    )
    assert "step 4 and 5" in resumed.out
    assert resumed.steps("loss") == reference.steps("loss")
