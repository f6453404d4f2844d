from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anygauge.config.schema import DataSection, RunFile, SourceSection, TrainSection
from anygauge.data import EvaluationBatches, Layout, Schedule, accumulation, prepare
from anygauge.data.batches import IGNORE_INDEX, RowBatches, measure_padding, pack
from anygauge.data.order import packing_order
from anygauge.interface import RunFileError, ShapeKind, ShapePolicy, Share
from tests.data.conftest import origins

MAX = 64
PAD = 2
BUCKETED = ShapePolicy(kind=ShapeKind.BUCKETED, buckets=8)
STATIC = ShapePolicy(kind=ShapeKind.STATIC)
LAYOUT = set(Layout.__dataclass_fields__)


def plan(**options):
    defaults = {"seed": 3, "global_batch": 8, "micro_batch": 2, "max_length": MAX, "pad_id": PAD}
    given = {**defaults, **options}
    layout = Layout(**{name: given.pop(name) for name in LAYOUT & given.keys()})
    return Schedule(**given), layout


def make(rows, **options):
    return RowBatches(rows, *plan(**options))


def origins_of(rows):
    return tuple(rows.tokens(row).origin for row in range(len(rows)))


def check(batch, rows, packed):
    """Everything that must hold for any micro-batch; recomputed from the definition."""
    ids, mask = batch.input_ids, batch.attention_mask
    # Of the positions themselves.
    labels = torch.nn.functional.pad(batch.shift_labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    assert (batch.shift_labels[:, -1] == IGNORE_INDEX).all()
    assert batch.has_padding == (0 in mask)
    if batch.loss_rows is not None:
        assert (
            batch.loss_rows.tolist()
            == (batch.shift_labels.flatten() != IGNORE_INDEX).nonzero()[:, 0].tolist()
        )
    kinds = {(tensor.dtype, tensor.shape) for tensor in batch.tensors().values()}
    assert kinds == {(torch.int64, ids.shape)}
    assert batch.num_loss_tokens == int((labels[:, 1:] != IGNORE_INDEX).sum())
    assert (labels[:, 0] == IGNORE_INDEX).all()
    assert (labels[labels != IGNORE_INDEX] == ids[labels != IGNORE_INDEX]).all()
    assert (ids[mask == 0] == PAD).all()
    assert (labels[mask == 0] == IGNORE_INDEX).all()
    assert (mask.diff(dim=1) <= 0).all(), "padding on the right only"
    assert (mask.sum(dim=1) >= 1).all()
    assert (batch.segment_ids is not None) == packed
    if packed:
        assert ((batch.segment_ids > 0) == (mask > 0)).all()
        starts = batch.position_ids == 0
        changes = batch.segment_ids.diff(dim=1, prepend=torch.full((len(ids), 1), -1)) != 0
        assert (starts == changes).all(), "positions begin anew with each document"
        assert (labels[starts] == IGNORE_INDEX).all(), "no document predicts its neighbour's start"
    lengths = dict(zip(origins_of(rows), rows.lengths.tolist(), strict=True))
    assert batch.tokens == sum(lengths[origin] for origin in batch.origins)


@pytest.mark.parametrize("packing", [False, True, "concatenate"])
def test_a_batch_token_by_token(tokenizer, source, packing):
    pairs = [{"prompt": "a", "completion": answer} for answer in ("b", "bcd")]
    data = DataSection(train=source(pairs, template="{prompt}"), max_length=12, cache="off")
    rows = prepare(data, tokenizer, seed=0).train
    options = {"max_length": 12, "packing": packing, "shuffle": False}
    options["shapes"] = STATIC if packing else ShapePolicy()
    size = 1 if packing else 2
    (batch,) = make(rows, global_batch=size, micro_batch=size, **options).step(0)
    a, b, c, d = (tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abcd")
    assert [origin[-2:] for origin in batch.origins] == ([":2", ":1"] if packing else [":1", ":2"])
    assert (batch.num_loss_tokens, batch.tokens) == (6, 10)
    assert ("segment_ids" in batch.tensors()) is (packing is True)
    no = IGNORE_INDEX
    if not packing:
        assert batch.input_ids.tolist() == [[0, a, b, 1, PAD, PAD], [0, a, b, c, d, 1]]
        assert batch.shift_labels.tolist() == [[no, b, 1, no, no, no], [no, b, c, d, 1, no]]
        assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
        assert batch.position_ids.tolist() == [list(range(6))] * 2
        return
    assert batch.input_ids.tolist() == [[0, a, b, c, d, 1, 0, a, b, 1, PAD, PAD]]
    assert batch.shift_labels.tolist() == [[no, b, c, d, 1, no, no, b, 1, no, no, no]]
    if packing == "concatenate":
        assert batch.position_ids.tolist() == [list(range(12))]
    else:
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]]
        assert batch.segment_ids.tolist() == [[1] * 6 + [2] * 4 + [0] * 2]


def check_widths(step, shapes, packing, alone):
    """Where shapes cost something, micro-batches of a step have one width on several ranks."""

    def bucket(batches):
        longest = max(int(batch.attention_mask.sum(dim=1).max()) for batch in batches)
        return shapes.padded_length(longest, MAX)

    one = shapes.kind is not ShapeKind.DYNAMIC
    for batch in step:
        own = [batch] if not one or (alone and batch.tokens) else step
        assert batch.input_ids.shape[1] == (MAX if one and packing else bucket(own))


@pytest.mark.parametrize(
    "shapes", [ShapePolicy(), ShapePolicy(multiple=8), BUCKETED, STATIC], ids=str
)
@settings(max_examples=6, deadline=None)
@example(world=1, micro=1, turns=3, rows="shuffled", epochs=1.0, seed=5)
@example(world=5, micro=1, turns=2, rows="shuffled", epochs=1.0, seed=5)
@given(
    world=st.integers(1, 5),
    micro=st.integers(1, 3),
    turns=st.integers(1, 3),
    rows=st.sampled_from(["shuffled", "grouped", "packed"]),
    epochs=st.floats(0.05, 2.5),
    seed=st.integers(0, 5),
)
def test_ranks_divide_a_step_and_do_not_decide_what_is_in_it(
    tokenized, shapes, world, micro, turns, rows, epochs, seed
):
    packing = rows == "packed"
    options = {"global_batch": world * micro * turns, "epochs": epochs, "seed": seed}
    options |= {"packing": packing, "grouping": rows == "grouped", "shapes": shapes}
    whole = make(tokenized, micro_batch=options["global_batch"], **options)
    ranks = [
        make(tokenized, micro_batch=micro, share=Share(rank, world), **options)
        for rank in range(world)
    ]
    for index in range(whole.steps):
        (together,) = whole.step(index)
        steps = [rank.step(index) for rank in ranks]
        assert all(len(step) == turns for step in steps)
        parts = [steps[rank][turn] for turn in range(turns) for rank in range(world)]
        for batch in (together, *parts):
            check(batch, tokenized, packing)
        check_widths(parts, shapes, packing, alone=world == 1)
        assert tuple(origin for part in parts for origin in part.origins) == together.origins
        tokens = sum(part.num_loss_tokens for part in parts)
        assert tokens == together.num_loss_tokens == whole.normalizer(index)
        assert sum(part.tokens for part in parts) == whole.real_tokens(index)
    with pytest.raises(IndexError):
        whole.step(whole.steps)


def test_steps_win_over_epochs_and_part_of_an_epoch_is_rounded_up(tokenized):
    batches = make(tokenized, steps=6, epochs=0.1)
    assert [len(origins(batches, index)) for index in range(batches.steps)] == [8] * 6
    assert batches.epoch(5) == 48 / 23
    assert make(tokenized, epochs=0.5, global_batch=4).steps == 3
    assert make(tokenized, epochs=0.0001).steps == 1


@pytest.mark.parametrize("multiple", [16, 48, 64])
def test_micro_batches_of_a_step_may_have_one_width(tokenized, multiple):
    """That of the longest, rounded up where a sequence may be as long."""
    usual = make(tokenized)
    batches = make(tokenized, share=Share(0, 1, one_width=multiple))
    differ = 0
    for index in range(usual.steps):
        before = [batch.input_ids.shape[1] for batch in usual.step(index)]
        step = batches.step(index)
        (width,) = {batch.input_ids.shape[1] for batch in step}
        assert width == min(-(-max(before) // multiple) * multiple, MAX)
        differ += len(set(before)) > 1
        for batch in step:
            check(batch, tokenized, packed=False)
    assert differ, "rows are of several lengths"


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("micro", "world"), [(1, 1), (2, 3), (2, 5), (5, 4), (40, 2)])
@pytest.mark.parametrize("shapes", [ShapePolicy(), BUCKETED], ids=str)
def test_evaluation_reads_every_row_once_on_equal_ranks(tokenized, packing, micro, world, shapes):
    _, layout = plan(micro_batch=micro, global_batch=micro, packing=packing, shapes=shapes)
    shares = [replace(layout, share=Share(rank, world)) for rank in range(world)]
    ranks = [EvaluationBatches(tokenized, layout) for layout in shares]
    assert len({len(batches) for batches in ranks}) == 1
    for together in zip(*ranks, strict=True):
        check_widths(together, shapes, packing, alone=world == 1)
    every = [batch for batches in ranks for batch in batches]
    for batch in every:
        check(batch, tokenized, packing)
        assert batch.input_ids.shape[0] == micro
    read = [origin for batch in every for origin in batch.origins]
    own = read if world == 1 and not packing else sorted(read, key=origins_of(tokenized).index)
    assert tuple(own) == origins_of(tokenized)
    total = sum(batch.num_loss_tokens for batch in every)
    assert total == tokenized.report.num_loss_tokens


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_read_as_often_as_their_weights_say(tokenizer, counting, packing, shuffle):
    sources = [SourceSection(path=str(counting), limit=limit) for limit in (10, 6, 8)]
    data = DataSection(train=sources, max_length=MAX, cache="off")
    options = {"packing": packing, "shuffle": shuffle, "epochs": 2, "global_batch": 4}
    batches = make(prepare(data, tokenizer, seed=0).train, weights=(1.0, 0.5, 2.5), **options)
    seen = Counter(at for index in range(batches.steps) for at in origins(batches, index))
    expected = {n: 2 + (n <= 6) + 5 * (n <= 8) for n in range(1, 11)}
    assert seen == {f"{counting}:{n}": times for n, times in expected.items()}
    assert packing or batches.epoch(3) == 16 / 33
    assert batches.epoch(batches.steps - 1) == pytest.approx(2)


def test_the_fingerprint_tells_data_and_order_but_not_ranks(tokenized):
    base = make(tokenized).fingerprint()
    same = make(tokenized, share=Share(1, 4), epochs=3, steps=7, pad_id=0)
    assert same.fingerprint() == base
    others = [{"seed": 4}, {"global_batch": 4}, {"packing": True}, {"packing": "concatenate"}]
    others += [{"grouping": True}, {"max_length": MAX + 1}, {"weights": (2.0,)}]
    prints = {make(tokenized, **change).fingerprint() for change in others}
    assert len(prints | {base}) == len(others) + 1


def test_each_kind_of_packing_has_a_layout():
    for packing, kind in ((False, False), ("isolate", True), ("concatenate", "concatenate")):
        data = DataSection(train=SourceSection(path="x"), packing=packing)
        run = RunFile(model={"name": "x"}, data=data)
        assert Layout.of(run, Share(0, 1), PAD, STATIC).packing == kind


@pytest.mark.parametrize(
    ("total", "most", "ranks", "at_once"),
    [(80, 10, 8, 10), (80, 10, 16, 5), (2, 4, 1, 2), (6, 4, 1, 4), (3, 4, 2, 4), (4, 4, 8, 4)],
)
def test_a_ranks_share_goes_through_at_once(total, most, ranks, at_once):
    train = TrainSection(global_batch_size=total, micro_batch_size=most)
    assert train.sequences_at_once(ranks) == at_once


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ((10, 4, 1), "train.global_batch_size 8 or 12; or train.micro_batch_size 1, 2"),
        ((4, 4, 3), "what works: train.global_batch_size 12"),
        ((12, 4, 2), "train.global_batch_size 8 or 16; or train.micro_batch_size 1, 2, 3"),
    ],
)
def test_a_global_batch_is_divided_or_refused(values, remedy):
    assert (accumulation(16, 4, 1), accumulation(16, 4, 4)) == (4, 1)
    with pytest.raises(RunFileError) as caught:
        accumulation(*values)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_padding_is_measured_as_it_is_laid_out(tokenized, packing, ranks):
    options = {"global_batch": 4 * ranks, "packing": packing, "shapes": BUCKETED}
    every = [make(tokenized, share=Share(rank, ranks), **options) for rank in range(ranks)]
    steps = [batch for one in every for index in range(one.steps) for batch in one.step(index)]
    found = measure_padding(tokenized, *plan(share=Share(0, ranks), **options))
    assert found.positions == sum(batch.input_ids.numel() for batch in steps)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("order", ["shuffled", "grouped", "packed"])
def test_widths_of_a_run_are_known_before_it(tokenized, order, ranks, monkeypatch):
    """Of all steps that are left, several epochs of them, and of no others."""
    monkeypatch.setattr("anygauge.data.batches._STEPS_AT_ONCE", 3)
    packing = order == "packed"  # then there are steps of the smallest pack alone
    options = {"seed": 5, "epochs": 2.5, "micro_batch": 1, "shapes": BUCKETED}
    options |= {"grouping": order == "grouped", "packing": packing}
    options["global_batch"] = ranks if packing else 2 * ranks
    for rank in range(ranks):
        batches = make(tokenized, share=Share(rank, ranks), **options)
        every = [{b.input_ids.shape[1] for b in batches.step(at)} for at in range(batches.steps)]
        for start in range(batches.steps):
            assert batches.widths(start) == sorted(set.union(*every[start:]), reverse=True)
        assert (len(batches.widths(0)) > 1) != packing
    assert make(tokenized).widths(0) == [], "where a width costs nothing"
    dummy = batches.layout.dummy(24)
    assert (dummy.input_ids.shape[1], dummy.num_loss_tokens, dummy.tokens) == (24, 0, 0)


def packed(lengths, capacity, order):
    return pack(np.array(lengths, dtype=int), capacity, np.array(order, dtype=int))


@given(lengths=st.lists(st.integers(1, 50), max_size=120), seed=st.integers(0, 9), data=st.data())
def test_each_row_once_and_no_pack_above_capacity(lengths, seed, data):
    capacity = data.draw(st.integers(max(lengths, default=1), 80))
    order = packing_order(len(lengths), seed).tolist()
    packs = packed(lengths, capacity, order)
    assert sorted(row for group in packs for row in group) == list(range(len(lengths)))
    assert packed(lengths, capacity, order) == packs
    loads = sorted(sum(lengths[row] for row in group) for group in packs)
    assert not packs or (loads[0] > 0 and loads[-1] <= capacity)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity, "two would fit in one"


def test_the_fill_is_high_and_the_order_breaks_ties_and_says_what_is_packed():
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 0.6, 2000), 8, 512).astype(int)
    packs = packed(lengths, 512, packing_order(2000, 0))
    assert lengths.sum() / (512 * len(packs)) > 0.99
    assert packed([2, 2, 2, 2], 4, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert packed([2, 2, 2, 2], 4, [3, 1, 2, 0]) == [[3, 1], [2, 0]]
    assert packed([2, 9, 2, 2], 4, [3, 0]) == [[3, 0]]
