"""What ranks read of a model's files, and hold of it on their devices, while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.strategies.materialise import decoder_layers
from tests.helpers.build import model_factory, on_host
from tests.helpers.ranks import run_ranks
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


def loaded(
    folder: Path, model: Path, strategy: str, backend: str, ranks: int = RANKS, **options: Any
) -> list[dict[str, Any]]:
    output = folder / f"{strategy}-{backend}"
    run_ranks(
        "tests.strategies.loading_rank",
        [str(output), str(model), strategy, backend, json.dumps(options)],
        world=ranks,
        folder=folder,
        environment=SIM,
    )
    return [json.loads((folder / f"{output.name}.{r}.json").read_text()) for r in range(ranks)]


def test_each_rank_of_fsdp_reads_its_part_of_the_files(
    model: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, size, layer = model
    whole = size - LAYERS * layer  # embedding and output layer, which a step reads whole
    a_row = 4 * 128  # the widest row of a layer, in bytes
    for rank in loaded(tmp_path, folder, "fsdp", "cpu"):
        assert abs(rank["read"] - whole - LAYERS * layer / RANKS) <= 2 * LAYERS * a_row


def test_each_rank_of_fsdp2_alone_reads_its_part_of_the_files(
    model: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, size, _ = model
    found = loaded(tmp_path, folder, "fsdp", "cpu", gather="step")
    assert [rank["read"] for rank in found] == [size / RANKS] * RANKS


@pytest.mark.slow
def test_ranks_that_hold_everything_read_everything(
    model: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, size, _ = model
    assert [rank["read"] for rank in loaded(tmp_path, folder, "ddp", "cpu")] == [size] * 4


def test_a_card_holds_its_part_of_the_model_and_never_much_more(
    model: tuple[Path, int, int], tmp_path: Path
) -> None:
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    folder, size, layer = model
    factors = 2**16
    for rank in loaded(tmp_path, folder, "fsdp", "sim", gather="step"):
        assert rank["held"] <= 0.26 * size + factors
        assert rank["peak"] <= 0.26 * size + 2 * layer + factors
    whole = size - LAYERS * layer
    for rank in loaded(tmp_path, folder, "fsdp", "sim"):
        in_step = whole + 2 * layer  # and two layers, gathered in turn
        assert rank["held"] <= 0.26 * size + in_step + factors
        assert rank["peak"] <= 0.26 * size + in_step + layer + factors


def whole_on_each(model: Path) -> int:
    """Bytes of what tensor parallelism does not divide: norms and the output layer."""
    config = json.loads((model / "config.json").read_text())
    norms = 2 * config["num_hidden_layers"] + 1
    return 4 * config["hidden_size"] * (norms + config["vocab_size"])


def test_each_rank_of_a_group_reads_its_part_of_every_layer(
    model: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, size, _ = model
    both = whole_on_each(folder)
    read = [rank["read"] for rank in loaded(tmp_path, folder, "ddp", "cpu", 2, tp=2)]
    assert read == [(size - both) / 2 + both] * 2


def test_a_card_holds_its_part_of_every_layer(model: tuple[Path, int, int], tmp_path: Path) -> None:
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    folder, size, layer = model
    for rank in loaded(tmp_path, folder, "ddp", "sim", 2, tp=2):
        factors = 2**17
        assert rank["held"] <= 0.53 * size + factors
        assert rank["peak"] <= 0.53 * size + 2 * layer + factors


def test_each_stage_reads_its_own_layers(model: tuple[Path, int, int], tmp_path: Path) -> None:
    folder, size, _ = model
    read = [rank["read"] for rank in loaded(tmp_path, folder, "ddp", "cpu", 2, pp=2)]
    assert sum(read) == size
    assert max(read) < 0.6 * size


def test_a_card_holds_its_stages(model: tuple[Path, int, int], tmp_path: Path) -> None:
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    folder, size, layer = model
    config = json.loads((folder / "config.json").read_text())
    embedding = 4 * config["vocab_size"] * config["hidden_size"]
    for rank in loaded(tmp_path, folder, "ddp", "sim", 2, pp=2):
        factors = 2**16
        assert rank["held"] <= 0.5 * size + embedding + factors
        assert rank["peak"] <= 0.5 * size + embedding + 2 * layer + factors
