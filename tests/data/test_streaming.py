"""Streamed batches: shuffled in blocks, every row once an epoch, the same from any step on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Ahead, Counts, Layout, Schedule, readers
from anygauge.data.prepare import packs_of
from anygauge.data.readers import RawRow
from anygauge.data.row_batches import pack
from anygauge.data.rows import Tokens
from anygauge.data.streaming import BlockOrder, PackedStream, StreamedRows
from anygauge.interface import DataError, RunFileError, ShapeKind, ShapePolicy
from tests.data.conftest import content

BAD = '{"text": "a"}\n' * 8 + "no json\n" + '{"text": "b"}\n' * 3


class KnownRows:
    """What is asked of streamed rows, whose lengths are known; a length of 0 leaves nothing."""

    name = "x"

    def __init__(self, lengths, size):
        self.lengths, self.size, self.length = lengths, size, len(lengths)
        self.counts = Counts()
        self.read = []

    def rows_in(self, number):
        return len(range(self.length)[number * self.size : (number + 1) * self.size])

    def block(self, number):
        self.read.append(number)
        return list(range(self.length))[number * self.size : (number + 1) * self.size]

    def encode(self, rows):
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


class RankThreads:
    """Ranks that are threads; all take part in a collective, in one order."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=60)
        self.parts = [None] * count
        self.sums = 0

    def gather(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def sum(self, rank, values):
        self.sums += rank == 0
        return np.sum(self.gather(rank, values), axis=0).tolist()

    def run(self, work):
        """What `work` returns on each rank, which is given its collectives."""

        def one(rank):
            return work(rank, sums=partial(self.sum, rank), texts=partial(self.gather, rank))

        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(one, range(len(self.parts))))


@given(size=st.integers(1, 40), length=st.integers(1, 100), seed=st.integers(0, 2**40))
def test_the_order_of_a_stream(size, length, seed):
    order = BlockOrder(KnownRows([1] * length, size), seed)
    positions = np.arange(3 * length)
    items = order.items(positions)
    for epoch in range(3):
        here = items[epoch * length : (epoch + 1) * length]
        assert sorted(here) == list(range(length))
        assert (here // size == np.arange(length) // size).all(), "blocks stay in their order"
    mixed = np.random.default_rng(0).permutation(positions)
    assert (order.items(mixed) == items[mixed]).all()


def test_the_order_of_a_stream_is_pinned():
    """A checkpoint of an earlier version is resumed in the same order."""
    order = BlockOrder(KnownRows([1] * 10, 5), 3)
    pinned = [2, 4, 0, 3, 1, 8, 5, 7, 6, 9, 3, 4, 0, 2, 1, 5, 7, 9, 8, 6]
    assert order.items(np.arange(20)).tolist() == pinned
    plain = BlockOrder(KnownRows([1] * 10, 5), 3, shuffle=False)
    assert plain.items(np.arange(20)).tolist() == [*range(10)] * 2


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
    found = [(made.global_origins(at), made.num_loss_tokens(at)) for at in range(steps)]
    assert all(origins for origins, _ in found)
    read = Counter(int(origin) for origins, _ in found for origin in origins)
    assert read == {row: epochs for row, length in enumerate(lengths) if length}
    assert sum(tokens for _, tokens in found) == epochs * sum(max(0, n - 1) for n in lengths)
    assert rows.counts.used == epochs * sum(map(bool, lengths)), "each block is counted once"
    assert made.epoch(steps - 1) == pytest.approx(epochs) or not counted
    with pytest.raises(IndexError):
        made.step(steps)
    done = data.draw(st.integers(0, steps))
    resumed = make(KnownRows(lengths, size))
    resumed.resume(made.state(done))
    for at in range(done, steps):
        assert (resumed.global_origins(at), resumed.num_loss_tokens(at)) == found[at]


def test_a_resumed_stream_of_packs_does_not_read_the_blocks_before():
    schedule = {"global_batch": 2, "steps": 40}
    state = packed(KnownRows([5] * 40, 10), **schedule).state(33)
    assert state == {"first_step": 30, "epoch": 1, "block": 2}
    rows = KnownRows([5] * 40, 10)
    resumed = packed(rows, **schedule)
    resumed.resume(state)
    resumed.num_loss_tokens(33)
    assert rows.read[0] == 2 and 1 not in rows.read


def test_blocks_are_read_once_though_steps_are_asked_for_early_and_late():
    """As the loop does: batches are laid out ahead, metrics and checkpoints come behind."""
    rows = KnownRows([5, 0] * 40, 2)
    made = packed(rows, global_batch=1, steps=40)
    for index in range(40):
        made.step(min(index + 3, 39))
        assert made.num_loss_tokens(index) == 4
        assert made.real_tokens(max(index - 1, 0)) == 5
        assert made.state(index)["block"] == index - 1 if index else not made.state(index)
    assert rows.read[:40] == list(range(40)) and len(rows.read) <= 41


def test_packs_of_a_block_are_dealt_evenly():
    made = packed(KnownRows([8] * 10, 10), global_batch=4, steps=3)
    assert [len(made.global_origins(index)) for index in range(3)] == [4, 3, 3]


def test_a_checkpoint_can_be_written_before_a_block_that_cannot_be_read(batches, source):
    fields = {"packing": True, "shuffle_buffer": 4, "settings": {"steps": 9}}
    made = batches(train=source(BAD), **fields)
    assert made.num_loss_tokens(0) > 0
    with pytest.raises(DataError, match=r"data\.jsonl:9: one JSON object per line"):
        [made.num_loss_tokens(index) for index in range(9)]
    assert made.state(2) == {"first_step": 1, "epoch": 0, "block": 1}
    resumed = batches(train=source('{"text": "a"}\n' * 9), **fields)
    resumed.resume(made.state(2))
    assert len(resumed.global_origins(2)) == 1


@pytest.mark.parametrize("settings", [{}, {"epochs": 2.3}, {"steps": 9}])
def test_without_shuffling_streamed_steps_are_the_prepared_ones(batches, settings):
    streamed = batches(settings=settings, shuffle=False, shuffle_buffer=5)
    prepared = batches(settings=settings, shuffle=False, streaming=False)
    assert streamed.steps == prepared.steps
    assert streamed.sequences_per_epoch == prepared.sequences_per_epoch
    for index in range(streamed.steps):
        assert content(streamed, index) == content(prepared, index)
        for of_step in ("num_loss_tokens", "real_tokens", "global_origins", "epoch"):
            assert getattr(streamed, of_step)(index) == getattr(prepared, of_step)(index)
    assert streamed.fingerprint() != batches(settings=settings, shuffle_buffer=5).fingerprint()
    with pytest.raises(IndexError):
        streamed.step(streamed.steps)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("limit", [None, 9])
def test_sources_are_streamed_one_after_another(batches, source, packing, limit):
    """Of several kinds; whether or not their numbers of rows are known."""
    sources = [
        source([{"text": f"first {n}"} for n in range(9)], name="one.jsonl", limit=limit),
        source("text\n" + "".join(f"second {n}\n" for n in range(9)), name="two.csv", limit=limit),
        source("\n".join(f"third {n}" for n in range(9)), name="three.txt", limit=limit),
    ]
    fields = {"train": sources, "packing": packing, "shuffle_buffer": 6}
    fields["settings"] = {"steps": 20, "global_batch_size": 2, "seed": 1}
    made = batches(**fields)
    read = [at.rpartition("/")[2] for n in range(20) for at in made.global_origins(n)]
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
        f"rows of {counting}, read and tokenised while training, shuffled in blocks of 5"
    )
    for index in range(20):
        assert content(known, index) == content(unknown, index)
    assert unknown.rows.length == 23
    for first in (19, 11, 6, 5):
        later = batches(**fields, train=SourceSection(path=str(counting)))
        assert content(later, first) == content(known, first)
    assert known.epoch(19) == pytest.approx(80 / 23)


def test_epochs_need_a_number_of_rows(batches, counting):
    said = r"does not know how many rows .*rows\.jsonl has before it reaches the end.*train\.steps"
    with pytest.raises(RunFileError, match=said):
        batches(train=SourceSection(path=str(counting)))
    assert batches(train=SourceSection(path=str(counting), limit=13)).steps == 4
    with pytest.raises(DataError, match=r"ends after 23 rows, but .* promises 40; set limit to 23"):
        too_many = batches(train=SourceSection(path=str(counting), limit=40))
        for index in range(too_many.steps):
            too_many.num_loss_tokens(index)


@pytest.mark.parametrize("packing", [False, True])
def test_any_step_can_be_the_first(batches, packing):
    fields = {"packing": packing, "shuffle_buffer": 8, "settings": {"steps": 70}}
    straight = batches(**fields)
    straight.step(66)
    assert not straight.rows.counts.rows, "what was read ahead alone is not counted"
    straight.num_loss_tokens(66)
    assert straight.rows.counts.rows
    wanted = {index: content(straight, index) for index in range(70)}
    assert len({str(step) for step in wanted.values()}) > 30
    for first in (69, 64, 1, 33):
        for state in ({}, straight.state(first)):
            resumed = batches(**fields)
            resumed.resume(state)
            for index in range(first, min(first + 4, 70)):
                assert content(resumed, index) == wanted[index]


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_read_once_an_epoch(batches, packing, monkeypatch):
    """Also where ranks look at each other's rows, in steps of several blocks."""
    starts, read_from = [], StreamedRows._from
    monkeypatch.setattr(
        StreamedRows, "_from", lambda rows, start: starts.append(start) or read_from(rows, start)
    )
    shapes = ShapePolicy(kind=ShapeKind.BUCKETED, buckets=8)
    fields = {"packing": packing, "shuffle_buffer": 5, "settings": {"steps": 15}}
    made = batches(world=2, shapes=shapes, **fields)
    for index in range(15):
        made.step(index)
    epochs = 1 + made.epoch(14)
    assert set(starts) == {0} and len(starts) <= epochs


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_streamed_steps(batches, packing, world):
    settings = {"global_batch_size": 8, "epochs": 1.4}
    fields = {"packing": packing, "settings": settings, "shuffle_buffer": 16}
    whole = batches(micro=8, **fields)
    ranks = RankThreads(world)

    def work(rank, **collectives):
        mine = batches(world=world, rank=rank, **collectives, **fields)
        return [
            (content(mine, index), mine.num_loss_tokens(index), mine.real_tokens(index))
            for index in range(mine.steps)
        ], str(mine.rows.report)

    results = ranks.run(work)
    assert ranks.sums == (0 if packing else whole.steps), "once a step, or never"
    for index in range(whole.steps):
        (together,) = whole.step(index)
        steps = [steps[index] for steps, _ in results]
        turns = zip(*(step[0] for step in steps), strict=True)
        origins = [origin for turn in turns for _, _, origins in turn for origin in origins]
        assert tuple(origins) == together.origins
        assert {step[1] for step in steps} == {whole.num_loss_tokens(index)}
        assert together.num_loss_tokens == whole.num_loss_tokens(index)
        assert {step[2] for step in steps} == {together.tokens}
    assert {report for _, report in results} == {str(whole.rows.report)}


def test_what_yields_nothing_is_a_dummy_and_what_is_long_is_cut(batches, source):
    rows = [{"text": text} for text in ("one", " ", " ".join(map(str, range(99))), "two")]
    made = batches(train=source(rows, limit=4), max_length=16, micro=4)
    (batch,) = made.step(0)
    assert sorted(origin.rpartition(":")[2] for origin in batch.origins) == ["1", "3 (part 1)", "4"]
    assert batch.input_ids.shape == (4, 16)
    assert made.real_tokens(0) == batch.tokens
    counts = made.rows.counts
    assert (counts.rows, counts.used, counts.sequences) == (4, 3, 3)
    assert (counts.dropped_empty, counts.truncated) == (1, 1)
    assert str(made.rows.report).startswith("streamed 3 of 4 rows; ")


def test_a_step_may_hold_nothing_to_learn_but_packs_do(batches, source):
    empty = {"prompt": "x", "completion": ""}
    made = batches(train=source([empty] * 5), settings={"steps": 2})
    assert (made.num_loss_tokens(0), made.real_tokens(0)) == (0, 0)
    assert [batch.tokens for batch in made.step(0)] == [0, 0]
    packs = batches(train=source([empty] * 5), packing=True, settings={"steps": 2})
    with pytest.raises(DataError, match=r"none of the rows of .* holds anything to learn; see"):
        packs.num_loss_tokens(0)
    late = source([empty] * 5 + [{"prompt": "x", "completion": "y"}])
    packs = batches(train=late, packing=True, shuffle_buffer=2, settings={"steps": 2})
    assert packs.num_loss_tokens(0) == packs.num_loss_tokens(1) > 0


def test_a_wrong_row_of_one_rank_ends_the_step_on_all(batches, source):
    train = source(BAD)

    def work(rank, **collectives):
        fields = {"train": train, "shuffle": False, "settings": {"steps": 3}}
        mine = batches(world=2, rank=rank, **collectives, **fields)
        assert mine.num_loss_tokens(1) > 0
        with pytest.raises(DataError) as caught:
            mine.num_loss_tokens(2)
        return str(caught.value)

    of_first, of_second = RankThreads(2).run(work)
    assert "data.jsonl:9: one JSON object per line" in of_first
    assert of_second == of_first


@pytest.mark.parametrize("packing", [False, True])
def test_wrong_rows_that_are_skipped_are_counted_and_named(batches, source, packing):
    fields = {"packing": packing, "on_bad_row": "skip", "settings": {"epochs": 1}}
    made = batches(train=source(BAD, limit=12), **fields)
    read = Counter(at for index in range(made.steps) for at in made.global_origins(index))
    assert all(made.num_loss_tokens(index) for index in range(made.steps))
    counts = made.rows.counts
    assert (counts.rows, counts.used, counts.skipped) == (12, 11, 1)
    assert len(read) == (11 if packing else 12), "a place of which nothing is left"
    assert "; 1 skipped as bad" in made.rows.report
    (said,) = made.rows.bad
    assert "data.jsonl:9: one JSON object per line" in said


def test_packs_are_full_and_counted_once(batches, source, tmp_path, monkeypatch):
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.6, 3000), 2, 60).astype(int)
    fields = {"train": source([{"text": "7 " * n} for n in lengths.tolist()]), "packing": True}
    fields |= {"max_length": 256, "micro": 8, "cache": str(tmp_path / "cache")}
    fields["shuffle_buffer"] = 1000
    made = batches(**fields, settings={"global_batch_size": 16})
    read = Counter(at for index in range(made.steps) for at in made.global_origins(index))
    assert len(read) == 3000 and set(read.values()) == {1}
    packs = packs_of(made.rows, DataSection(**{k: v for k, v in fields.items() if k != "micro"}))
    assert made.steps == sum(-(-each // 16) for each in packs)
    assert made.sequences_per_epoch == sum(packs)
    assert made.epoch(made.steps - 1) == 1
    filled = sum(made.real_tokens(index) for index in range(made.steps)) / (sum(packs) * 256)
    assert filled > 0.95
    monkeypatch.setattr("anygauge.data.streaming.StreamedRows.packs", None)
    again = batches(**fields, settings={"global_batch_size": 16})
    assert again.steps == made.steps, "from the cache"


def test_no_more_than_two_blocks_are_held(batches, source, monkeypatch):
    held, most, lock = set(), [0], threading.Lock()

    class Counted(RawRow):
        def __new__(cls, *args):
            made = super().__new__(cls, *args)
            with lock:
                # Not a row that another test's thread still reads ahead.
                if args[1] == b'{"text": "counted"}\n':
                    held.add(id(made))
                most[0] = max(most[0], len(held))
            return made

        def __del__(self):
            with lock:
                held.discard(id(self))

    monkeypatch.setattr(readers, "RawRow", Counted)
    train = source([{"text": "counted"}] * 230)
    made = batches(train=train, shuffle_buffer=32, settings={"steps": 100})
    for index in range(made.steps):
        made.step(index)
    assert 32 < most[0] <= 3 * 32 + 2, "the block that is read, the next, and one in the making"


def test_the_reading_thread_is_ahead_and_keeps_little():
    begun = {index: threading.Event() for index in range(10)}
    ahead = Ahead(lambda index: begun[index].set() or index, 10, depth=2)
    assert ahead.get(3) == 3
    assert begun[5].wait(60), "two more are worked out unasked"
    assert not begun[6].wait(0.1)
    assert ahead.get(8) == 8
    assert set(ahead._begun) == {8, 9}
    assert ahead.get(0) == 0


def test_two_threads_may_ask_if_one_is_a_little_behind():
    times = [0] * 12

    def work(index):
        times[index] += 1
        return index

    with Ahead(work, len(times), depth=2, behind=2) as ahead:
        for index in range(10):
            assert ahead.get(index + 2) == index + 2
            assert ahead.get(index) == index
    assert times == [1] * 12, "nothing is done twice"
    assert not any(thread.is_alive() for thread in ahead._pool._threads)


def test_the_fingerprint_of_a_stream(batches, tmp_path, counting):
    base = batches().fingerprint()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(counting.read_bytes())
    same = SourceSection(path=str(copy), limit=23)
    assert batches(train=same, world=2, rank=1).fingerprint() == base
    copy.write_text(copy.read_text() + json.dumps({"prompt": "p", "completion": "c"}))
    changes = [{"train": same}, {"settings": {"seed": 6}}, {"max_length": 32}, {"packing": True}]
    changes += [{"shuffle_buffer": 9}, {"streaming": False}]
    prints = {batches(**change).fingerprint() for change in changes}
    assert len(prints | {base}) == len(changes) + 1
