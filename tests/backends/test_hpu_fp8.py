"""Products in FP8 on the stand-in for Gaudi: what is called, in optimum-habana's order.

The stand-in rounds nothing: speed and numbers of FP8 are not shown.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from anygauge_hpu.gaudi_fp8 import RECIPE
from tests.backends.test_hpu_runs import (
    ACCUMULATION,
    RANKS,
    STEPS,
    TrainedOnStandIn,
    refused,
    trained,
)
from tests.helpers.gaudi import needs_cards, standin_environment, standin_site
from tests.helpers.runs import merged, run_file, train, trained_here

pytestmark = needs_cards

FP8 = {"precision": {"fp8": True}}
LINEAR_LAYERS = 2 * 7
"""Of the tiny model: four projections of attention and three of the MLP in each of two layers."""
FORWARDS = STEPS * ACCUMULATION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gaudi-fp8")


@pytest.fixture(scope="module")
def lazy(folder: Path) -> TrainedOnStandIn:
    return trained(folder, "fp8", attention="softmax", changes=merged(FP8, EVALUATED))


EVALUATED = {"data": {"eval_fraction": 0.1}}


def test_each_product_is_replaced_but_those_of_the_adapter_and_the_output_layer(
    lazy: TrainedOnStandIn,
) -> None:
    for each in lazy.calls:
        made = [call[1:] for call in each if call[0] == "te.Linear"]
        assert len(made) == LINEAR_LAYERS
        # The adapter's rank is 4, and the vocabulary the largest size of all.
        assert all(4 not in sizes[:2] and max(sizes[:2]) <= 64 for sizes in made)
        # Layers are computed again: none keeps its weight in FP8 until its backward.
        assert {tuple(call[2:]) for call in made} == {(False, False)}


def test_layers_multiply_in_fp8_twice_in_a_step_and_never_in_an_evaluation(
    lazy: TrainedOnStandIn,
) -> None:
    assert lazy.run.evaluations()
    for each in lazy.calls:
        again = [call[2] for call in each if call[0] == "fp8_gemm"]
        assert again.count(False) == again.count(True) == FORWARDS * LINEAR_LAYERS
        contexts = [call for call in each if call[0] == "fp8_autocast"]
        assert len(contexts) == 2 * FORWARDS  # one around each forward, one around each backward
        assert all(call[2] == RECIPE for call in contexts)


def test_a_step_is_as_optimum_habanas(lazy: TrainedOnStandIn) -> None:
    """A context around forward, its products, one around backward, those that are computed again
    (trainer.py, compute_loss_context_manager and training_step)."""
    context, first, again = ("fp8_autocast", None), ("fp8_gemm", False), ("fp8_gemm", True)
    for each in lazy.calls:
        order: list[tuple[str, Any]] = []
        for call in each:
            what = (call[0], call[2] if call[0] == "fp8_gemm" else None)
            if what in (context, first, again) and (what == context or what != order[-1]):
                order.append(what)
        assert order == [context, first, context, again] * FORWARDS


def test_the_layers_are_the_models_own(lazy: TrainedOnStandIn, folder: Path) -> None:
    """The host has none in FP8."""
    train = {
        **{"steps": STEPS, "global_batch_size": RANKS * ACCUMULATION, "micro_batch_size": 1},
        "gradient_checkpointing": True,
    }
    fields = {"adapter": {"r": 4, "dropout": 0.0}, "strategy": {"name": "single"}, **EVALUATED}
    bfloat16 = {"precision": {"param_dtype": "bfloat16"}}
    host = trained_here(run_file(folder, name="host", train=train, **fields, **bfloat16))
    assert lazy.run.steps("loss") == pytest.approx(host.steps("loss"), rel=1e-3)
    assert "linear layers multiply in FP8" in lazy.run.out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_without_recomputation_weights_in_fp8_are_not_kept(folder: Path, mode: str) -> None:
    whole = {"train": {"gradient_checkpointing": False, "global_batch_size": ACCUMULATION}}
    single = {**whole, "strategy": {"name": "single"}, **FP8}
    run = trained(folder, f"single-{mode}", ranks=1, mode=mode, changes=single)
    made = [call for call in run.calls[0] if call[0] == "te.Linear"]
    assert [call[4] for call in made] == [True] * LINEAR_LAYERS
    again = [call[2] for call in run.calls[0] if call[0] == "fp8_gemm"]
    assert again == [False] * (FORWARDS * LINEAR_LAYERS)
    # No recomputation: backward has no context.
    assert run.count("fp8_autocast") == [FORWARDS]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_other_stages_multiply_in_fp8_too(lazy: TrainedOnStandIn, folder: Path, stage: int) -> None:
    staged = {**FP8, "strategy": {"name": "zero", "stage": stage, "reentrant": True}}
    run = trained(folder, f"stage-{stage}", attention="softmax", changes=merged(staged, EVALUATED))
    assert run.count("fp8_gemm") == lazy.count("fp8_gemm")
    assert run.run.steps("loss") == pytest.approx(lazy.run.steps("loss"), rel=1e-3)


@pytest.mark.slow
def test_compile_mode_multiplies_in_fp8_too(lazy: TrainedOnStandIn, folder: Path) -> None:
    run = trained(folder, "compiled", mode="compile", changes=FP8)
    assert run.count("fp8_gemm") == lazy.count("fp8_gemm") == [2 * FORWARDS * LINEAR_LAYERS] * RANKS


def run_fields(ranks: int) -> dict[str, Any]:
    """Of a run that is refused, or goes on."""
    return {
        "backend_options": {"mode": "lazy"},
        "launch": {"devices": ranks},
        "precision": {"param_dtype": "bfloat16", "fp8": True},
        "strategy": {"name": "zero", "reentrant": True},
        "train": {"steps": STEPS, "global_batch_size": ranks * ACCUMULATION, "micro_batch_size": 1},
    }


@pytest.mark.slow
def test_all_weights_train_in_fp8_and_a_checkpoint_goes_on(folder: Path) -> None:
    whole: dict[str, Any] = {
        **FP8,
        "adapter": None,
        "train": {"gradient_checkpointing": False, "steps": 4},
        "checkpoint": {"every": 2, "keep_last": 5},
    }
    run = trained(folder, "all", changes=whole)
    (first, *_) = sorted((run.run.folder / "checkpoints").iterdir())
    fields = {"name": "all-resumed", "backend": "hpu", **merged(run_fields(2), whole)}
    path = run_file(folder, **fields)
    environment = standin_environment(standin_site(folder), folder / "resumed-record")
    again = train(path, "--resume", str(first), environment=environment)
    assert again.status == 0, again.out + again.err
    assert again.steps("loss") == pytest.approx(run.run.steps("loss")[2:], rel=1e-3)


def test_it_is_refused_where_the_library_is_missing(tmp_path: Path) -> None:
    shutil.rmtree(standin_site(tmp_path) / "intel_transformer_engine")
    said = refused(tmp_path, "missing", **run_fields(1))
    assert "lacks 'fp8_products'" in said and "intel_transformer_engine is not installed" in said


@pytest.mark.slow
def test_another_form_of_recomputation_is_refused(folder: Path, lazy: TrainedOnStandIn) -> None:
    single = {"strategy": {"name": "single"}}
    recomputes = {"train": {"gradient_checkpointing": True}}
    said = refused(folder, "other-form", **merged({**run_fields(1), **single}, recomputes))
    assert "reentrant form of recomputation alone" in said


@pytest.mark.slow
def test_a_card_of_the_first_generation_is_refused(tmp_path: Path) -> None:
    site = standin_site(tmp_path)
    asked = site / "habana_frameworks/torch/utils/experimental/__init__.py"
    text, second = asked.read_text(), "return synDeviceType.synDeviceGaudi2"
    assert second in text
    asked.write_text(text.replace(second, second.removesuffix("2")))
    said = refused(tmp_path, "first", **run_fields(1))
    assert "first generation, which has no FP8" in said
