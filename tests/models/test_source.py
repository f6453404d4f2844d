"""Configurations that no model is made of: one message each, with what is meant or missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.sections import ModelSection
from anygauge.interface import Collectives, ModelError
from anygauge.models import source
from anygauge.models.source import check_one_commit, check_written, load_config

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


def made(**fields: Any) -> ModelSection:
    return ModelSection(config=fields, tokenizer="none")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama", "model.config: model type `lama` .*did you mean llama or "),
        ("Qwen22", "model.config: model type `Qwen22` .*did you mean qwen2 or "),
        ("0", "model type `0` is not known to transformers"),
    ],
)
def test_a_misspelt_architecture_gets_its_neighbours_and_an_unheard_of_one_no_guess(
    name: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        load_config(made(model_type=name, hidden_size=64))
    assert len(str(caught.value)) < 300, "not all that there are"
    assert ("did you mean" in str(caught.value)) == (name != "0")


def test_a_file_without_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ModelError, match=r"its config.json has no model_type, such as llama"):
        load_config(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (("hidden_size",), r"model.config: does not set hidden_size; transformers .* 4096, .*it"),
        (("hidden_size", "num_hidden_layers"), r"not set hidden_size or num_hidden_layers; .*them"),
    ],
)
def test_a_plan_takes_no_sizes_of_another_model(left_out: tuple[str, ...], expected: str) -> None:
    section = made(**{key: value for key, value in LLAMA.items() if key not in left_out})
    with pytest.raises(ModelError, match=expected):
        check_written(section, load_config(section))


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA,
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2},
        {"model_type": "gemma3", "text_config": {"hidden_size": 64}},
    ],
)
def test_sizes_by_another_name_or_in_a_section_are_written(fields: dict[str, Any]) -> None:
    section = made(**fields)
    check_written(section, load_config(section))


class OtherMachine(Collectives):
    """Another rank's machine has copies of these commits."""

    def __init__(self, *commits: str) -> None:
        super().__init__("cpu")
        self.commits = commits

    def gather_objects(self, value: Any) -> list[Any]:
        theirs = [
            f"{v.partition(' in ')[0]} in {c}" for v, c in zip(value, self.commits, strict=True)
        ]
        return [value, theirs]


@pytest.mark.parametrize(
    ("commits", "said"),
    [(("dec0de", "c0ffee"), "some/model in dec0de"), (("c0ffee", "dec0de"), "their/words in dec0")],
)
def test_machines_with_different_copies_of_a_model_or_tokenizer_are_refused(
    commits: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = ModelSection(name="some/model", tokenizer="their/words")
    monkeypatch.setattr(source, "needed_copy", lambda *_: tmp_path / "snapshots" / "c0ffee")
    check_one_commit(section, OtherMachine("c0ffee", "c0ffee"))
    with pytest.raises(ModelError, match=f"rank 0 has some/model in c0ffee, .* rank 1 .*{said}"):
        check_one_commit(section, OtherMachine(*commits))
