"""Weights in the layout that publishers use: read as transformers reads them, and written so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.generate import load_for_inference
from anygauge.models.model_files import LazyTensor, WeightFiles
from tests.helpers.build import model_factory, on_host
from tests.models.families import FAMILIES, SIZES, as_fp8_blocks, as_mxfp4, saved

pytest.importorskip("transformers.core_model_loading", reason="since transformers 5")

HOST = torch.device("cpu")


def by_transformers(folder: Path) -> Any:
    section = ModelSection(name=str(folder))
    return load_for_inference(
        section, adapter=None, device=HOST, dtype=torch.float32, attention="eager"
    )


def check_equal_logits(model: Any, folder: Path) -> None:
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        expected = by_transformers(folder)(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.01, "something to compare"
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_own_loading(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    check_equal_logits(on_host(model_factory(folder)).eval(), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_has_the_published_form(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    made = model_factory(folder)
    state = made.export(dict(on_host(made).named_parameters()), torch.float32)
    files = load_file(folder / "model.safetensors")
    assert state.keys() == files.keys()
    assert all(torch.equal(state[name], value) for name, value in files.items())
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values()), "no views"


def test_a_model_with_new_weights_is_published_in_the_usual_form(tmp_path: Path) -> None:
    files = load_file(saved("mixtral", tmp_path) / "model.safetensors")
    config = {"model_type": "mixtral", **SIZES, **FAMILIES["mixtral"]}
    made = model_factory(config)
    assert made.export(dict(on_host(made).named_parameters()), torch.float32).keys() == files.keys()


def test_files_in_the_models_own_form_are_read_too(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    by_transformers(folder).save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in WeightFiles(folder).names())
    check_equal_logits(on_host(model_factory(folder)).eval(), folder)


@pytest.mark.parametrize(
    ("family", "as_published"), [("gpt_oss", as_mxfp4), ("deepseek_v3", as_fp8_blocks)]
)
def test_formats_of_few_bits_become_plain_numbers(
    family: str, as_published: Any, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path)
    plain = WeightFiles(folder).names()
    as_published(folder)
    assert WeightFiles(folder).names() != plain
    made = model_factory(folder)
    model = on_host(made).eval()
    check_equal_logits(model, folder)
    assert made.export(dict(model.named_parameters()), torch.float32).keys() == plain
    assert not hasattr(made.config, "quantization_config"), "what is saved is plain"


def test_of_experts_only_the_part_that_is_asked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model_factory(saved("qwen3_moe", tmp_path))
    read: list[tuple[int, ...]] = []
    usual = LazyTensor.read

    def counted(lazy: LazyTensor, part: tuple[Any, ...]) -> Any:
        value = usual(lazy, part)
        read.append(tuple(value.shape))
        return value

    monkeypatch.setattr(LazyTensor, "read", counted)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    value = made.weights().values([name])[name]
    assert value.shape == (4, 32, 32)
    half = value.read((slice(1, 3), slice(0, 8)))
    assert read == [(16, 32)] * 4, "gate and up of two experts"
    assert torch.equal(half, value.read((...,))[1:3, :8])


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The folder with tensors added, replaced or (None) left out."""
    state = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: value for name, value in state.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"lm_head.weight": None}, r"1 of the model's \d+ parameters .*'lm_head\.weight'"),
        ({"score.weight": torch.zeros(2, 32)}, r"1 tensors have no place .*'score\.weight'"),
        ({EXPERT: None}, r"experts\.gate_up_proj cannot be made from .* and 6 more"),
        ({EXPERT: torch.zeros(3, 32)}, r"experts\.gate_up_proj cannot be made from"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \(3,\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tensors: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = changed(saved("mixtral", tmp_path), **tensors)
    with pytest.raises(ModelError, match=said):
        on_host(model_factory(folder))


def test_too_few_experts_in_every_layer_are_a_wrong_shape(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    last = {name: None for name in WeightFiles(folder).names() if ".experts.3." in name}
    with pytest.raises(ModelError, match=r"gate_up_proj has shape \(3, 64, 32\).*\(4, 64, 32\)"):
        model_factory(changed(folder, **last)).weights().check_shapes()


def test_a_tied_tensor_may_be_there_twice_if_both_are_equal(tmp_path: Path) -> None:
    folder = saved("gemma3_text", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    changed(folder, **{"lm_head.weight": embedding.clone()})
    check_equal_logits(on_host(model_factory(folder)).eval(), folder)
    changed(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        on_host(model_factory(folder))
