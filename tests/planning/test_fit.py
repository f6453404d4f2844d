"""A run held against a card and its machine; the arithmetic that says which run needs no plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.interface import Card
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.fit import BUFFERS, PROCESS, RESERVED, SLACK, Fit, fit, most_bytes, on_disk
from anygauge.planning.machines import Machine
from tests.helpers.runs import TINY
from tests.planning.standins import memory, run

GIB = 2**30
CARD = Card(name="square", memory=40 * GIB, reserved=GIB)
BOX = Machine(name="eight", card="square", cards=8)
STEP = 20 * GIB
SHARED = 8 * (PROCESS + round(1.05 * 10 * GIB))
"""What eight ranks need of a host with 10 GiB each."""


def held(step: int, card: Card = CARD, ranks: int = 8, host: int | None = None, **on: Any) -> Fit:
    """A run on cards of one machine; `on` says which, and what is on its disk."""
    found = fit(memory(step, host), card, ranks, ranks, **on)
    assert found is not None
    return found


def test_slack_context_and_collectives_come_on_top() -> None:
    found = held(STEP)
    assert (found.phase, found.tensors) == ("backward", STEP)
    assert found.needs == STEP + round(SLACK * STEP) + GIB + BUFFERS
    assert found.free == 40 * GIB - found.needs == found.margin
    assert found.fits and found.phases["backward"] == found.needs
    assert found.phases["load"] == STEP // 4 + round(SLACK * STEP / 4) + GIB + BUFFERS
    assert held(STEP, Card(name="square", memory=40 * GIB), 1).fixed == RESERVED
    lacks = held(80 * GIB, ranks=1)
    assert not lacks.fits and lacks.margin == lacks.free
    assert lacks.shortages == {"memory": lacks.needs - 40 * GIB}


@pytest.mark.parametrize(
    ("has", "lacking"),
    [(SHARED - 1, {"host memory": 1}), (SHARED, {}), (None, {})],  # not known: refuses nothing
)
def test_ranks_share_the_host(has: int | None, lacking: dict[str, int]) -> None:
    found = held(STEP, host=10 * GIB, machine=replace(BOX, host_memory=has))
    assert found.free > 0 and found.shortages == lacking and found.fits == (not lacking)
    assert found.shared == {"host memory": (SHARED, has)}
    assert (found.margin == -1) == bool(lacking)


def test_cards_whose_memory_is_the_hosts_and_cards_without() -> None:
    found = held(STEP, Card(name="square", memory=80 * GIB, shared_memory=True), 4)
    assert (found.memory, found.fixed) == (20 * GIB, RESERVED)
    assert fit(memory(STEP), Card(name="square"), 1, 1) is None


def test_an_optimizer_on_a_disk() -> None:
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    assert on_disk(run(), memory(STEP), 8) == 0
    each = on_disk(run(strategy=nvme), memory(STEP), 8)
    assert each == 100 * (4 + 4 + 8) / 8, "masters, gradients and two moments of a part"
    assert held(STEP, machine=replace(BOX, disk=8 * each - 1), disk=each).shortages == {"disk": 1}
    moved = held(STEP, ranks=1, host=10 * GIB, machine=BOX, disk=10 * GIB)
    assert moved.shared == {"host memory": (PROCESS, None), "disk": (10 * GIB, None)}


# -- small runs ------------------------------------------------------------------------------------

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MIXTURE = {**TINY, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 16}


def most(model: dict[str, Any], rows: int = 2) -> int | None:
    sizes = {"train": {"micro_batch_size": rows}, "data": {"max_length": 96}}
    return most_bytes(run(sizes, model=model, adapter={"r": 4}), 1)


@pytest.mark.parametrize("config", [TINY, MIXTURE, {**TINY, "model_type": "gemma3_text"}])
def test_the_bound_is_more_than_all_weights_and_their_state(config: dict[str, Any]) -> None:
    of = run(model={"config": config}, train={"micro_batch_size": 2}, data={"max_length": 96})
    factory = CausalModelFactory.of(of, torch.float32)
    held = 20 * sum(p.numel() for p in factory.skeleton().parameters())
    bound = most_bytes(of, 1)
    assert bound is not None and held < bound < 20 * held


def test_the_bound_counts_rows_and_words_and_guesses_nothing(tmp_path: Path) -> None:
    few, rows = most({}), most({}, rows=4)
    words = most({"config": {**TINY, "vocab_size": 50_000}})
    assert few is not None and rows is not None and words is not None
    assert rows - few > 2 * 96 * 512 * 8 and words - few > 2 * 96 * 49_000 * 8
    named = {"name": str(tmp_path), "config": None}
    for unknown in (
        {"config": {k: v for k, v in TINY.items() if k != "intermediate_size"}},
        {"config": {**TINY, "vision_config": {"hidden_size": 8}}},
        {"new_tokens": ["<a>"]},
        {"name": "nobody/nothing", "config": None},  # not fetched
        named,  # there is none
    ):
        assert most(unknown) is None, unknown
    (tmp_path / "config.json").write_text("[1, 2]")
    assert most(named) is None
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert most(named) == few
