"""Ten architectures, one of each kind, come through; docs/models.md, which has all, is not old."""

from __future__ import annotations

import json

import pytest

from tests.models.zoo import PAGE, RESULTS, failures, results, tables, unexplained, versions
from tests.models.zoo_configs import condensed

STORED = json.loads(RESULTS.read_text())
KINDS = {
    "bamba": "state-space layers beside attention",
    "bart": "the decoder of an encoder and a decoder",
    "bert": "an encoder that is made a decoder; its logits are its own",
    "bloom": "no positions but in the attention's bias",
    "deepseek_v2": "latent attention; routed experts and shared ones",
    "gemma3": "a part for text in a whole of several; its vocabulary is that of the part",
    "gpt2": "weights that are stored transposed",
    "gpt_oss": "experts in one tensor, with biases; sinks in its attention",
    "mamba": "no attention",
    "mixtral": "experts that are converted where they are loaded",
}


@pytest.mark.parametrize("name", KINDS)
def test_one_of_each_kind_comes_through(name: str) -> None:
    ((_, row),) = results([name])
    assert failures(row) == {}
    assert row["loads"] == "equal"
    stack = STORED["stacks"][f"transformers {versions()['transformers']}"]
    stored = stack["rows"][name]
    assert (row["attention"], row["loss"]) == (stored["attention"], stored["loss"])


def test_the_page_names_the_versions_that_it_was_made_with() -> None:
    """A release of transformers that is not among them has other models: run `make zoo`."""
    text = PAGE.read_text()
    for name, stack in STORED["stacks"].items():
        made_with = stack["versions"]
        assert name == f"transformers {made_with['transformers']}"
        assert ", ".join(f"{library} {version}" for library, version in made_with.items()) in text
    assert f"transformers {versions()['transformers']}" in STORED["stacks"]
    assert text.endswith("\n".join(tables(STORED)) + "\n")


def test_every_failure_names_a_limit() -> None:
    assert unexplained(STORED) == []


def test_what_training_fails_of_is_told_once() -> None:
    row = {"loads": "equal", "single": {"failed": "a"}, "zero": {"failed": "a"}}
    assert failures(row) == {"single": "a"}
    assert failures({"loads": {"failed": "b"}, "single": {"failed": "b"}}) == {"loads": "b"}


def test_a_tiny_model_has_layers_of_each_kind() -> None:
    assert condensed(["s", "s", "f", "s"], 2) == ["s", "f"]
    assert condensed(["f"] * 4, 2) == ["f", "f"]
