"""A neutral state goes into every engine and comes out again, to the last bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.strategies.state_rank import CASES, KERNEL, UPDATES, StateCase

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

Folder = Callable[[StateCase], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Where a case's results are; the usual ones are run at once, and so are the slow ones."""
    folders: dict[bool, Path] = {}

    def of(case: StateCase) -> Path:
        slow = case.name in SLOW
        if slow not in folders:
            made = folders[slow] = tmp_path_factory.mktemp("state")
            names = [each.name for each in CASES if (each.name in SLOW) == slow]
            arguments = [str(made), *names]
            run_ranks("tests.strategies.state_rank", arguments, world=1, folder=made)
        return folders[slow]

    return of


def marked(case: StateCase) -> Any:
    return pytest.param(case, marks=pytest.mark.slow) if case.name in SLOW else case


@pytest.mark.parametrize("case", map(marked, CASES), ids=[case.name for case in CASES])
def test_what_went_in_comes_out(case: StateCase, folder: Folder) -> None:
    package = NEEDS.get(case.optimizer)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = folder(case) / f"{case.name}.json"
    assert path.exists(), path.with_name("rank0.log").read_text()[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
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
def test_a_devices_own_update_is_torchs(stage: int, folder: Folder) -> None:
    """From the same made-up state, in parts of flat vectors; but for where epsilon is added."""
    of_torch, of_kernel = (
        StateCase(strategy=f"zero{stage}", ranks=3, optimizer=optimizer, all_weights=True)
        for optimizer in ("adamw", KERNEL)
    )
    moved = [
        torch.load(folder(case) / f"{case.name}.moved.pt", weights_only=True)
        for case in (of_torch, of_kernel)
    ]
    for key, wanted in moved[0].items():
        torch.testing.assert_close(moved[1][key], wanted, rtol=1e-4, atol=1e-6)
