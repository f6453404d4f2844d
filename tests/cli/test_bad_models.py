"""A model that is broken, or another one: one message before ranks start, nothing half written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.interface import ModelError
from tests.helpers.runs import TINY, run_file
from tests.helpers.tokenizer import make_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three files, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sound") / "model"
    fields = {name: value for name, value in TINY.items() if name != "model_type"}
    config = AutoConfig.for_model(TINY["model_type"], **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    make_tokenizer(folder)
    return folder


def first(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def cut(folder: Path) -> None:
    path = first(folder)
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    path = first(folder)
    path.write_bytes(path.read_bytes()[:20])


def index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        fields = json.loads((folder / INDEX).read_text())
        change(fields["weight_map"])
        (folder / INDEX).write_text(json.dumps(fields))

    return broken


def in_another(weights: dict[str, str]) -> None:
    files = sorted(set(weights.values()))
    name = next(name for name in sorted(weights) if weights[name] == files[0])
    weights[name] = files[1]


def config(**changes: Any) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, **changes}))

    return broken


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: bool((folder / name).write_text(text)) and None


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return broken


def another(folder: Path) -> None:
    fields = {
        **{"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 512},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256},
    }
    (folder / "config.json").write_text(json.dumps(fields))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file that was cut": (cut, r"model-00001-.* cannot be read as weights \(it has [\d,]+ bytes"),
    "a header that was cut": (
        cut_header,
        r"model-00001-.* cannot be read as weights .*is it whole",
    ),
    "a file that is missing": (lambda f: first(f).unlink(), r"index\.json names 'model-00001-"),
    "an index of another file": (
        index(in_another),
        r"names 1 tensors that its files do not have, first '.*' in model-00002-",
    ),
    "a tensor that is nowhere": (
        index(lambda weights: weights.update({"no.such": min(weights.values())})),
        r"names 1 tensors that its files do not have, first 'no\.such' in model-0000",
    ),
    "an index that is not JSON": (written(INDEX, "{"), "is not an index of weights"),
    "another architecture": (another, r"parameters have no tensor, first 'gpt_neox"),
    "other sizes": (
        config(hidden_size=64),
        r"tensor model\.embed_tokens\.weight has shape \(512, 32\), but config\.json needs",
    ),
    "more layers": (config(num_hidden_layers=3), r"first 'model\.layers\.2\."),
    "an unknown architecture": (config(model_type="llamma"), r"model\.name: .*model type `llamma`"),
    "a small vocabulary": (
        config(vocab_size=99),
        r"the tokenizer has \d+ tokens, the model only 99",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read"),
    "a configuration that is not JSON": (
        written("config.json", "{ no"),
        r"config\.json cannot be read as JSON \(Expecting property",
    ),
    "a configuration that is a pipe": (
        instead("config.json", os.mkfifo),
        r"config\.json cannot be read as JSON \(it is a named pipe, not a regular file\)",
    ),
    "a configuration without end": (
        instead("config.json", lambda path: path.symlink_to("/dev/zero")),
        r"config\.json cannot be read as JSON \(it is a device or socket",
    ),
    "a configuration of brackets": (
        written("config.json", "[" * 200_000),
        r"config\.json cannot be read as JSON \(nested too deeply\)",
    ),
    "generation settings that are a pipe": (
        instead("generation_config.json", os.mkfifo),
        r"generation_config\.json cannot be read as JSON \(it is a named pipe",
    ),
    "a tokenizer's configuration of brackets": (
        written("tokenizer_config.json", "[" * 200_000),
        r"tokenizer_config\.json cannot be read as JSON \(nested too deeply",
    ),
    "a template that is a pipe": (
        instead("chat_template.jinja", os.mkfifo),
        r"chat_template\.jinja cannot be read: it is not a regular file",
    ),
    "an index that is a pipe": (instead(INDEX, os.mkfifo), "is not an index of weights"),
    "a configuration that is a list": (written("config.json", "[1]"), r"config\.json holds a list"),
    "a tokenizer that is not JSON": (
        written("tokenizer.json", "{"),
        r"model\.tokenizer: no tokenizer could be loaded from .*Give a folder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_ranks_start(
    case: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = CASES[case]
    shutil.copytree(sound, tmp_path / "model")
    change(tmp_path / "model")
    path = run_file(tmp_path, model={"name": str(tmp_path / "model")})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError, match=expected) as caught:
        command(["train", str(path)])
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value) or "rows in its embedding" in str(
        caught.value
    )
    out, err = capsys.readouterr()
    assert out == err == ""
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"


def test_the_sound_one_is_not_refused(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, model={"name": str(sound)})
    assert command(["train", str(path), "--dry-run"]) == 0
    assert "no problem found in model, tokenizer and rows" in capsys.readouterr().out
