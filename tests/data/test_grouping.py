from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data import Layout, RowBatches, Schedule
from anygauge.data.order import DUMMY, GroupedOrder, Order
from anygauge.interface import Share


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


@pytest.mark.parametrize("epochs", [0.4, 1.0, 2.0])
def test_ranks_divide_grouped_steps(tokenized, epochs):
    def batches(micro, world, rank):
        layout = Layout(micro_batch=micro, share=Share(rank, world), max_length=64, pad_id=2)
        schedule = Schedule(seed=1, global_batch=4, epochs=epochs, grouping=True)
        return RowBatches(tokenized, schedule, layout)

    whole = batches(4, 1, 0)
    assert whole.steps == math.ceil(23 * epochs / 4)
    assert whole.epoch(whole.steps - 1) == pytest.approx(epochs, abs=0.02)
    ranks = [batches(1, 2, rank) for rank in range(2)]
    seen = []
    for index in range(whole.steps):
        (together,) = whole.step(index)
        first, second = (rank.step(index) for rank in ranks)
        parts = [batch for turn in zip(first, second, strict=True) for batch in turn]
        assert sum((part.origins for part in parts), ()) == together.origins
        assert together.num_loss_tokens == whole.num_loss_tokens(index)
        assert together.tokens == whole.real_tokens(index)
        seen += together.origins
    if epochs >= 1:
        assert Counter(seen) == {tokenized.origin(row): int(epochs) for row in range(23)}
