from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.order import DUMMY, GroupedOrder, Order, packing_order, permutation, split
from anygauge.interface import DataError

seeds = st.integers(0, 2**40)


def items(order, start, end):
    return order.items(np.arange(start, end)).tolist()


def test_the_order_is_pinned_and_seed_epoch_and_purpose_each_change_it():
    # Resuming an old checkpoint relies on these very numbers.
    pinned = [3, 2, 1, 6, 0, 7, 4, 5], [7, 4, 5, 1, 6, 2, 0, 3]
    assert tuple(permutation(8, 0, epoch).tolist() for epoch in (0, 1)) == pinned
    assert items(Order([3, 5], [1.0, 1.0], 0), 0, 16) == pinned[0] + pinned[1]
    orders = [permutation(64, 0, 0), permutation(64, 0, 1), permutation(64, 1, 0)]
    orders += [packing_order(64, 0), packing_order(64, 0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 5


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    quarters=st.lists(st.integers(1, 14), min_size=4, max_size=4),
    seed=seeds,
    shuffle=st.booleans(),
    data=st.data(),
)
def test_every_item_is_read_as_often_as_its_weight_says(sizes, quarters, seed, shuffle, data):
    """Exactly so after four epochs; after fewer, none twice more than another of its source. What
    stands at a position is the same whatever was asked for before."""
    weights = [count / 4 for count in quarters[: len(sizes)]]
    order = Order(sizes, weights, seed, shuffle=shuffle)
    ends = [order.end(epoch) for epoch in range(5)]
    straight = items(order, 0, ends[4])
    expected = [count for size, count in zip(sizes, quarters, strict=False) for _ in range(size)]
    assert Counter(straight) == dict(enumerate(expected))
    for end in ends:
        so_far = Counter(straight[:end])
        for source, size in enumerate(sizes):
            first = sum(sizes[:source])
            counts = [so_far[item] for item in range(first, first + size)]
            assert max(counts) - min(counts) <= 1, "spread over the source"
    for position in range(0, ends[-1], 3):
        assert ends[order.epoch(position)] <= position < ends[order.epoch(position) + 1]
    place = data.draw(st.integers(0, ends[4] - 1))
    again = Order(sizes, weights, seed, shuffle=shuffle)
    assert items(again, place, place + 1) == straight[place : place + 1]
    backwards = order.items(np.arange(ends[4])[::-1], stop=place).tolist()
    assert backwards == [DUMMY] * (ends[4] - place) + straight[:place][::-1]


def test_the_files_order_and_weights_and_epochs_as_they_are_written():
    plain = Order([2, 1], [2.0, 1.0], 5, shuffle=False)
    assert items(plain, 0, 7) == [0, 1, 0, 1, 2, 0, 1]
    assert Order([10], [0.1], 0).end(30) == 30, "a weight means the decimal number"
    assert Order([30], [1.0], 0).end(0.1) == 3


@given(n=st.integers(2, 100), fraction=st.floats(0.001, 0.999), seed=seeds)
def test_a_split_divides_and_keeps_the_order(n, fraction, seed):
    kept, held_out = (part.tolist() for part in split(n, fraction, seed))
    assert sorted(kept + held_out) == list(range(n))
    assert kept and kept == sorted(kept)
    assert held_out and held_out == sorted(held_out)
    assert abs(len(held_out) - n * fraction) <= 1
    assert split(n, fraction, seed)[1].tolist() == held_out


def test_each_source_is_split_apart_and_never_one_row():
    assert split(50, 0.2, 0)[1].tolist() != split(50, 0.2, 0, 1)[1].tolist()
    with pytest.raises(DataError, match="training and evaluation need at least one each"):
        split(1, 0.5, 0)


def grouped(lengths, batch, seed=0, weight=1.0, epochs=None, shuffle=True):
    order = Order([len(lengths)], [weight], seed, shuffle=shuffle)
    lengths = np.array([*lengths, 0])  # the last is that of a dummy
    stop = inf if epochs is None else order.end(epochs)
    return GroupedOrder(order, lambda items: lengths[items], batch, stop)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=300),
    batch=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_whole_epochs_hold_every_row_as_often_the_longest_first(lengths, batch, epochs, seed):
    groups = grouped(lengths, batch, seed, epochs=epochs)
    steps = -(-len(lengths) * epochs // batch)
    found = [groups.step(index).tolist() for index in range(steps)]
    read = Counter(item for step in found for item in step)
    assert read.pop(DUMMY, 0) == steps * batch - epochs * len(lengths)
    assert read == dict.fromkeys(range(len(lengths)), epochs)
    for step in found:
        sizes = [0 if item == DUMMY else lengths[item] for item in step]
        assert sizes == sorted(sizes, reverse=True) and sizes[0]
    assert lengths[found[0][0]] == max(lengths)
    again = grouped(lengths, batch, seed, epochs=epochs)
    assert [again.step(index).tolist() for index in reversed(range(steps))] == found[::-1]


def test_steps_hold_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 1000, size=5000)
    groups, plain = grouped(lengths, 16), Order([5000], [1.0], 0)
    steps = [lengths[groups.step(index)] for index in range(312)]
    others = [lengths[plain.items(np.arange(index * 16, index * 16 + 16))] for index in range(312)]
    padding = [1 - np.mean(each) / np.max(each, axis=1).mean() for each in (steps, others)]
    assert padding[0] < 0.03 and padding[1] > 0.4
    means = np.array([step.mean() for step in steps[1:]])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.15, "steps are shuffled"
    plain = grouped([3, 1, 2, 4], 2, shuffle=False)
    assert [plain.step(index).tolist() for index in range(2)] == [[3, 0], [2, 1]]
    assert grouped([7], 2, weight=0.25).step(0).tolist() == [0, 0], "not of the first epoch"
