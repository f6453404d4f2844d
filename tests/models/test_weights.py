"""Weights: drawn alike everywhere, read whole or refused, tied where the model ties them."""

from __future__ import annotations

import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.factory import CausalModelFactory
from anygauge.models.files import WeightFiles, is_pickle_refused
from anygauge.models.generate import load_for_inference
from anygauge.strategies.shared.materialise import units
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY


def factory(seed: int = 0, name: Path | None = None, **changes: Any) -> CausalModelFactory:
    section = (
        ModelSection(config={**TINY, **changes}, tokenizer="none")
        if name is None
        else ModelSection(name=str(name))
    )
    return model_factory(section, attention="sdpa", seed=seed)


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
    assert model.lm_head.weight is model.model.embed_tokens.weight


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


SAFETENSORS, BINS, INDEX = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("README.md", b"", "holds no weights"),
        (SAFETENSORS, b"\x10\x00", "is it whole"),
        (BINS, b"junk", r"not an archive as torch has written it since 1\.6"),
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
