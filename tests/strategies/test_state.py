"""A neutral state goes into every engine and comes out again, to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.ranks import on_ranks
from tests.strategies.state_rank import CASES, KERNEL, UPDATES, StateCase, work

NEEDS = {"adamw_8bit": "bitsandbytes"}

SLOW = {
    "hsdp-4-adamw",
    "fsdp-3-lion",
    "tensor-4-adamw",
    "tensor-fsdp-4-adamw",
    "zero0-1-adamw",
    "zero1-1-adamw",
    "zero2-1-adamw",
    "zero3-4-adamw",
    "zero2-3-adamw_8bit",
}

Results = Callable[[StateCase], dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What rank 0 found."""

    @functools.cache
    def of(case: StateCase) -> dict[str, Any]:
        fields, alone = dataclasses.asdict(case), case.strategy != "single"
        found: dict[str, Any] = on_ranks(work, fields, world=case.ranks, alone=alone)[0]
        return found

    return of


def marked(case: StateCase) -> Any:
    return pytest.param(case, marks=pytest.mark.slow) if case.name in SLOW else case


@pytest.mark.parametrize("case", map(marked, CASES), ids=[case.name for case in CASES])
def test_what_went_in_comes_out(case: StateCase, results: Results) -> None:
    package = NEEDS.get(case.optimizer)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = results(case)
    assert found["after_a_step"] == found["tensors"] == found["expected"] > 0
    if case.ranks > 1 and case.strategy != "tensor":
        assert any(size % case.ranks for size in found["sizes"]), "so padding is among the cases"
    if case.optimizer == "adamw_8bit":
        # Codes cannot hold any digits; what they hold comes out as it went in.
        assert not [name for name in found["different"] if name.endswith("parameter")]
        assert found["far"] == []
    else:
        assert found["different"] == []
        # Lion corrects no bias, so it counts no steps.
        assert found["updates"] == (0 if case.optimizer == "lion" else UPDATES)
    assert found["not_stable"] == []
    assert found["goes_on"]
    assert found["moved_by_infinity"] == []
    counted = 0 if case.optimizer == "lion" else UPDATES + 1
    assert case.optimizer == "adamw_8bit" or found["updates_after"] == counted
    assert len(found["moved"]) >= 0.9 * found["tensors"], "a step was made from there"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_devices_own_update_is_torchs(stage: int, results: Results) -> None:
    """From the same made-up state, in parts of flat vectors; but for where epsilon is added."""
    wanted, found = (
        results(StateCase(strategy=f"zero{stage}", ranks=3, optimizer=optimizer, all_weights=True))
        for optimizer in ("adamw", KERNEL)
    )
    for key, value in wanted["third"].items():
        torch.testing.assert_close(
            torch.tensor(found["third"][key]), torch.tensor(value), rtol=1e-4, atol=1e-6
        )
