"""Generators of ranks are seeded from any seed that a run file takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.interface import Share
from anygauge.training.setup import seed_dropout


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_a_seed_of_64_bits_is_one_that_torch_takes(seed: int) -> None:
    seeded: list[int] = []
    backend: Any = SimpleNamespace(placement=SimpleNamespace(seed=seeded.append))
    rank: Any = SimpleNamespace(index=3)
    seed_dropout(backend, seed, rank, Share(3, 4), None)
    assert seeded == [(seed * 100_003 + 3) % 2**63]
    assert torch.Generator().manual_seed(seeded[0]).initial_seed() == seeded[0]


def test_ranks_of_one_part_draw_alike_unless_their_strategy_says_otherwise() -> None:
    seeded: list[int] = []
    backend: Any = SimpleNamespace(placement=SimpleNamespace(seed=seeded.append))
    rank: Any = SimpleNamespace(index=3)
    for share in (Share(1, 2), Share(1, 2, leads=False), Share(1, 2, leads=False, stream=7)):
        seed_dropout(backend, 5, rank, share, None)
    assert seeded[0] == seeded[1] != seeded[2]
