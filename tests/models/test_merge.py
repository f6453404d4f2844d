"""Merging: refused where the result would not be what base and adapter are together."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from anygauge.cli import run as command
from anygauge.config.load import load_run_file
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


def base_of(run: Run) -> Path:
    name = load_run_file(run.folder / "run.yaml").model.name
    assert name is not None
    return Path(name)


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


def test_a_card_names_the_hubs_base_and_its_license(adapter: Run, tmp_path: Path) -> None:
    base = shutil.copytree(base_of(adapter), tmp_path / "base")
    header = "---\nbase_model: owner/name\nlicense: apache-2.0\nlicense_link: [1]\n---\n# It\n"
    (base / "README.md").write_bytes(header.encode() + b"caf\xe9\n")
    path = run_file(
        tmp_path, model={"name": str(base)}, strategy={"name": "single"}, train={"steps": 2}
    )
    card = trained_here(path).folder / "adapter" / "README.md"
    fields = yaml.safe_load(card.read_text().split("---\n")[1])
    assert (fields["base_model"], fields["base_model_relation"]) == ("owner/name", "adapter")
    assert fields["license"] == "apache-2.0" and "license_link" not in fields
    assert str(tmp_path) not in card.read_text()

    card.write_bytes(card.read_bytes() + b"caf\xe9\n")
    merged = tmp_path / "merged"
    assert command(["merge", str(card.parents[1]), "--output", str(merged)]) == 0
    text = (merged / "README.md").read_text()
    assert "license: apache-2.0" in text and "## Training of the adapter" in text


def test_what_a_file_wishes_of_attention_is_dropped(adapter: Run, tmp_path: Path) -> None:
    base = shutil.copytree(base_of(adapter), tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    wish = {"_attn_implementation": "flash_attention_2"}
    (base / "config.json").write_text(json.dumps({**fields, **wish}))
    common: dict[str, Any] = {"strategy": {"name": "single"}, "model": {"name": str(base)}}
    common["train"] = {"steps": 2, "optimizer": {"lr": 2.0e-2}}
    run = trained_here(run_file(tmp_path, **common))
    assert json.loads((run.folder / "report.json").read_text())["verified"]["reloaded"]
    merge(run, tmp_path)
    trained_here(run_file(tmp_path, **common, name="whole", adapter=None))
    asked = ["--prompt", "say", "--max-new-tokens", "2", "--backend", "cpu"]
    assert command(["generate", str(run.folder), *asked]) == 0


@pytest.mark.parametrize("where", ["adapter", "base"])
def test_what_is_not_a_number_is_named(adapter: Run, tmp_path: Path, where: str) -> None:
    folders = {"adapter": adapter.folder / "adapter", "base": base_of(adapter)}
    folders[where] = shutil.copytree(folders[where], tmp_path / where)
    (path,) = folders[where].glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if "down_proj" in name)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    named = rf"tensor '{re.escape(name)}' (of the base )?holds values that are not numbers"
    asked = [str(folders["base"]), "--adapter", str(folders["adapter"])]
    with pytest.raises(ModelError, match=named):
        command(["merge", *asked, "--output", str(tmp_path / "merged")])
    if where == "base":
        changes: dict[str, Any] = {"model": {"name": str(folders["base"])}}
        with pytest.raises(ModelError, match=named):
            trained_here(run_file(tmp_path, **changes, strategy={"name": "single"}))


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
