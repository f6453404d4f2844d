"""What ranks read of a model's files, and hold of it on their devices, while it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import Backend
from anygauge.models.model_files import LazyTensor
from anygauge.strategies.shared.materialize import decoder_layers
from tests.helpers.build import build_context, model_factory, on_host, rank_of_world, strategy_of
from tests.helpers.run_ranks import on_ranks
from tests.strategies.parity_rank import CONFIG

RANKS = 4
LAYERS = 8
SIM = {"ANYGAUGE_SIM_LOCKS": "", "ANYGAUGE_SIM_CARDS": str(RANKS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """(Folder, bytes of its weights, bytes of one layer.)"""
    made = model_factory({**CONFIG, "num_hidden_layers": LAYERS})
    whole = on_host(made)
    folder = tmp_path_factory.mktemp("model")
    whole.save_pretrained(folder)
    layer = next(iter(decoder_layers(whole)))
    size, of_layer = (4 * sum(p.numel() for p in module.parameters()) for module in (whole, layer))
    return folder, size, of_layer


def held_while_loading(
    backend: Backend, model: str, name: str, options: dict[str, Any]
) -> dict[str, int]:
    """Bytes that this rank read, held after it was built, and held at most."""
    read = [0]

    def counted(self: LazyTensor, part: tuple[Any, ...]) -> torch.Tensor:
        value = self.source[part]
        read[0] += value.numel() * value.element_size()
        return value  # type: ignore[no-any-return]

    strategy, _ = strategy_of(name, options, *rank_of_world())
    factory = model_factory(Path(model), AdapterSection(r=4), attention="sdpa")
    before = backend.placement.memory().in_use
    backend.placement.reset_peak()
    with mock.patch.object(LazyTensor, "read", counted):
        engine = strategy.build(build_context(factory=factory, backend=backend))
    stats = backend.placement.memory()
    engine.close()
    return {"read": read[0], "held": stats.in_use - before, "peak": stats.peak - before}


def loaded(
    model: Path, strategy: str, backend: str, ranks: int = RANKS, **options: Any
) -> list[dict[str, Any]]:
    if backend == "sim":
        pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    given = (str(model), strategy, options)
    return on_ranks(held_while_loading, *given, world=ranks, backend=backend, environment=SIM)


def test_each_rank_of_fsdp_reads_its_part_of_the_files(model: tuple[Path, int, int]) -> None:
    folder, size, layer = model
    whole = size - LAYERS * layer  # embedding and output layer, which a step reads whole
    a_row = 4 * 128  # the widest row of a layer, in bytes
    for rank in loaded(folder, "fsdp", "cpu"):
        assert abs(rank["read"] - whole - LAYERS * layer / RANKS) <= 2 * LAYERS * a_row
    alone = loaded(folder, "fsdp", "cpu", gather="step")
    assert [rank["read"] for rank in alone] == [size / RANKS] * RANKS


@pytest.mark.slow
def test_ranks_that_hold_everything_read_everything(model: tuple[Path, int, int]) -> None:
    folder, size, _ = model
    assert [rank["read"] for rank in loaded(folder, "ddp", "cpu")] == [size] * 4


@pytest.mark.parametrize(
    ("degrees", "most"), [({"tp": 2}, 0.53), ({"pp": 2}, 0.6), ({"tp": 2, "pp": 2}, 0.3)]
)
def test_each_rank_reads_its_layers_or_its_part_of_them(
    degrees: dict[str, int], most: float, model: tuple[Path, int, int]
) -> None:
    folder, size, _ = model
    norms = 2 * LAYERS + 1
    # What tensor parallelism does not divide: norms and the output layer.
    whole = 4 * CONFIG["hidden_size"] * (norms + CONFIG["vocab_size"])
    groups = degrees.get("tp", 1)
    read = [one["read"] for one in loaded(folder, "ddp", "cpu", 2 * len(degrees), **degrees)]
    assert sum(read) == size + (groups - 1) * whole
    assert max(read) <= most * size
    assert read == [rank for rank in read[::groups] for _ in range(groups)]


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "part", "ends", "layers"),
    [
        ("fsdp", RANKS, {"gather": "step"}, 0.26, 0, (0, 2)),
        ("fsdp", RANKS, {}, 0.26, 2, (2, 3)),  # two layers, which are gathered in turn
        ("ddp", 2, {"tp": 2}, 0.53, 0, (0, 2)),
        ("ddp", 2, {"pp": 2}, 0.5, 1, (0, 2)),
        ("ddp", RANKS, {"tp": 2, "pp": 2}, 0.25, 1, (0, 2)),
    ],
)
def test_a_card_holds_its_part_of_the_model_and_never_much_more(
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    part: float,
    ends: int,
    layers: tuple[int, int],
    model: tuple[Path, int, int],
) -> None:
    """A part of all weights, with so many of embedding and output layer, and whole layers."""
    folder, size, layer = model
    end = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    most = part * size + ends * end + 2 ** (17 if "tp" in options else 16)  # and the adapter
    for rank in loaded(folder, strategy, "sim", ranks, **options):
        assert rank["held"] <= most + layers[0] * layer
        assert rank["peak"] <= most + layers[1] * layer
