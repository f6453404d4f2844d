"""Weights: drawn alike everywhere, read whole, in parts or refused, tied where models tie them."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.factory import CausalModelFactory
from anygauge.models.generate import load_for_inference
from anygauge.models.model_files import WeightFiles, is_pickle_refused, surely_fit
from anygauge.strategies.shared.materialize import units
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY


def factory(
    seed: int = 0, name: Path | None = None, adapter: dict[str, Any] | None = None, **changes: Any
) -> CausalModelFactory:
    section = (
        ModelSection(config={**TINY, **changes}, tokenizer="none")
        if name is None
        else ModelSection(name=str(name))
    )
    lora = None if adapter is None else AdapterSection(r=4, **adapter)
    return model_factory(section, lora, attention="sdpa", seed=seed)


def test_a_skeleton_holds_no_weights_but_real_buffers() -> None:
    model = factory().skeleton()
    assert all(p.is_meta for p in model.parameters())
    buffers = dict(model.named_buffers())
    assert buffers and not any(b.is_meta for b in buffers.values())


def test_initial_weights_depend_on_the_seed_alone_and_follow_the_architecture() -> None:
    one, same, other = (dict(on_host(factory(seed)).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one[weight], other[weight])
    assert not torch.equal(one[weight], one[weight.replace("0", "1")]), "layers differ"
    assert one[weight].std().item() == pytest.approx(0.02, rel=0.1)  # Llama's initializer_range
    assert one["model.norm.weight"].eq(1).all()


def test_units_cover_every_parameter_once_children_first() -> None:
    model = factory().skeleton()
    names = [name for name, _ in units(model)]
    assert names == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    covered = [id(p) for _, unit in units(model) for p in unit.parameters()]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())


def test_tied_weights_stay_tied() -> None:
    model: Any = on_host(factory(tie_word_embeddings=True))
    adapted, _ = factory(adapter={}, tie_word_embeddings=True).adapted_on_meta()
    for each in (model, adapted.get_base_model()):
        assert each.lm_head.weight is each.model.embed_tokens.weight


def test_buffers_keep_their_type_in_bfloat16() -> None:
    model = on_host(factory(), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}, "rotary tables need the digits"


class Hostile:
    """Runs a program when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("reader", ["training", "inference"])
def test_a_pickle_that_is_no_plain_weights_is_refused_in_our_own_words(
    tmp_path: Path, reader: str
) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "model"
    factory().config.save_pretrained(folder)
    torch.save({"a": Hostile(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        if reader == "training":
            WeightFiles(folder)
        else:
            load_for_inference(
                ModelSection(name=str(folder)),
                adapter=None,
                device=torch.device("cpu"),
                dtype=torch.float32,
                attention="eager",
            )
    said = "".join(traceback.format_exception(caught.value))
    assert "does not hold plain weights only" in said and "safetensors" in said
    assert str(folder) in said
    assert "weights_only" not in said
    assert not marker.exists()


def test_a_refused_pickle_is_found_below_what_a_library_makes_of_it() -> None:
    def wrapped() -> None:  # as transformers 4.55 does
        try:
            raise pickle.UnpicklingError("advice")
        except Exception as error:
            try:
                raise ValueError("unable to locate") from error
            except ValueError:
                raise OSError("unable to load")  # noqa: B904

    with pytest.raises(OSError) as caught:
        wrapped()
    assert is_pickle_refused(caught.value)
    assert not is_pickle_refused(OSError("disk"))


BINS, INDEX = "pytorch_model.bin", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("README.md", b"", "holds no weights"),
        (BINS, [1, 2], "holds a list; expected tensors by name"),
        (BINS, {"a": 3}, "holds a int under 'a'; expected tensors by name"),
        (INDEX, b"[]", "is not an index of weights"),
        (INDEX, b"[" * 100_000, "is not an index of weights"),
        (INDEX, b'{"weight_map": {"a": "../other.safetensors"}}', "names '../other.safetensors'"),
        (INDEX, b'{"weight_map": {"a": "/dev/zero"}}', "names '/dev/zero'"),
    ],
)
def test_files_that_hold_no_weights_are_refused(
    name: str, content: Any, said: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(ModelError, match=said):
        WeightFiles(tmp_path)


# -- parts of them, and a model that is adapted before it has any ----------------------------------


def halves(name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The second half of the rows; of norms nothing."""
    if len(shape) < 2:
        return None
    return (slice(shape[0] // 2, shape[0]),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    on_host(factory()).save_pretrained(path)
    return path


@pytest.mark.parametrize("stored", [True, False], ids=["files", "drawn"])
def test_a_part_of_the_values_is_a_part_of_them(stored: bool, folder: Path) -> None:
    made = factory(name=folder if stored else None)
    whole, parts = made.skeleton(), made.skeleton()
    seen = 0
    for path, _ in units(whole):
        every = made.values(whole, path)
        some = made.values(parts, path, halves)
        assert some.keys() == {name for name, value in every.items() if value.dim() > 1}
        for name, value in some.items():
            assert torch.equal(value, every[name][value.shape[0] :])
            seen += 1
    assert seen > 10


def test_a_number_by_itself_is_read_too(tmp_path: Path) -> None:
    save_file({"one": torch.tensor(3.0), "two": torch.arange(6.0)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert files.read("one").item() == 3.0
    assert files.lazy_tensor("two").read((slice(2, 4),)).tolist() == [2.0, 3.0]
    assert files.lazy_tensor("two").shape == (6,)


def test_the_adapter_is_real_and_drawn_as_ever_and_the_base_is_on_meta() -> None:
    made = factory(adapter={})
    model, names = made.adapted_on_meta()
    skeleton = {name for name, _ in made.skeleton().named_parameters()}
    assert set(names.values()) == skeleton
    built = on_host(made)
    wanted = dict(made.adapt(built).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == wanted[name].requires_grad
        if name in names:
            assert parameter.is_meta and not parameter.requires_grad
        else:
            assert torch.equal(parameter, wanted[name])
    assert len(wanted) == len(dict(model.named_parameters()))


def test_without_an_adapter_everything_is_on_meta_and_trained() -> None:
    model, names = factory().adapted_on_meta()
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert all(name == inner for name, inner in names.items())


def test_magnitudes_that_need_the_base_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"adapter\.dora"):
        factory(adapter={"dora": True}).adapted_on_meta()


# -- what is known without torch is what the model library builds ----------------------------------

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


def shapes_of(kind: str, **fields: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the library would save them."""
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
