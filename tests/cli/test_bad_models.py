"""Models that cannot be right: one message before any rank starts, and nothing half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from anygauge.cli import run as command
from anygauge.interface import ModelError
from tests.helpers.runs import TINY, run_file
from tests.helpers.tokenizer import make_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(TINY)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def index_without_file(folder: Path) -> None:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = dict.fromkeys(file.keys(), "model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


def index_of_more(folder: Path) -> None:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = dict.fromkeys([*file.keys(), "model.layers.9.mlp.up_proj.weight"], WEIGHTS)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


def config_with(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


USUAL = [
    (cut, r"model\.safetensors cannot be read as weights \(it has .* bytes, its header"),
    (index_without_file, r"names 'model-00001-of-00002\.safetensors', which is not a file"),
    (config_with(hidden_size=16, head_dim=8), r"has shape \(512, 32\).*makes it \(512, 16\)"),
    (config_with(vocab_size=300), r"the tokenizer has 400 tokens, the model only 300 rows"),
]
OTHERS = [
    (index_of_more, r"1 tensors that its files do not have, first 'model\.layers\.9\."),
    (config_with(num_hidden_layers=3), r"9 of the model's 30 parameters have no tensor"),
    (config_with(num_hidden_layers=1), r"9 tensors have no place in a LlamaForCausalLM"),
    (config_with(model_type="no_such"), r"no_such"),
    (half_a_config, r"model\.name: .*not a valid JSON file"),
]


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_each_has_one_message(
    spoilt: Callable[[Path], None],
    said: str,
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spoilt(folder)
    path = run_file(tmp_path, model={"name": str(folder)}, adapter={"r": 4, "targets": ".*q_proj"})
    with pytest.raises(ModelError, match=said):
        command(["train", str(path)])
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not (tmp_path / "out").exists(), "nothing was written"
