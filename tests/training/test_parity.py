"""One gradient: whatever the ranks, the accumulation, the strategy, the padding or the packing.

Real ranks on ragged rows, so that they hold different numbers of tokens. float32 without dropout;
what is compared is every step's loss and gradient norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, run_file, trained_here

TOLERANCE = 2e-5
"""Relative; float32 sums in another order. A rank counted wrongly moves losses by percents."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, the whole batch in one forward."""
    folder = tmp_path_factory.mktemp("reference")
    return trained_here(
        run_file(
            folder,
            strategy={"name": "single"},
            train={"micro_batch_size": 4, "max_grad_norm": 0.05},
        )
    )


def on_ranks(path: Path, devices: int) -> Run:
    """A run of so many ranks."""
    (run,) = finished([RunPart(file=str(path), overrides=(f"launch.devices={devices}",))])
    return run


ZERO: dict[str, Any] = {"strategy": {"name": "zero"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero on 2 ranks": (2, {**ZERO, "train": {"micro_batch_size": 2}}),
    "zero on 2 ranks with accumulation": (2, {**ZERO, "train": {"micro_batch_size": 1}}),
    **{
        f"{name} on 2 ranks with accumulation": (
            2,
            {"strategy": {"name": name}, "train": {"micro_batch_size": 1}},
        )
        for name in ("ddp", "fsdp")
    },
}
SLOW_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero on 1 rank with accumulation": (1, {**ZERO, "train": {"micro_batch_size": 1}}),
    "no gradient checkpointing": (
        2,
        {**ZERO, "train": {"micro_batch_size": 2, "gradient_checkpointing": False}},
    ),
    **{
        f"stage {stage}": (
            2,
            {"strategy": {"name": "zero", "stage": stage}, "train": {"micro_batch_size": 1}},
        )
        for stage in (0, 1, 2)
    },
    **{
        f"{name}, streamed": (
            2,
            {
                "strategy": {"name": name},
                "train": {"micro_batch_size": 1},
                "data": {"streaming": True},
            },
        )
        for name in ("ddp", "fsdp")
    },
    **{
        f"sequences over 2 ranks, {method}": (
            2,
            {
                "strategy": {"name": "fsdp", "cp": 2, "cp_method": method},
                "train": {"micro_batch_size": 1},
                "data": {"streaming": method == "ulysses"},
            },
        )
        for method in ("gather", "ulysses")
    },
    **{
        f"layers over 2 ranks, {how}": (
            2,
            {
                "strategy": {"name": name, "tp": 2},
                "train": {"micro_batch_size": 1},
                "data": {"streaming": how == "streamed"},
            },
        )
        for name, how in (("ddp", "in memory"), ("ddp", "streamed"), ("fsdp", "alone in its group"))
    },
    "stages on 2 ranks, streamed": (
        2,
        {
            "strategy": {"name": "ddp", "pp": 2},
            "train": {"micro_batch_size": 1},
            "data": {"streaming": True},
        },
    ),
    "groups of ranks": (
        4,
        {"strategy": {"name": "fsdp", "dp_replicate": 2}, "train": {"micro_batch_size": 1}},
    ),
}


def test_accumulation_changes_nothing(reference: Run, tmp_path: Path) -> None:
    changes = {"micro_batch_size": 1, "max_grad_norm": 0.05}
    run = trained_here(run_file(tmp_path, strategy={"name": "single"}, train=changes))
    assert run.steps("loss") == pytest.approx(reference.steps("loss"), rel=TOLERANCE)
    assert run.steps("grad_norm") == pytest.approx(reference.steps("grad_norm"), rel=1e-3)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_CASES)]
)
def test_same_losses(case: str, reference: Run, tmp_path: Path) -> None:
    devices, changes = {**CASES, **SLOW_CASES}[case]
    changes["train"]["max_grad_norm"] = 0.05
    run = on_ranks(run_file(tmp_path, **changes), devices)
    assert run.steps("loss") == pytest.approx(reference.steps("loss"), rel=TOLERANCE)
    assert run.steps("grad_norm") == pytest.approx(reference.steps("grad_norm"), rel=1e-3)
    assert min(run.steps("grad_norm")) > 0.05, "every step was clipped"
    assert run.steps("num_loss_tokens") == reference.steps("num_loss_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_all_weights_on_zero_and_single(compute: str, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"adapter": None, "precision": {"param_dtype": compute}}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = trained_here(run_file(tmp_path / "a", **shared, strategy={"name": "single"}))
    two = on_ranks(run_file(tmp_path / "b", **shared, **ZERO), 2)
    # bfloat16 keeps 8 bits: sums over other parts of the batch round differently.
    close = TOLERANCE if compute == "float32" else 5e-4
    assert two.steps("loss") == pytest.approx(one.steps("loss"), rel=close)
    assert min(one.steps("loss")) < 0.998 * one.steps("loss")[0], "the weights did move"
