"""Adapters under sharding are saved whole; what ranks learn is in the matrix of strategies."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import run_file


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
