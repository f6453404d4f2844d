"""Generators of ranks are seeded from any seed that a run file takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.interface import Share
from anygauge.training.setup import seed_dropout


def seeded(seed: int, share: Share) -> int:
    """What rank 3's generators are seeded with."""
    found: list[int] = []
    backend: Any = SimpleNamespace(placement=SimpleNamespace(seed=found.append))
    rank: Any = SimpleNamespace(index=3)
    seed_dropout(backend, seed, rank, share, None)
    return found[0]


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_a_seed_of_64_bits_is_one_that_torch_takes(seed: int) -> None:
    found = seeded(seed, Share(3, 4))
    assert found == (seed * 100_003 + 3) % 2**63
    assert torch.Generator().manual_seed(found).initial_seed() == found


def test_ranks_of_one_part_draw_alike_unless_their_strategy_says_otherwise() -> None:
    one, other = seeded(5, Share(1, 2)), seeded(5, Share(1, 2, leads=False))
    assert one == other != seeded(5, Share(1, 2, leads=False, stream=7))
