"""Streamed batches: shuffled in blocks, every row once an epoch, the same from any step on."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Layout, Prefetcher, Schedule, readers
from anygauge.data.batches import pack
from anygauge.data.encode import Counts
from anygauge.data.prepare_rows import packs_of
from anygauge.data.readers import Record
from anygauge.data.rows import Tokens
from anygauge.data.streaming import PackedStream, RowStream, StreamedRows
from anygauge.interface import DataError, RunFileError, ShapeKind, ShapePolicy
from tests.data.conftest import content, origins

SAID = r"data\.jsonl:9: one JSON object per line"
BAD = '{"text": "a"}\n' * 8 + "no json\n" + '{"text": "b"}\n' * 3


class KnownRows(StreamedRows):
    """Rows of known lengths; a length of 0 leaves nothing."""

    name = "x"

    def __init__(self, lengths, size):
        super().__init__((), "", size)
        self.lengths, self.length = lengths, len(lengths)
        self.read = []

    def block(self, number):
        if self.read[-1:] != [number]:
            self.read.append(number)
        return range(self.length)[number * self.size : (number + 1) * self.size]

    def encode(self, rows, *, whole=True):
        documents = [
            [Tokens(np.zeros(n, np.int32), np.arange(n) > 0, str(row))] if n else []
            for row, n in ((row, self.lengths[row]) for row in rows)
        ]
        return documents, Counts(rows=len(rows), used=sum(map(len, documents)))

    def packs(self, capacity):
        blocks = (self.encode(self.block(at))[0] for at in range(-(-self.length // self.size)))
        lengths = (np.array([len(each.ids) for row in block for each in row]) for block in blocks)
        return [len(pack(each.astype(int), capacity, np.arange(len(each)))) for each in lengths]


def packed(rows, packs=None, **schedule):
    layout = Layout(micro_batch=1, max_length=8, pad_id=2, packing=True)
    return PackedStream(rows, Schedule(**{"seed": 1, **schedule}), layout, packs)


def whole(length, size, batch, seed, epochs=2, **schedule):
    """Without packing, and the steps of a run."""
    schedule = Schedule(seed=seed, global_batch=batch, epochs=epochs, **schedule)
    layout = Layout(micro_batch=batch, max_length=8, pad_id=2)
    made = RowStream(KnownRows([1] * length, size), schedule, layout)
    return made, [[int(at) for at in origins(made, index)] for index in range(made.steps)]


@given(
    size=st.integers(1, 40),
    length=st.integers(1, 100),
    batch=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_the_order_of_a_stream(size, length, batch, seed, data):
    made, steps = whole(length, size, batch, seed, epochs=3)
    items = np.array([item for step in steps for item in step])
    for epoch in range(3):
        here = items[epoch * length : (epoch + 1) * length]
        assert sorted(here) == list(range(length))
        assert (here // size == np.arange(length) // size).all(), "blocks stay in their order"
    index = data.draw(st.integers(0, len(steps) - 1))
    assert [int(at) for at in origins(made, index)] == steps[index]
    assert made.epoch(made.steps - 1) == 3


def test_the_order_of_a_stream_is_pinned():
    """A checkpoint of an earlier version is resumed in the same order."""
    pinned = [[2, 4, 0, 3, 1, 8, 5, 7, 6, 9], [3, 4, 0, 2, 1, 5, 7, 9, 8, 6]]
    assert whole(10, 5, batch=10, seed=3)[1] == pinned
    assert whole(10, 5, batch=10, seed=3, shuffle=False)[1] == [[*range(10)]] * 2


@given(
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=40).filter(any),
    size=st.integers(1, 15),
    batch=st.integers(1, 4),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    counted=st.booleans(),
    data=st.data(),
)
def test_packs_hold_every_row_once_an_epoch_and_no_step_is_empty(
    lengths, size, batch, epochs, seed, shuffle, counted, data
):
    packs = KnownRows(lengths, size).packs(8)
    steps = epochs * sum(-(-each // batch) for each in packs)
    schedule = {"seed": seed, "global_batch": batch, "epochs": epochs, "shuffle": shuffle}
    schedule["steps"] = None if counted else steps

    def make(rows):
        return packed(rows, packs if counted else None, **schedule)

    made = make(rows := KnownRows(lengths, size))
    assert made.steps == steps
    found = [(origins(made, at), made.normalizer(at)) for at in range(steps)]
    assert all(origins for origins, _ in found)
    read = Counter(int(origin) for origins, _ in found for origin in origins)
    assert read == {row: epochs for row, length in enumerate(lengths) if length}
    assert sum(tokens for _, tokens in found) == epochs * sum(max(0, n - 1) for n in lengths)
    assert rows.counts.used == epochs * sum(map(bool, lengths)), "each block is counted once"
    assert made.epoch(steps - 1) == pytest.approx(epochs) or not counted
    with pytest.raises(IndexError):
        made.step(steps)
    done = data.draw(st.integers(0, steps))
    for state in ({}, made.state(done)):
        resumed = make(rows := KnownRows(lengths, size))
        resumed.resume(state)
        for at in range(done, steps):
            assert (origins(resumed, at), resumed.normalizer(at)) == found[at]
        assert rows.read[:1] in ([], [state.get("block", 0)]), "no block before is read"


def test_blocks_are_read_once_though_steps_are_asked_for_early_and_late():
    """As the loop does: batches are laid out ahead, metrics and checkpoints come behind."""
    dealt = packed(KnownRows([8] * 10, 10), global_batch=4, steps=3)
    assert [len(origins(dealt, index)) for index in range(3)] == [4, 3, 3], "evenly"
    rows = KnownRows([5, 0] * 40, 2)
    made = packed(rows, global_batch=1, steps=40)
    for index in range(40):
        made.step(min(index + 3, 39))
        assert made.normalizer(index) == 4
        assert made.real_tokens(max(index - 1, 0)) == 5
        assert made.state(index)["block"] == index - 1 if index else not made.state(index)
    assert rows.read == list(range(40)), "and none after the last step"


def test_a_checkpoint_can_be_written_before_a_block_that_cannot_be_read(batches, source):
    fields = {"packing": True, "shuffle_buffer": 4, "settings": {"steps": 9}}
    made = batches(train=source(BAD), **fields)
    with pytest.raises(DataError, match=SAID):
        [made.normalizer(index) for index in range(9)]
    assert made.state(2) == {"first_step": 1, "epoch": 0, "block": 1}
    resumed = batches(train=source('{"text": "a"}\n' * 9), **fields)
    resumed.resume(made.state(2))
    assert len(origins(resumed, 2)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_row_ends_its_step_on_every_rank(batches, source, rank):
    fields = {"train": source(BAD), "shuffle": False, "settings": {"steps": 3}}
    made = batches(world=2, rank=rank, **fields)
    made.step(1)
    for ask in (made.step, made.step, made.normalizer):
        with pytest.raises(DataError, match=SAID):
            ask(2)
    assert made.normalizer(1) > 0, "steps before it can be asked for still"


@pytest.mark.parametrize("settings", [{"epochs": 2.3}, {"steps": 9}])
def test_without_shuffling_streamed_steps_are_the_prepared_ones(batches, settings):
    streamed = batches(settings=settings, shuffle=False, shuffle_buffer=5)
    prepared = batches(settings=settings, shuffle=False, streaming=False)
    assert streamed.steps == prepared.steps
    for index in range(streamed.steps):
        assert content(streamed, index) == content(prepared, index)
        for of_step in ("normalizer", "real_tokens", "epoch"):
            assert getattr(streamed, of_step)(index) == getattr(prepared, of_step)(index)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("limit", [None, 9])
def test_sources_are_streamed_one_after_another(batches, source, packing, limit):
    """Of several kinds; whether or not their numbers of rows are known."""
    lines = [f"row {n}" for n in range(9)]
    sources = [
        source([{"text": line} for line in lines], name="one.jsonl", limit=limit),
        source("\n".join(["text", *lines]), name="two.csv", limit=limit),
        source("\n".join(lines), name="three.txt", limit=limit),
    ]
    fields = {"train": sources, "packing": packing, "shuffle_buffer": 6}
    fields["settings"] = {"steps": 20, "global_batch_size": 2, "seed": 1}
    made = batches(**fields)
    made.step(19)
    assert not made.rows.counts.rows, "what was read ahead alone is not counted"
    read = [at.rpartition("/")[2] for n in range(20) for at in origins(made, n)]
    order = [["one.jsonl", "two.csv", "three.txt"].index(at.partition(":")[0]) for at in read]
    rows = {f"one.jsonl:{n}" for n in range(1, 10)} | {f"two.csv:{n}" for n in range(2, 11)}
    assert set(read[:27]) == rows | {f"three.txt:{n}" for n in range(1, 10)}
    assert set(order[:6]) == {0} and set(order[21:27]) == {2}, "a block holds neighbours"
    later = batches(**fields)
    later.resume(made.state(7))
    assert content(later, 7) == content(made, 7)


def test_a_number_of_rows_that_shows_at_the_end(batches, counting):
    """Whether it was known or not, a step reads the same rows, also in later epochs."""
    fields = {"shuffle_buffer": 5, "settings": {"steps": 20}}
    known = batches(**fields)
    unknown = batches(**fields, train=SourceSection(path=str(counting)))
    assert (known.rows.length, unknown.rows.length) == (23, None)
    assert known.rows.report.startswith("23 rows of ")
    assert unknown.rows.report == (
        f"rows of {counting}, read and tokenized while training, shuffled in blocks of 5"
    )
    wanted, epochs = [content(known, index) for index in range(20)], []
    for index in range(20):
        assert content(unknown, index) == wanted[index]
        epochs.append(unknown.epoch(index))
    assert unknown.rows.length == 23
    assert epochs[0] == pytest.approx(4 / 14), "of the rows that were read, and two blocks"
    assert epochs[:2] == sorted(epochs[:2]) and 0 < epochs[1] < 0.5
    assert epochs[5:] == [known.epoch(index) for index in range(5, 20)]
    for first in (19, 11, 6, 5):
        later = batches(**fields, train=SourceSection(path=str(counting)))
        assert content(later, first) == wanted[first]
    assert known.epoch(19) == pytest.approx(80 / 23)


def test_epochs_need_a_number_of_rows(batches, counting):
    said = r"does not know how many rows .*rows\.jsonl has before it reaches the end.*train\.steps"
    with pytest.raises(RunFileError, match=said):
        batches(train=SourceSection(path=str(counting)))
    assert batches(train=SourceSection(path=str(counting), limit=13)).steps == 4
    with pytest.raises(DataError, match=r"ends after 23 rows, but .* promises 40; set limit to 23"):
        too_many = batches(train=SourceSection(path=str(counting), limit=40))
        for index in range(too_many.steps):
            too_many.normalizer(index)


@pytest.mark.parametrize(
    ("packing", "world", "micro"), [(False, 4, 2), (False, 5, 1), (True, 2, 2), (True, 3, 1)]
)
def test_ranks_divide_streamed_steps(batches, packing, world, micro, monkeypatch):
    """Each reads the stream once an epoch, also in steps of several blocks; where shapes cost
    something, all have one width."""
    starts, read_from = Counter(), StreamedRows._rows_from
    monkeypatch.setattr(
        StreamedRows, "_rows_from", lambda *where: starts.update([where]) or read_from(*where)
    )
    shapes, total = ShapePolicy(kind=ShapeKind.BUCKETED, buckets=8), 2 * world * micro
    fields = {"packing": packing, "shuffle_buffer": 5, "shapes": shapes}
    fields["settings"] = {"global_batch_size": total, "epochs": 1.4}
    whole = batches(micro=total, **fields)
    ranks = [batches(world=world, rank=rank, micro=micro, **fields) for rank in range(world)]
    for index in range(whole.steps):
        (together,) = whole.step(index)
        turns = zip(*(rank.step(index) for rank in ranks), strict=True)
        parts = [batch for turn in turns for batch in turn]
        longest = int(together.attention_mask.sum(dim=1).max())
        width = shapes.padded_length(64 if packing else longest, 64)
        assert {batch.input_ids.shape[1] for batch in parts} == {width}, "dummies, too"
        assert sum((batch.origins for batch in parts), ()) == together.origins
        assert sum(batch.num_loss_tokens for batch in parts) == together.num_loss_tokens
        for each in (whole, *ranks):
            assert each.normalizer(index) == together.num_loss_tokens
            assert each.real_tokens(index) == together.tokens
    assert {str(rank.rows.report) for rank in ranks} == {str(whole.rows.report)}
    assert {start for _, start in starts} == {0} and max(starts.values()) <= 2
    assert whole.widths(0) == [], "not known before the run"


def test_what_yields_nothing_is_a_dummy_and_what_is_long_is_cut(batches, source):
    rows = [{"text": text} for text in ("one", " ", " ".join(map(str, range(99))), "two")]
    made = batches(train=source(rows, limit=4), max_length=16, micro=4)
    (batch,) = made.step(0)
    assert sorted(origin.rpartition(":")[2] for origin in batch.origins) == ["1", "3 (part 1)", "4"]
    assert batch.input_ids.shape == (4, 16)
    assert (made.real_tokens(0), made.normalizer(0)) == (batch.tokens, batch.num_loss_tokens)
    counts = made.rows.counts
    assert (counts.rows, counts.used, counts.sequences) == (4, 3, 3)
    assert (counts.dropped_empty, counts.truncated) == (1, 1)
    assert str(made.rows.report).startswith("streamed 3 of 4 rows; ")


def test_a_step_may_hold_nothing_to_learn_but_packs_do(batches, source):
    empty = {"prompt": "x", "completion": ""}
    made = batches(train=source([empty] * 5), settings={"steps": 2})
    assert (made.normalizer(0), made.real_tokens(0)) == (0, 0)
    assert [batch.tokens for batch in made.step(0)] == [0, 0]
    packs = batches(train=source([empty] * 5), packing=True, settings={"steps": 2})
    with pytest.raises(DataError, match=r"none of the rows of .* holds anything to learn; see"):
        packs.normalizer(0)
    late = source([empty] * 5 + [{"prompt": "x", "completion": "y"}])
    packs = batches(train=late, packing=True, shuffle_buffer=2, settings={"steps": 2})
    assert packs.normalizer(0) == packs.normalizer(1) > 0


@pytest.mark.parametrize("packing", [False, True])
def test_wrong_rows_that_are_skipped_are_counted_and_named(batches, source, packing):
    made = batches(train=source(BAD, limit=12), packing=packing, on_bad_row="skip")
    read = {at for index in range(made.steps) for at in origins(made, index)}
    assert all(made.normalizer(index) for index in range(made.steps))
    counts = made.rows.counts
    assert (counts.rows, counts.used, counts.skipped, len(read)) == (12, 11, 1, 11)
    assert "; 1 skipped as bad" in made.rows.report
    assert re.search(SAID, *made.rows.bad)


def test_packs_are_full_and_counted_once(batches, source, tmp_path, monkeypatch):
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.6, 3000), 2, 60).astype(int)
    fields = {"train": source([{"text": "7 " * n} for n in lengths.tolist()]), "packing": True}
    fields |= {"max_length": 256, "cache": str(tmp_path / "cache"), "shuffle_buffer": 1000}
    made = batches(**fields, settings={"global_batch_size": 16})
    read = [at for index in range(made.steps) for at in origins(made, index)]
    assert len(read) == len(set(read)) == 3000
    packs = packs_of(made.rows, DataSection(**fields))
    assert made.steps == sum(-(-each // 16) for each in packs)
    assert made.epoch(made.steps - 1) == 1
    filled = sum(made.real_tokens(index) for index in range(made.steps)) / (sum(packs) * 256)
    assert filled > 0.95
    monkeypatch.setattr("anygauge.data.streaming.StreamedRows.packs", None)
    again = batches(**fields, settings={"global_batch_size": 16})
    assert again.steps == made.steps, "from the cache"


def test_no_more_than_two_blocks_are_held(batches, source, monkeypatch):
    held, most, lock = set(), [0], threading.Lock()

    class Counted(Record):
        def __new__(cls, *args, **fields):
            made = super().__new__(cls, *args, **fields)
            with lock:
                # Not a row that another test's thread still reads ahead.
                if args[0] == b'{"text": "counted"}\n':
                    held.add(id(made))
                most[0] = max(most[0], len(held))
            return made

        def __del__(self):
            with lock:
                held.discard(id(self))

    monkeypatch.setattr(readers, "Record", Counted)
    train = source([{"text": "counted"}] * 230)
    made = batches(train=train, shuffle_buffer=32, settings={"steps": 100})
    for index in range(made.steps):
        made.step(index)
    assert 32 < most[0] <= 3 * 32 + 2, "the block that is read, the next, and one in the making"


def test_the_reading_thread_is_ahead_and_keeps_little():
    begun = {index: threading.Event() for index in range(10)}
    with Prefetcher(lambda index: begun[index].set() or index, 10, depth=2, name="x") as ahead:
        assert ahead.get(3) == 3
        assert begun[5].wait(60), "two more are worked out unasked"
        assert not begun[6].wait(0.1)
        assert ahead.get(8) == 8
        assert set(ahead._begun) == {8, 9}
        assert ahead.get(0) == 0
    assert not any(thread.is_alive() for thread in ahead._pool._threads)


def test_the_fingerprint_of_a_stream(batches, tmp_path, counting):
    base = batches().fingerprint()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(counting.read_bytes())
    same = SourceSection(path=str(copy), limit=23)
    assert batches(train=same, world=2, rank=1).fingerprint() == base
    copy.write_text(copy.read_text() + json.dumps({"prompt": "p", "completion": "c"}))
    changes = [{"train": same}, {"settings": {"seed": 6}}, {"max_length": 32}, {"packing": True}]
    changes += [{"shuffle_buffer": 9}, {"shuffle": False}, {"streaming": False}]
    prints = {batches(**change).fingerprint() for change in changes}
    assert len(prints | {base}) == len(changes) + 1
