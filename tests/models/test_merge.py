"""Merging: refused where the result would not be what base and adapter are together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anygauge.cli import run as command
from anygauge.interface import ModelError
from anygauge.models.factory import dtype_name
from tests.helpers.runs import Run, run_file, trained_here


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An adapter on a base that is stored in bfloat16."""
    common: dict[str, Any] = {
        "strategy": {"name": "single"},
        "precision": {"param_dtype": "bfloat16"},
        "train": {"steps": 2, "optimizer": {"lr": 2.0e-2}},
    }
    base = trained_here(run_file(tmp_path_factory.mktemp("base"), **common, adapter=None))
    model = {"name": str(base.folder / "model")}
    return trained_here(run_file(tmp_path_factory.mktemp("adapter"), **common, model=model))


def scaled(adapter: Run, folder: Path, factor: float) -> Path:
    """A copy of the adapter whose update is so many times as large."""
    shutil.copytree(adapter.folder / "adapter", folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({n: t * factor if "lora_B" in n else t for n, t in tensors.items()}, path)
    return folder


def merge(adapter: Run, tmp_path: Path, folder: Path | None = None) -> Path:
    output = tmp_path / "merged"
    which = [] if folder is None else ["--adapter", str(folder)]
    assert command(["merge", str(adapter.folder), "--output", str(output), *which]) == 0
    return output


def test_the_merged_model_has_the_bases_type_and_a_card(adapter: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = merge(adapter, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(output, **{dtype_name(): "auto"})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    card = (output / "README.md").read_text()
    assert "library_name: transformers" in card and "merged, in bfloat16, from the base" in card
    assert "## Training of the adapter" in card and "adamw, lr 0.02" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (0.0, "changes nothing"),
        (1e-4, "would be lost when the merged weights are rounded to .* bfloat16"),
    ],
)
def test_an_adapter_without_effect_is_refused(
    adapter: Run, tmp_path: Path, factor: float, message: str
) -> None:
    folder = scaled(adapter, tmp_path / "scaled", factor)
    with pytest.raises(ModelError, match=message):
        merge(adapter, tmp_path, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["scaled"], "nothing was written"


def test_an_adapter_of_another_base_is_told(
    adapter: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scaled(adapter, tmp_path / "other", 1.0)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "owner/other"}))
    merge(adapter, tmp_path, folder)
    assert "names another base: owner/other" in capsys.readouterr().out
