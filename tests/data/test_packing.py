from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.order import packing_order
from anygauge.data.row_batches import Groups, pack
from anygauge.interface import DataError


def packed(lengths, capacity, order=None):
    order = range(len(lengths)) if order is None else order
    groups = pack(np.array(lengths, dtype=int), capacity, np.array(list(order), dtype=int))
    return [groups.group(index).tolist() for index in range(len(groups))]


@given(lengths=st.lists(st.integers(1, 50), max_size=120), seed=st.integers(0, 9), data=st.data())
def test_each_row_once_and_no_pack_above_capacity(lengths, seed, data):
    capacity = data.draw(st.integers(max(lengths, default=1), 80))
    order = packing_order(len(lengths), seed).tolist()
    packs = packed(lengths, capacity, order)
    assert sorted(row for group in packs for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in group) <= capacity for group in packs)
    assert all(packs)
    assert packed(lengths, capacity, order) == packs
    loads = sorted(sum(lengths[row] for row in group) for group in packs)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity, "two would fit in one"


def test_the_fill_is_high_for_rows_as_they_come():
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 0.6, 2000), 8, 512).astype(int)
    packs = pack(lengths, 512, packing_order(2000, 0))
    assert lengths.sum() / (512 * len(packs)) > 0.99


def test_the_order_breaks_ties_and_rows_that_are_not_in_it_stay_out():
    assert packed([2, 2, 2, 2], 4, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert packed([2, 2, 2, 2], 4, [3, 1, 2, 0]) == [[3, 1], [2, 0]]
    assert packed([2, 9, 2, 2], 4, [3, 0]) == [[3, 0]]


def test_a_row_above_the_capacity_is_refused():
    with pytest.raises(DataError, match="row 1 has 9 tokens, a pack holds 8"):
        packed([3, 9], 8)


def test_groups_are_joined_and_summed():
    groups = Groups.joined([Groups.of([[0, 2], [1]]), Groups.of([[3]]), Groups.of([])])
    assert [groups.group(index).tolist() for index in range(3)] == [[0, 2], [1], [3]]
    assert groups.sums(np.array([1, 10, 100, 1000])).tolist() == [101, 10, 1000]
