"""A neutral state goes into every engine and comes out again, to the last bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.strategies.state_rank import CASES, UPDATES, Case

NEEDS = {"adamw_8bit": "bitsandbytes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    run_ranks("tests.strategies.state_rank", [str(folder)], world=1, folder=folder, timeout_s=900)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_went_in_comes_out(case: Case, folder: Path) -> None:
    package = NEEDS.get(case.optimizer)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = folder / f"{case.name}.json"
    assert path.exists(), (folder / "rank0.log").read_text()[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["tensors"] == found["expected"] > 0
    if case.ranks > 1:
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
