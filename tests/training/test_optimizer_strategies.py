"""One optimizer, whatever the strategy: equal losses where it sees matrices or flat vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks

Results = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("optimizers")
    output = folder / "results.json"
    run_ranks("tests.training.optimizer_rank", [str(output)], world=1, folder=folder)
    found: Results = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stage 0", "stage 1", "stage 3"])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "lion", "sgd"])
def test_same_losses(name: str, strategy: str, results: Results) -> None:
    single, spread = results[name]["single"], results[name][strategy]
    # Flat vectors are long enough for codes of 8 bits, the small model's factors are not.
    close = 2e-3 if name == "adamw_8bit" and strategy != "stage 0" else 2e-5
    assert spread["losses"] == pytest.approx(single["losses"], rel=close)
    assert min(single["losses"]) < 0.995 * single["losses"][0], "the weights did move"
    assert spread["rates"] == single["rates"], "LoRA+ and decay survive the engine"
    assert [scale for _, scale, _ in spread["rates"]] == [1.0, 4.0]


@pytest.mark.slow
def test_moments_of_8_bits_also_in_flat_vectors(results: Results) -> None:
    for strategy in ("stage 1", "stage 3"):
        assert "torch.uint8" in results["adamw_8bit"][strategy]["bits"]


@pytest.mark.slow
def test_adafactor_trains_on_matrices_and_refuses_flat_vectors(results: Results) -> None:
    found = results["adafactor"]
    assert found["stage 0"]["losses"] == pytest.approx(found["single"]["losses"], rel=2e-5)
    assert found["single"]["losses"][-1] < found["single"]["losses"][0]
    for strategy in ("stage 1", "stage 3"):
        assert "flat vectors" in found[strategy]["error"]
