"""A model that is adapted before it has weights, and weights of which a rank reads a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.interface import UnsupportedError
from anygauge.models.files import WeightFiles
from anygauge.strategies.shared.materialise import units
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY


def described(**changes: Any) -> ModelSection:
    return ModelSection(config={**TINY, **changes}, tokenizer="none")


def halves(name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The second half of the rows; of norms nothing."""
    if len(shape) < 2:
        return None
    return (slice(shape[0] // 2, shape[0]),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    on_host(model_factory(described())).save_pretrained(path)
    return path


@pytest.mark.parametrize("stored", [True, False], ids=["files", "drawn"])
def test_a_part_of_the_values_is_a_part_of_them(stored: bool, folder: Path) -> None:
    section = ModelSection(name=str(folder)) if stored else described()
    made = model_factory(section)
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
    from safetensors.torch import save_file

    save_file({"one": torch.tensor(3.0), "two": torch.arange(6.0)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert files.read("one").item() == 3.0
    assert files.lazily("two").read((slice(2, 4),)).tolist() == [2.0, 3.0]
    assert files.lazily("two").shape == (6,)


def test_the_adapter_is_real_and_drawn_as_ever_and_the_base_is_on_meta() -> None:
    made = model_factory(described(), AdapterSection(r=4))
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


def test_tied_weights_stay_one() -> None:
    made = model_factory(described(tie_word_embeddings=True), AdapterSection(r=4))
    model, _ = made.adapted_on_meta()
    base = model.get_base_model()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight


def test_without_an_adapter_everything_is_on_meta_and_trained() -> None:
    model, names = model_factory(described()).adapted_on_meta()
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert all(name == inner for name, inner in names.items())


def test_magnitudes_that_need_the_base_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"adapter\.dora"):
        model_factory(described(), AdapterSection(r=4, dora=True)).adapted_on_meta()
