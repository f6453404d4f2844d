from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data import Stream, permutation, split
from anygauge.data.order import packing_order
from anygauge.interface import DataError

seeds = st.integers(0, 2**40)


@given(n=st.integers(0, 200), seed=seeds, epoch=st.integers(0, 50))
def test_a_permutation_holds_everything_once(n, seed, epoch):
    order = permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == permutation(n, seed, epoch).tolist()


def test_the_order_is_pinned():
    # Resuming an old checkpoint relies on these very numbers.
    assert permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(8, 0, 1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_seed_epoch_and_purpose_each_change_the_order():
    orders = [permutation(64, 0, 0), permutation(64, 0, 1), permutation(64, 1, 0)]
    orders.append(packing_order(64, 0))
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_first_places_are_uniform():
    firsts = np.bincount([permutation(4, seed, 0)[0] for seed in range(400)], minlength=4)
    assert firsts.min() > 60  # 100 expected, standard deviation below 9


@given(n=st.integers(1, 30), seed=seeds, total=st.integers(1, 100), data=st.data())
def test_positions_can_be_asked_for_in_any_order(n, seed, total, data):
    stream = Stream(n, seed, total=total)
    straight = [stream.item(position) for position in range(total)]
    position = data.draw(st.integers(0, total - 1))
    assert Stream(n, seed, total=total).item(position) == straight[position]
    assert stream.item(position) == straight[position]
    for start in range(0, total - n + 1, n):
        assert sorted(straight[start : start + n]) == list(range(n))
    assert len(stream) == total


def test_without_shuffling_the_order_is_the_files():
    stream = Stream(3, 5, total=7, shuffle=False)
    assert [stream.item(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("position", [-1, 7])
def test_positions_outside_the_run(position):
    with pytest.raises(IndexError, match=r"0\.\.6"):
        Stream(3, 0, total=7).item(position)


@given(n=st.integers(2, 100), fraction=st.floats(0.001, 0.999), seed=seeds)
def test_a_split_divides_and_keeps_the_order(n, fraction, seed):
    rows = list(range(n))
    kept, held_out = split(rows, fraction, seed)
    assert sorted(kept + held_out) == rows
    assert kept == sorted(kept)
    assert held_out == sorted(held_out)
    assert kept
    assert held_out
    assert abs(len(held_out) - n * fraction) <= 1
    assert split(rows, fraction, seed) == (kept, held_out)


def test_no_fraction_holds_nothing_out_and_one_row_cannot_be_divided():
    assert split("ab", 0.0, 0) == (["a", "b"], [])
    with pytest.raises(DataError, match="both parts need one"):
        split(["a"], 0.5, 0)
    with pytest.raises(DataError, match="no row"):
        Stream(0, 0, total=1)
