from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.order import DUMMY, GroupedOrder, Order


def grouped(lengths, batch, seed=0, epochs=None, weights=None, shuffle=True):
    lengths = np.array(lengths)
    order = Order([len(lengths)], weights or [1.0], seed, shuffle=shuffle)
    stop = None if epochs is None else order.end(epochs)
    return GroupedOrder(order, lengths, batch, stop), order


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=300),
    batch=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_whole_epochs_hold_every_row_as_often(lengths, batch, epochs, seed):
    groups, order = grouped(lengths, batch, seed, epochs)
    steps = -(-order.end(epochs) // batch)
    found = [groups.step(index) for index in range(steps)]
    assert all(step.shape == (batch,) for step in found)
    assert all((step != DUMMY).any() for step in found)
    read = Counter(item for step in found for item in step.tolist() if item != DUMMY)
    assert read == dict.fromkeys(range(len(lengths)), epochs)
    again, _ = grouped(lengths, batch, seed, epochs)
    for index in reversed(range(steps)):
        assert again.step(index).tolist() == found[index].tolist()


def test_steps_hold_like_lengths_and_the_longest_comes_first():
    lengths = np.random.default_rng(0).integers(1, 1000, size=5000)
    groups, _ = grouped(lengths, 16)
    plain = Order([5000], [1.0], 0)
    steps = [lengths[groups.step(index)] for index in range(312)]
    others = [lengths[plain.items(np.arange(index * 16, index * 16 + 16))] for index in range(312)]

    def padding(parts):
        return 1 - sum(part.sum() for part in parts) / sum(part.max() * 16 for part in parts)

    assert padding(steps) < 0.03
    assert padding(others) > 0.4
    assert steps[0].max() == lengths.max()
    assert all((np.diff(step) <= 0).all() for step in steps), "longest first within a step"
    means = np.array([step.mean() for step in steps[1:]])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.15, "steps are shuffled"


def test_without_shuffling_only_blocks_are_sorted():
    groups, _ = grouped([3, 1, 2, 4], 2, shuffle=False)
    assert [groups.step(index).tolist() for index in range(2)] == [[3, 0], [2, 1]]
