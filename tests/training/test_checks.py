"""What the checks before a run find but for refusals, which `tests/cli/test_refusals.py` has."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save

from anygauge.config.load import load_run_file
from anygauge.data import describe_rows, prepare
from anygauge.interface import ModelError
from anygauge.models.adaptable_layers import surely_match
from anygauge.models.model_files import check_weights
from anygauge.models.tokenizer import load_tokenizer
from anygauge.training.checks import Findings
from anygauge.training.run_checks import RunChecks
from tests.helpers.runs import TINY, run_file, save_tiny, trained_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, which no test changes."""
    return save_tiny(tmp_path_factory.mktemp("model"))


def checked(path: Path, **changes: Any) -> Findings:
    return RunChecks(run=load_run_file(path), backend="cpu", **changes).check()


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


def test_rows_are_tokenized_once_and_ranks_say_that_this_run_did_it(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    first = checked(path, id="this")
    run = load_run_file(path)
    tokenizer = load_tokenizer(run.model)

    def of_rank(which: str) -> str:
        return describe_rows(prepare(run.data, tokenizer, run.train.seed, run=which).train)

    assert of_rank("this") == first.data
    assert of_rank("the next").startswith(f"{first.data} (from the cache of ")
    assert "(from the cache of " in checked(path, id="a third").data


def test_whole_weights_of_torchs_own_format(tmp_path: Path, folder: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "model.safetensors").unlink()
    torch.save(load_file(folder / "model.safetensors"), copy / "pytorch_model.bin")
    assert checked(of_folder(tmp_path, copy)).notes == []


def test_only_targets_that_weights_do_not_show_need_the_model(tmp_path: Path, folder: Path) -> None:
    """Building it takes seconds of imports; the usual run does without."""
    shapes = check_weights(folder)

    def sure(**changes: Any) -> bool:
        run = load_run_file(of_folder(tmp_path, folder, adapter=changes))
        assert run.adapter is not None
        return surely_match(run.adapter, shapes)

    assert sure() and sure(targets=["q_proj", "embed_tokens"])
    assert sure(targets=["all-linear", "lm_head"])
    assert not sure(targets=["q_porj"]) and not sure(targets=[".*q_proj"])
    assert not sure(targets=["norm"]), "one dimension is not a layer for an adapter"
    assert not sure(groups=[{"targets": ["q_proj"], "r": 2}])


def test_the_weights_of_an_adapter_to_start_from(tmp_path: Path, folder: Path) -> None:
    first = trained_here(of_folder(tmp_path, folder, name="first", strategy={"name": "single"}))
    weights = first.folder / "adapter/adapter_model.safetensors"
    path = of_folder(tmp_path, folder, adapter={"start_from": str(weights.parent)})
    fields = yaml.safe_load(path.read_text())
    del fields["adapter"]["r"]
    path.write_text(yaml.safe_dump(fields))
    checked(path)
    whole = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 5000\n"
    for content, expected in (
        (whole[:-100], "not fully covered.*is it whole"),
        (pointer, "a Git LFS pointer"),
        (save({"x": torch.zeros(2)}), "29 tensors are missing, .*, first"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=expected):
            checked(path)


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
