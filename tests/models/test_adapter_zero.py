"""Adapters under sharding: any strategy and number of ranks learns the same, and saves it whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.forked import RunPart, finished
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import run_file
from tests.models.adapter_rank import CASES

TOLERANCE = 2e-5
"""Relative; float32 sums in another order."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    output = folder / "record.json"
    run_ranks("tests.models.adapter_rank", [str(output)], world=2, folder=folder)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_learns(record: dict[str, Any], case: str) -> None:
    found = record[case]
    for field in ("loss", "norm"):
        one, many = zip(*found[field], strict=True)
        assert many == pytest.approx(one, rel=TOLERANCE), field
    first, last = found["loss"][0][0], found["loss"][-1][0]
    assert abs(last - first) > 1e-4 * first, "the updates count"
    assert found["adapter"] < 1e-3


def test_frozen_weights_are_whole_only_while_they_are_used(record: dict[str, Any]) -> None:
    assert record["dora"]["shards"] == [0]
    assert record["dora, biases, conv1d, tied"]["shards"] == [0]


def test_a_sharded_run_saves_its_adapter_whole_and_proves_it(tmp_path: Path) -> None:
    path = run_file(
        tmp_path,
        adapter={"r": 4, "dora": True, "targets": ["all-linear", "embed_tokens"]},
        strategy={"name": "zero", "options": {"stage3_param_persistence_threshold": 0}},
        train={"steps": 2, "optimizer": {"lr": 1.0e-2}},
    )
    (run,) = finished([RunPart(file=str(path), overrides=("launch.devices=2",))])
    tensors = load_file(run.folder / "adapter/adapter_model.safetensors")
    assert len(tensors) == 15 * 3, "two factors and a length for each of 15 layers"
    assert all(tensor.numel() and tensor.any() for tensor in tensors.values())
    verified = json.loads((run.folder / "report.json").read_text())["verified"]
    assert verified["reloaded"] and verified["logits"] < 1e-5
    assert verified["effect"] > 1e-3
