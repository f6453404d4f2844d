"""Full weights in part: trained, saved, refused; on ranks: tests/training/test_parity.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.cli import run as command
from anygauge.config.load import load_run_file
from anygauge.interface import AnygaugeError, ModelError, RunFileError
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import optimizer_section
from tests.helpers.runs import check_here, run_file, save_tiny, trained_here

SECOND = r"model\.layers\.1\..*"
PLAIN: dict[str, Any] = {
    "adapter": None,
    "strategy": {"name": "single"},
    "precision": {"param_dtype": "float32"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), {"tie_word_embeddings": request.param})


def file(folder: Path, model: Path | None, train: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    named = {} if model is None else {"model": {"name": str(model)}}
    return run_file(folder, **{**PLAIN, **named, "train": train, **changes})


def test_only_what_matches_is_trained_and_all_is_saved(model: Path, tmp_path: Path) -> None:
    train = {"trainable": [SECOND, r"lm_head\.weight"], "frozen": [r".*norm\.weight"]}
    run = trained_here(file(tmp_path / "run", model, train))
    before = load_file(model / "model.safetensors")
    after = load_file(run.folder / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    found = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    tied = json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    assert ("model.embed_tokens.weight" if tied else "lm_head.weight") in found
    assert all(n.startswith(("model.layers.1.", "lm_head", "model.embed_tokens")) for n in found)
    assert not any("norm" in name for name in found) and len(found) == 8
    report = json.loads((run.folder / "report.json").read_text())
    assert report["verified"]["logits"] < 1e-3


def test_a_run_goes_on_and_another_choice_is_another_run(tmp_path: Path) -> None:
    path = file(tmp_path / "run", None, {"trainable": [SECOND]}, checkpoint={"every": 2})
    whole = trained_here(path)
    resume = {"checkpoint.resume": str(whole.folder / "checkpoints" / "step-00000002")}
    assert trained_here(path, name="on", **resume).steps("loss") == whole.steps("loss")[2:]
    with pytest.raises(AnygaugeError, match=r"train\.trainable"):
        trained_here(path, name="other", **resume, **{"train.trainable": [r".*mlp.*"]})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"trainable": ["model.layer.1.*"]},
            r"trainable\[0\].*matches no parameter.*model\.layers",
        ),
        ({"frozen": ["lm_head"]}, r"frozen\[0\].*matches no parameter.*lm_head\.weight"),
        ({"frozen": [".*"]}, "leave nothing to train"),
    ],
)
def test_expressions_that_choose_nothing_are_refused_before_ranks_start(
    train: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_here(monkeypatch)
    path = file(tmp_path / "run", None, train)
    with pytest.raises(ModelError, match=message):
        command(["train", str(path)])
    assert not (tmp_path / "run" / "out").exists()


def test_a_stage_without_trained_weights_has_an_optimizer() -> None:
    optimizer = optimizer_factory(optimizer_section())([], {})
    optimizer.step()
    assert not optimizer.state


def test_an_adapter_has_no_say_in_it(tmp_path: Path) -> None:
    path = file(tmp_path / "run", None, {"frozen": [SECOND]}, adapter={"r": 4})
    with pytest.raises(RunFileError, match=r"train\.frozen"):
        load_run_file(path)
