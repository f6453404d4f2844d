"""Widths of streams, of evaluations and of a whole run; those of steps are in `test_batches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anygauge.data import (
    Batches,
    Layout,
    MicroBatch,
    Schedule,
)
from anygauge.data.row_batches import RowBatches, measure
from anygauge.interface import ShapeKind, ShapePolicy, Share

MAX = 64
BUCKETED = ShapePolicy(kind=ShapeKind.BUCKETED, buckets=8)
"""Buckets of 8, 16, ... 64 tokens; the 23 rows have about 10 to 64."""
RANKS = 3
Make = Callable[..., list[Batches]]


def layouts(ranks: int, **changes: Any) -> Iterator[Layout]:
    for rank in range(ranks):
        given = {"micro_batch": 2, "shapes": BUCKETED, "share": Share(rank, ranks), **changes}
        yield Layout(max_length=MAX, pad_id=2, **given)


@pytest.fixture
def make(batches):
    """The training batches of each rank."""

    def made(ranks: int = RANKS, streaming: bool = False, **changes: Any) -> list[Batches]:
        settings = {"global_batch_size": 4 * ranks}
        given = {"shapes": BUCKETED, "streaming": streaming, "settings": settings, **changes}
        return [batches(world=ranks, rank=rank, **given) for rank in range(ranks)]

    return made


def width(batch: MicroBatch) -> int:
    return int(batch.input_ids.shape[1])


def steps(of_ranks: list[Batches]) -> list[list[MicroBatch]]:
    """The micro-batches of each step, of all ranks."""
    return [
        [batch for batches in of_ranks for batch in batches.step(index)]
        for index in range(of_ranks[0].steps)
    ]


def dummies(batches: list[MicroBatch]) -> list[MicroBatch]:
    return [batch for batch in batches if not batch.tokens]


def longest_of(batches: list[MicroBatch]) -> int:
    return max(int(batch.attention_mask.sum(dim=1).max()) for batch in batches)


@pytest.mark.parametrize(
    ("ranks", "micro", "packing"), [(3, 2, False), (5, 1, False), (3, 1, True)]
)
def test_streamed_steps_have_one_width_on_all_ranks(make, ranks, micro, packing):
    every = steps(make(ranks, True, micro=micro, packing=packing))
    for batches in every:
        longest = MAX if packing else -(-longest_of(batches) // 8) * 8
        assert {width(batch) for batch in batches} == {longest}
    assert any(dummies(batches) for batches in every) is (micro == 1), "some ranks have no rows"


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_padding_is_measured_as_it_is_laid_out(make, tokenized, packing, ranks):
    every = steps(make(ranks=ranks, packing=packing))
    (layout, *_) = layouts(ranks, packing=packing)
    found = measure(tokenized, Schedule(seed=5, global_batch=4 * ranks), layout)
    assert found.positions == sum(batch.input_ids.numel() for batches in every for batch in batches)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("order", ["shuffled", "grouped", "packed"])
def test_widths_of_a_run_are_known_before_it(tokenized, order, ranks, monkeypatch):
    """Of all steps that are left, several epochs of them, and of no others."""
    monkeypatch.setattr("anygauge.data.row_batches._STEPS_AT_ONCE", 3)
    grouping, packing = order == "grouped", order == "packed"
    schedule = Schedule(seed=5, global_batch=ranks, epochs=2.5, grouping=grouping)
    for layout in layouts(ranks, micro_batch=1, packing=packing):
        batches = RowBatches(tokenized, schedule, layout)
        every = [{width(each) for each in batches.step(at)} for at in range(batches.steps)]
        for start in range(batches.steps):
            assert batches.widths(start) == sorted(set.union(*every[start:]), reverse=True)
        assert (len(batches.widths(0)) > 1) != packing
        dummy = layout.dummy(24)
        assert (width(dummy), dummy.num_loss_tokens, dummy.tokens) == (24, 0, 0)


def test_where_widths_are_not_known_before_or_cost_nothing_there_are_none(make):
    assert [batches.widths(0) for batches in make(streaming=True)] == [[]] * RANKS
    assert [batches.widths(0) for batches in make(shapes=ShapePolicy())] == [[]] * RANKS
    assert [batches.widths(0) for batches in make(packing=True)] == [[MAX]] * RANKS


def test_nothing_is_read_of_other_ranks_where_shapes_cost_nothing(make, monkeypatch):
    read: list[int] = []
    (batches, *_) = make(streaming=True, shapes=ShapePolicy())
    encode = batches._rows.encode  # type: ignore[attr-defined]
    monkeypatch.setattr(
        batches._rows,  # type: ignore[attr-defined]
        "encode",
        lambda numbers: read.append(len(numbers)) or encode(numbers),
    )
    batches.step(0)
    assert set(read) <= {4, 0}, "a step has twelve rows, a rank four"
