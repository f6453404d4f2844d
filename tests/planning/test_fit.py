"""A run held against a card and its machine; the arithmetic that says which run needs no plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import Card
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.fit import CONNECTED, GIB, PROCESS, RESERVED, SLACK, fit, most_bytes, on_disk
from anygauge.planning.machines import Machine
from tests.helpers.runs import TINY, run_file
from tests.planning.standins import CARD, machine, memory, run

STEP = 20 * GIB
SHARED = 8 * (PROCESS + round(1.05 * 10 * GIB))
"""What eight ranks need of a host with 10 GiB each."""


def test_slack_context_and_collectives_come_on_top() -> None:
    found = fit(memory(STEP), CARD, 8, 8)
    assert found is not None and CARD.memory is not None
    assert (found.phase, found.tensors) == ("backward", STEP)
    assert found.needed == STEP + round(SLACK * STEP) + GIB + CONNECTED
    assert found.left == CARD.memory - found.needed == found.margin
    assert found.fits and found.phases["backward"] == found.needed
    assert found.phases["load"] == STEP // 4 + round(SLACK * STEP / 4) + GIB + CONNECTED
    alone = fit(memory(STEP), Card(name="square", memory=40 * GIB), 1, 1)
    assert alone is not None and alone.fixed == RESERVED
    lacks = fit(memory(80 * GIB), CARD, 1, 1)
    assert lacks is not None and not lacks.fits
    assert lacks.lacking == {"memory": lacks.needed - 40 * GIB} and lacks.margin == lacks.left


@pytest.mark.parametrize(
    ("box", "lacking"),
    [
        (machine(host_memory=SHARED - 1), {"host memory": 1}),
        (machine(host_memory=SHARED), {}),
        (machine(), {}),  # what is not known refuses nothing
    ],
)
def test_ranks_share_the_host(box: Machine, lacking: dict[str, int]) -> None:
    found = fit(memory(STEP, host=10 * GIB), CARD, 8, 8, box)
    assert found is not None and found.left > 0
    assert found.lacking == lacking and found.fits == (not lacking)
    assert found.shared == {"host memory": (SHARED, box.host_memory)}
    if lacking:
        assert found.margin == -1
    record = found.record()
    assert {name: record[name] for name in ("needed", "left", "fits")} == {
        "needed": found.needed,
        "left": found.left,
        "fits": found.fits,
    }
    assert record["shared"]["host memory"] == (SHARED, box.host_memory)


def test_cards_whose_memory_is_the_hosts_and_cards_without() -> None:
    found = fit(memory(STEP), Card(name="square", memory=80 * GIB, shared_memory=True), 4, 4)
    assert found is not None and (found.memory, found.fixed) == (20 * GIB, RESERVED)
    assert fit(memory(STEP), Card(name="square"), 1, 1) is None


def test_an_optimizer_on_a_disk() -> None:
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    assert on_disk(run(), memory(STEP), 8) == 0
    each = on_disk(run(strategy=nvme), memory(STEP), 8)
    assert each == 100 * (4 + 4 + 8) / 8, "masters, gradients and two moments of a part"
    found = fit(memory(STEP), CARD, 8, 8, machine(disk=8 * each - 1), disk=each)
    assert found is not None and found.lacking == {"disk": 1}
    moved = fit(memory(STEP, host=10 * GIB), CARD, 1, 1, machine(), disk=10 * GIB)
    assert moved is not None
    assert moved.shared == {"host memory": (PROCESS, None), "disk": (10 * GIB, None)}


# -- small runs ------------------------------------------------------------------------------------

MIXTURE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}


def most(folder: Path, config: dict[str, Any] = TINY, **changes: Any) -> int | None:
    model = {"config": config, "tokenizer": str(folder / "tokenizer"), **changes.pop("model", {})}
    return most_bytes(load_run_file(run_file(folder, model=model, **changes), [], {}).run, 1)


@pytest.mark.parametrize("config", [TINY, MIXTURE, {**TINY, "model_type": "gemma3_text"}])
def test_the_bound_is_more_than_all_weights_and_their_state(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    import torch

    model = {"config": config, "tokenizer": "none"}
    run = load_run_file(run_file(tmp_path, model=model, adapter=None), [], {}).run
    factory = CausalModelFactory(
        run.model, None, dtype=torch.float32, seed=0, gradient_checkpointing=False
    )
    held = 20 * sum(p.numel() for p in factory.skeleton().parameters())
    bound = most_bytes(run, 1)
    assert bound is not None and held < bound < 20 * held


def test_the_bound_counts_rows_and_words_and_guesses_nothing(tmp_path: Path) -> None:
    few, rows = most(tmp_path), most(tmp_path, train={"micro_batch_size": 4})
    words = most(tmp_path, {**TINY, "vocab_size": 50_000})
    assert few is not None and rows is not None and words is not None
    assert rows - few > 2 * 96 * 512 * 8 and words - few > 2 * 96 * 49_000 * 8
    sizeless = {k: v for k, v in TINY.items() if k != "intermediate_size"}
    for config in (sizeless, {**TINY, "vision_config": {"hidden_size": 8}}):
        assert most(tmp_path, config) is None
    assert most(tmp_path, model={"new_tokens": ["<a>"]}) is None
    folder = tmp_path / "model"
    folder.mkdir()
    named = {"name": str(folder), "config": None}
    assert most(tmp_path, model=named) is None
    assert most(tmp_path, model={"name": "nobody/nothing", "config": None}) is None, "not fetched"
    (folder / "config.json").write_text("[1, 2]")
    assert most(tmp_path, model=named) is None
    (folder / "config.json").write_text(json.dumps(TINY))
    assert most(tmp_path, model=named) == few
