"""What is known of the plainest architectures without torch is what the model library builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.models.plain import surely_fit

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


def shapes_of(kind: str, **fields: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the library would save them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **fields))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_they_fit_as_the_library_builds_them_and_in_no_other_way(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    def fit(shapes: dict[str, tuple[int, ...]] | None, **changes: Any) -> bool:
        fields = {"model_type": kind, "tie_word_embeddings": tied, **SIZES, **changes}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return surely_fit(tmp_path, shapes)

    shapes = shapes_of(kind, tie_word_embeddings=tied)
    assert fit(shapes)
    for name in shapes:
        assert not fit({key: value for key, value in shapes.items() if key != name}), name
        assert not fit({**shapes, name: (3, *shapes[name])}), name
    assert not fit({**shapes, "one.more": (1,)})
    assert not fit(None)
    for field, value in SIZES.items():
        assert not fit(shapes, **{field: value * 2}), field
    assert not fit(shapes, model_type="gemma") and not fit(shapes, attention_bias=True)
    for odd in (None, "2", [2], 0):
        assert not fit(shapes, num_attention_heads=odd)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{ no", '{"model_type": "llama"}'])
def test_a_configuration_that_is_none_is_left_to_who_reads_it(text: str, tmp_path: Path) -> None:
    assert not surely_fit(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    assert not surely_fit(tmp_path, {})
