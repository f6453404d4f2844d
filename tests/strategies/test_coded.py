"""Frozen weights of eight bits: no engine converts them, and losses are those of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.strategies.zero_versions import offloads_gradients
from tests.helpers.ranks import run_ranks

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    ("fsdp", {"gather": "step"}),
    ("zero", {"stage": 2}),
    # DeepSpeed 0.16.9 gathers weights of one type alone.
    *(("zero", {"stage": 3}) for _ in range(offloads_gradients())),
    ("ddp", {"pp": 2}),
]


def results(folder: Path, strategies: Any, world: int) -> list[list[dict[str, Any]]]:
    """Rank -> strategy -> what it found."""
    output = folder / f"ranks{world}"
    run_ranks(
        "tests.strategies.coded_rank",
        [str(output), json.dumps(strategies)],
        world=world,
        folder=folder,
    )
    return [json.loads(output.with_suffix(f".{r}.json").read_text()) for r in range(world)]


def test_codes_stay_codes(tmp_path: Path) -> None:
    ((alone,),) = results(tmp_path, [("single", {})], 1)
    ranks = results(tmp_path, STRATEGIES, 2)
    for number, (name, options) in enumerate(STRATEGIES):
        first, second = (rank[number] for rank in ranks)
        assert first["losses"] == pytest.approx(alone["losses"], rel=3e-3), (name, options)
        whole = (name == "ddp" and not options) or options == {"stage": 2}
        for key, codes in alone["codes"].items():
            # Parts are rows one behind the other, or layers on one of the ranks.
            parts = first["codes"].get(key, []) + second["codes"].get(key, [])
            assert parts == (codes + codes if whole else codes), (name, options, key)
