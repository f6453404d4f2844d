"""Ten architectures, one of each kind, come through; docs/models.md, which has all, is not old."""

from __future__ import annotations

import json

import pytest

from tests.models.zoo import PAGE, RESULTS, result, tables, unexplained, versions

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
    stack = STORED["stacks"][f"transformers {versions()['transformers']}"]
    row = result(name)
    assert "failed" not in row, row
    assert row == stack["rows"][name]


def test_the_page_is_made_of_the_results_and_names_their_versions() -> None:
    """A release of transformers that is not among them has other models: run `make zoo`."""
    assert f"transformers {versions()['transformers']}" in STORED["stacks"]
    assert PAGE.read_text().endswith("\n".join(tables(STORED)) + "\n")
    for stack in STORED["stacks"].values():
        named = stack["versions"].items()
        assert ", ".join(f"{library} {version}" for library, version in named) in PAGE.read_text()
    assert unexplained(STORED) == []
