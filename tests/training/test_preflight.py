"""What is refused before ranks start, each by the function that finds it; no process is started."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from anygauge.cli.intent import read_intent
from anygauge.config.load import load_run_file
from anygauge.config.resolved import run_json
from anygauge.data import described, prepare
from anygauge.interface import (
    AnygaugeError,
    DataError,
    ModelError,
    PluginError,
    RunFileError,
    UnsupportedError,
)
from anygauge.models.files import WeightFiles, check_weights
from anygauge.models.targets import surely_match
from anygauge.models.tokenizer import load_tokenizer
from anygauge.registry import Registry
from anygauge.training.checks import Findings, Question, check_run, check_settings
from anygauge.training.preflight import failed, misses_torch
from tests.helpers.runs import TINY, run_file, trained_here
from tests.helpers.tokenizer import make_tokenizer

HIDDEN, INNER = 32, 64


def llama_weights() -> dict[str, Any]:
    """Tensors of a model of the sizes of TINY, with one layer."""
    shapes = {
        "model.embed_tokens.weight": (512, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (512, HIDDEN),
    }
    layer = {
        **{f"self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qo"},
        **{f"self_attn.{n}_proj": (HIDDEN // 2, HIDDEN) for n in "kv"},
        **{f"mlp.{n}_proj": (INNER, HIDDEN) for n in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    save_file(llama_weights(), folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(sound_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_folder, tmp_path / "model"))


def checked(path: Path, **changes: Any) -> Findings:
    run = load_run_file(path).run
    question = Question(run=run_json(run), backend="cpu", world_size=1)
    return check_run(replace(question, **changes), run)


def of_folder(tmp_path: Path, folder: Path, **changes: Any) -> Path:
    return run_file(tmp_path, model={"name": str(folder)}, **changes)


def test_a_sound_model_folder_and_its_rows(tmp_path: Path, folder: Path) -> None:
    found = checked(of_folder(tmp_path, folder, adapter={"targets": ["q_proj", "v_proj"]}))
    assert (found.notes, found.advice) == ([], "")
    assert found.data.startswith("40 of 40 rows; ")


@pytest.mark.parametrize("length", [{"steps": 5}, {"steps": None, "epochs": 0.5}], ids=str)
def test_a_dry_run_says_that_the_peak_is_never_reached(
    tmp_path: Path, folder: Path, length: dict[str, Any]
) -> None:
    def found(warmup: int) -> str:
        train = {**length, "schedule": {"warmup_steps": warmup}}
        return checked(of_folder(tmp_path, folder, train=train), engine=True).advice

    assert "rises during all 5 steps" in found(5) and "at most 4" in found(5)
    assert found(4) == ""


def test_rows_are_tokenised_once_and_ranks_say_that_this_run_did_it(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    first = checked(path, id="this")
    run = load_run_file(path).run
    tokenizer = load_tokenizer(run.model)

    def of_rank(which: str) -> str:
        return described(prepare(run.data, tokenizer, run.train.seed, run=which).train)

    assert of_rank("this") == first.data
    assert of_rank("the next").startswith(f"{first.data} (from the cache of ")
    assert "(from the cache of " in checked(path, id="a third").data


SIZES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": -4}, "-4"),
    ({"hidden_size": "many"}, "many"),
    ({"vocab_size": 0}, "vocab_size is 0; it must be a whole number from 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"model_type": "lama"}, "lama"),
]
"""The run file's own sizes are checked with it; those of a folder's config.json here."""


@pytest.mark.parametrize(("change", "expected"), SIZES, ids=str)
def test_configurations_that_cannot_be(
    change: dict[str, Any], expected: str, tmp_path: Path, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(ModelError, match=expected) as error:
        checked(of_folder(tmp_path, folder))
    assert str(folder) in str(error.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path, folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded from .*Give a folder"):
        checked(of_folder(tmp_path, folder))


def test_a_folder_without_weights(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        checked(of_folder(tmp_path, folder))


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def misname(folder: Path) -> None:
    index = {"weight_map": {"model.norm.wieght": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def page(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<html>not found</html>")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut, "it has 5,000 bytes, but its header needs"),
        (lose_a_shard, "names 'model-00001-of-00002.safetensors', but its folder has no such file"),
        (misname, "names 1 tensors that its files do not have, first 'model.norm.wieght'"),
        (no_index, "is not an index of weights"),
        (page, "cannot be read as weights"),
    ],
)
def test_weights_that_are_not_whole(damage: Any, expected: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=expected):
        check_weights(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 5000\n"


def archive(new: bool = True) -> bytes:
    written = io.BytesIO()
    weights = {"model.norm.weight": torch.zeros(2000)}
    torch.save(weights, written, _use_new_zipfile_serialization=new)
    return written.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("pytorch_model.bin", archive()[:5000], r"pytorch_model\.bin .*it was cut"),
        (
            "pytorch_model.bin",
            POINTER,
            "a Git LFS pointer, not the file itself",
        ),
        ("pytorch_model.bin", archive(new=False), "since 1.6, but of an older torch"),
        ("pytorch_model.bin", b"<html>not found</html>", "since 1.6. Compare"),
        (
            "model.safetensors",
            POINTER,
            "a Git LFS pointer, not the file itself",
        ),
    ],
    ids=["cut", "pointer", "old", "page", "pointer of safetensors"],
)
def test_the_first_bytes_of_weights(
    name: str, content: bytes, expected: str, tmp_path: Path, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=expected):
        checked(of_folder(tmp_path, folder))
    with pytest.raises(ModelError, match="cannot be read as weights"):
        WeightFiles(folder)  # and ranks refuse it


def test_whole_weights_of_torchs_own_format(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(archive())
    assert checked(of_folder(tmp_path, folder)).notes == []


def test_a_tokenizer_of_another_model(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ModelError, match="the model only 100 rows in its embedding"):
        checked(of_folder(tmp_path, folder))


def test_rows_longer_than_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"max_length is 300.*set it to at most 256"):
        checked(run_file(tmp_path, data={"max_length": 300}))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_porj"], "no layer is called 'q_porj'; did you mean 'q_proj'.*down_proj"),
        ("model.*q_porj", "matches no layer.*layers here: down_proj"),
        (["input_layernorm"], "is a LlamaRMSNorm"),
    ],
)
def test_targets_that_match_nothing(
    targets: Any, expected: str, tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(ModelError, match=expected):
        checked(of_folder(tmp_path, folder, adapter={"targets": targets}))


def test_only_targets_that_weights_do_not_show_need_the_model(tmp_path: Path, folder: Path) -> None:
    """Building it takes seconds of imports; the usual run does without."""
    shapes = check_weights(folder)

    def sure(**changes: Any) -> bool:
        run = load_run_file(of_folder(tmp_path, folder, adapter=changes)).run
        assert run.adapter is not None
        return surely_match(run.adapter, shapes)

    assert sure() and sure(targets=["q_proj", "embed_tokens"])
    assert sure(targets=["all-linear", "lm_head"])
    assert not sure(targets=["q_porj"]) and not sure(targets=[".*q_proj"])
    assert not sure(targets=["norm"]), "one dimension is not a layer for an adapter"
    assert not sure(groups=[{"targets": ["q_proj"], "r": 2}])


def test_weights_of_another_architecture(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    path = of_folder(tmp_path, folder, adapter={"targets": ".*q_proj"})
    with pytest.raises(ModelError, match="9 of the model's 21 parameters have no tensor"):
        checked(path)


def test_an_adapter_to_start_from_that_is_none(tmp_path: Path) -> None:
    path = run_file(tmp_path, adapter={"start_from": str(tmp_path)})
    text = yaml.safe_load(path.read_text())
    del text["adapter"]["r"]
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(ModelError, match=r"is not an adapter folder: adapter_config.json"):
        checked(path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "but its header needs"),
        (lambda path: path.write_bytes(POINTER), "a Git LFS pointer"),
        (lambda path: save_file({"x": np.zeros(2, "f4")}, path), "14 tensors are missing, first"),
    ],
    ids=["cut", "pointer", "other names"],
)
def test_the_weights_of_an_adapter_to_start_from(
    damage: Any, expected: str, tmp_path: Path, folder: Path
) -> None:
    first = trained_here(of_folder(tmp_path, folder, name="first", strategy={"name": "single"}))
    start = first.folder / "adapter"
    path = of_folder(tmp_path, folder, adapter={"start_from": str(start)})
    fields = yaml.safe_load(path.read_text())
    del fields["adapter"]["r"]
    path.write_text(yaml.safe_dump(fields))
    checked(path)
    damage(start / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=expected):
        checked(path)


def test_only_a_missing_torch_leaves_the_checks_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert failed(missing)["event"] == "refused"  # it is installed, so the error is another
    monkeypatch.setattr("anygauge.training.preflight.find_spec", lambda name: None)
    assert failed(missing) == {"event": "unchecked", "message": "torch is not installed here"}
    other = failed(KeyError("layers"))
    assert (other["event"], other["error"]) == ("refused", "AnygaugeError")
    assert other["message"] == "the checks before the run failed: KeyError: 'layers'"


def chats(tmp_path: Path) -> dict[str, Any]:
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    rows = tmp_path / "chats.jsonl"
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 8)
    return {"train": {"path": str(rows)}}


def test_chats_without_a_template(tmp_path: Path) -> None:
    path = run_file(tmp_path, data=chats(tmp_path))
    with pytest.raises(ModelError, match=r"no chat template.*data.chat_template"):
        checked(path)


def test_a_template_of_the_tokenizer_that_is_not_valid(tmp_path: Path) -> None:
    path = run_file(tmp_path, data=chats(tmp_path))
    settings = tmp_path / "tokenizer/tokenizer_config.json"
    fields = json.loads(settings.read_text())
    settings.write_text(json.dumps({**fields, "chat_template": "{% for turn in %}"}))
    with pytest.raises(RunFileError, match="the tokenizer's chat template, line 1: not a valid"):
        checked(path)


def test_rows_that_are_all_too_long_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 40 rows of .*too long for data.max_length 4"):
        checked(run_file(tmp_path, data={"max_length": 4, "too_long": "drop"}))
    rows = tmp_path / "empty.jsonl"
    rows.write_text('{"prompt": "a", "completion": ""}\n' * 8)
    with pytest.raises(DataError, match="8 with nothing to learn"):
        checked(run_file(tmp_path, data={"train": {"path": str(rows)}}))


def test_what_machines_without_these_files_find_out_themselves(tmp_path: Path) -> None:
    model = {"name": "/there/model"}
    path = run_file(tmp_path, model=model, data={"train": {"path": "/there/rows.jsonl"}})
    found = checked(path, has_files=False)
    assert "/there/model is not on this machine" in found.notes[0]
    assert found.notes[1].startswith("the ranks will check tokenizer and rows")
    with pytest.raises(ModelError, match="no such folder: /there/model"):
        checked(path)
    tokenizer = str(tmp_path / "tokenizer")
    path = run_file(tmp_path, model={**model, "tokenizer": tokenizer})
    assert "the ranks will read the rows" in checked(path, has_files=False).notes[-1]
    wrong = {"config": {**TINY, "vocab_size": 99}, "tokenizer": tokenizer}
    with pytest.raises(ModelError, match="the model only 99 rows"):
        checked(run_file(tmp_path, model=wrong), has_files=False)


def test_a_model_of_the_hub_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", connect)
    found = checked(run_file(tmp_path, model={"name": "nobody/no-such-model"}))
    assert "neither a folder on this machine nor among its copies from the hub" in found.notes[0]
    assert len(found.notes) == 2 and not found.data


SETTINGS: list[tuple[dict[str, Any], type[AnygaugeError], str]] = [
    ({"kernels": {"rms_norm": "nope"}}, PluginError, "'nope'.*valid names"),
    ({"kernels": {"softmacks": "x"}}, PluginError, "no operation 'softmacks'"),
    (
        {"kernels": {"attention": "reference"}, "model": {"attention": "eager"}},
        UnsupportedError,
        "one of them must be left out",
    ),
]
STRATEGIES: list[tuple[dict[str, Any], type[AnygaugeError], str]] = [
    (
        {"strategy": {"name": "zero", "options": {"cpu_offload": True}}},
        UnsupportedError,
        r"strategy\.offload: optimizer",
    ),
    (
        {"strategy": {"name": "single", "options": {"a": 1}}},
        RunFileError,
        "strategy.options: strategy 'single' has no such field; it is a field of strategy 'zero'",
    ),
    (
        {"strategy": {"name": "zero", "stage": 0}, "precision": {"param_dtype": "bfloat16"}},
        UnsupportedError,
        "Set precision.reduce_dtype",
    ),
]


@pytest.mark.parametrize(("changes", "error", "expected"), SETTINGS, ids=str)
def test_settings_that_ranks_would_refuse(
    changes: dict[str, Any], error: type[AnygaugeError], expected: str, tmp_path: Path
) -> None:
    model = {"config": TINY, "tokenizer": str(tmp_path), **changes.pop("model", {})}
    run = load_run_file(run_file(tmp_path, model=model, **changes)).run
    registry = Registry.load()
    backend = registry.create_backend("cpu", {})
    with pytest.raises(error, match=expected):
        check_settings(run, backend, registry, ranks_run_here=True)


@pytest.mark.parametrize(("changes", "error", "expected"), STRATEGIES, ids=str)
def test_a_strategy_that_ranks_would_refuse_is_refused_when_the_run_is_read(
    changes: dict[str, Any], error: type[AnygaugeError], expected: str, tmp_path: Path
) -> None:
    path = run_file(tmp_path, **changes)
    with pytest.raises(error, match=expected):
        read_intent(path, (), {}, need_device=False)


def test_the_usual_run_is_checked_without_torch(tmp_path: Path) -> None:
    """torch, and what the model library imports with it, would be most of the cost."""
    run = load_run_file(run_file(tmp_path)).run
    question = Question(run=run_json(run), backend="cpu", world_size=1)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "anygauge.training.preflight"],
        input=json.dumps(asdict(question)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["event"] == "checked" and last["found"]["data"].startswith("40 of 40 rows")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "transformers" in imported
    assert not imported & {"torch", "peft", "accelerate", "deepspeed", "datasets"}


IN_NEED = """
from anygauge.interface import ModelError
from anygauge.training import checks, preflight

def load_config(section):
    try:
        import torch
    except ImportError as error:
        raise ModelError("model.name: it needs PyTorch") from error

checks.load_config = load_config
preflight.main()
"""


@pytest.mark.slow
def test_a_model_that_needs_torch_even_for_its_configuration_is_checked_with_it(
    tmp_path: Path,
) -> None:
    """What only the hidden torch explains is never a refusal: the process begins anew."""
    run = load_run_file(run_file(tmp_path)).run
    question = Question(run=run_json(run), backend="cpu", world_size=1)
    done = subprocess.run(
        [sys.executable, "-c", IN_NEED],
        input=json.dumps(asdict(question)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    names = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert names == ["part", "part", "part", "checked"], done.stderr


def test_what_the_hidden_torch_may_explain() -> None:
    def caused(cause: Exception) -> ModelError:
        try:
            raise ModelError("no") from cause
        except ModelError as error:
            return error

    assert misses_torch(caused(ImportError("x")))
    assert misses_torch(ModelError("AutoX requires the PyTorch library"))
    assert not misses_torch(caused(ValueError("hidden_size")))


def test_weights_in_a_format_that_is_not_read(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    said = r"'gptq'.*Use the model that these weights were made from"
    with pytest.raises(UnsupportedError, match=said):
        checked(of_folder(tmp_path, folder))
