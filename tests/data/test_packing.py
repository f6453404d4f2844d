from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data import fill, pack
from anygauge.data.order import packing_order
from anygauge.interface import DataError


@given(lengths=st.lists(st.integers(1, 50), max_size=120), seed=st.integers(0, 9), data=st.data())
def test_each_row_once_and_no_pack_above_capacity(lengths, seed, data):
    capacity = data.draw(st.integers(max(lengths, default=1), 80))
    order = packing_order(len(lengths), seed).tolist()
    packs = pack(lengths, capacity, order)
    assert sorted(row for group in packs for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in group) <= capacity for group in packs)
    assert all(packs)
    assert pack(lengths, capacity, order) == packs


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=120))
def test_two_packs_are_never_left_that_would_fit_in_one(lengths):
    packs = pack(lengths, 50, range(len(lengths)))
    loads = sorted(sum(lengths[row] for row in group) for group in packs)
    assert len(loads) == 1 or loads[0] + loads[1] > 50


def test_the_fill_is_high_for_rows_as_they_come():
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 0.6, 2000), 8, 512).astype(int)
    packs = pack(lengths.tolist(), 512, packing_order(2000, 0).tolist())
    assert fill(lengths.tolist(), 512, packs) > 0.99


def test_the_order_breaks_ties():
    first = pack([2, 2, 2, 2], 4, [0, 1, 2, 3])
    second = pack([2, 2, 2, 2], 4, [3, 1, 2, 0])
    assert first == [[0, 1], [2, 3]]
    assert second == [[3, 1], [2, 0]]


def test_a_row_above_the_capacity_is_refused():
    with pytest.raises(DataError, match="row 1 has 9 tokens, a pack holds 8"):
        pack([3, 9], 8, [0, 1])
