"""Streamed batches: the same as prepared ones where they can be, and sound where they cannot."""

from __future__ import annotations

import json
import threading
from collections import Counter

import numpy as np
import pytest

from anygauge.config.schema import SourceSection
from anygauge.data.streams import Ahead
from anygauge.interface import DataError
from tests.data.conftest import content


class RankThreads:
    """Sums numbers of ranks that are threads, as collectives do: all take part, in one order."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=60)
        self.parts = [None] * count
        self.calls = 0

    def of(self, rank):
        def sum_on_ranks(values):
            self.parts[rank] = values
            self.barrier.wait()
            total = np.sum(self.parts, axis=0).tolist()
            self.calls += rank == 0
            self.barrier.wait()
            return total

        return sum_on_ranks

    def run(self, work):
        """What `work(rank)` returns on each rank."""
        results = [None] * len(self.parts)

        def one(rank):
            results[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in results
        return results


def test_without_shuffling_rows_come_in_the_order_of_the_file(batches):
    made = batches(shuffle=False, settings={"epochs": 2})
    read = [each for index in range(made.steps) for each in made.global_origins(index)]
    rows = [int(origin.rpartition(":")[2]) for origin in read]
    assert rows == sorted(set(rows)) * 2
    assert made.fingerprint() != batches().fingerprint()


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {}),
        ({"epochs": 2.3}, {}),
        ({"steps": 9}, {}),
        ({}, {"eval_fraction": 0.3}),
        ({"epochs": 2.0}, {"weights": (1.0, 0.5)}),
    ],
)
def test_streamed_steps_are_the_prepared_ones(batches, counting, settings, fields):
    fields = dict(fields)
    if "weights" in fields:
        weights = fields.pop("weights")
        fields["train"] = [SourceSection(path=str(counting), weight=weight) for weight in weights]
    streamed = batches(settings=settings, **fields)
    prepared = batches(settings=settings, streaming=False, **fields)
    assert streamed.steps == prepared.steps
    assert streamed.sequences_per_epoch == prepared.sequences_per_epoch
    for index in range(streamed.steps):
        assert content(streamed, index) == content(prepared, index)
        assert streamed.num_loss_tokens(index) == prepared.num_loss_tokens(index)
        assert streamed.real_tokens(index) == prepared.real_tokens(index)
        assert streamed.global_origins(index) == prepared.global_origins(index)
        assert streamed.epoch(index) == prepared.epoch(index)
    with pytest.raises(IndexError):
        streamed.step(streamed.steps)


@pytest.mark.parametrize("packing", [False, True])
def test_any_step_can_be_the_first(batches, packing):
    straight = batches(packing=packing, settings={"steps": 70})
    wanted = {index: content(straight, index) for index in range(70)}
    assert len({str(step) for step in wanted.values()}) == 70
    for first in (69, 64, 1, 33):
        resumed = batches(packing=packing, settings={"steps": 70})
        for index in range(first, min(first + 4, 70)):
            assert content(resumed, index) == wanted[index]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_streamed_steps(batches, packing, world):
    settings = {"global_batch_size": 8, "epochs": 1.4}
    whole = batches(packing=packing, micro=8, settings=settings)
    ranks = RankThreads(world)

    def work(rank):
        mine = batches(
            packing=packing, world=world, rank=rank, sums=ranks.of(rank), settings=settings
        )
        return [
            (content(mine, index), mine.num_loss_tokens(index), mine.real_tokens(index))
            for index in range(mine.steps)
        ], str(mine.rows.report)

    results = ranks.run(work)
    assert ranks.calls == (0 if packing else whole.steps), "once a step, or never"
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
    rows = [
        {"text": "one"},
        {"text": " "},
        {"text": " ".join(str(number) for number in range(99))},
        {"text": "two"},
    ]
    made = batches(train=source(rows), max_length=16, micro=4)
    (batch,) = made.step(0)
    assert sorted(origin.rpartition(":")[2] for origin in batch.origins) == ["1", "3 (part 1)", "4"]
    assert batch.input_ids.shape == (4, 16)
    assert made.real_tokens(0) == batch.tokens
    counts = made.rows.counts
    assert (counts.rows, counts.used, counts.sequences) == (4, 3, 3)
    assert (counts.dropped_empty, counts.truncated) == (1, 1)
    assert str(made.rows.report).startswith("streamed 3 of 4 rows; ")


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_without_anything_to_learn_is_an_error(batches, source, packing):
    empty = source([{"prompt": "x", "completion": ""}] * 9)
    with pytest.raises(DataError, match="holds anything to learn"):
        batches(train=empty, packing=packing, settings={"steps": 1}).num_loss_tokens(0)


def test_a_wrong_row_is_named_when_its_step_comes(batches, source):
    content = '{"text": "a"}\n' * 8 + "no json\n"
    made = batches(train=source(content), settings={"steps": 3})
    with pytest.raises(DataError, match=r"data\.jsonl:9: one JSON object per line"):
        for index in range(3):
            made.step(index)


def test_packs_are_full_and_every_row_is_read(batches, source):
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.6, 6000), 2, 60).astype(int)
    rows = [{"text": "7 " * length} for length in lengths.tolist()]
    made = batches(
        train=source(rows),
        packing=True,
        max_length=256,
        micro=8,
        settings={"global_batch_size": 16},
    )
    read, tokens = Counter(), 0
    for index in range(made.steps):
        read.update(made.global_origins(index))
        tokens += made.real_tokens(index)
        assert made.num_loss_tokens(index) > 0
    assert made.epoch(made.steps - 1) == 1
    assert max(read.values()) == 1
    assert len(read) + made.rows.left_out == 6000
    assert made.rows.left_out < 60
    # All but the last block, which ends with the data.
    whole = made.steps // made._block_steps * made._block_steps
    filled = sum(made.real_tokens(index) for index in range(whole)) / (whole * 16 * 256)
    assert filled > 0.9


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


def test_what_was_read_ahead_alone_is_not_counted(batches):
    settings = {"global_batch_size": 4, "steps": 70}
    for packing in (False, True):
        made = batches(packing=packing, settings=settings)
        made.step(66)
        assert not made.rows.counts.rows, packing
        made.num_loss_tokens(66)
        assert made.rows.counts.rows, packing


def test_the_fingerprint_of_a_stream(batches, tmp_path, counting):
    base = batches().fingerprint()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(counting.read_bytes())
    assert batches(train=SourceSection(path=str(copy)), world=2, rank=1).fingerprint() == base
    copy.write_text(copy.read_text() + json.dumps({"prompt": "p", "completion": "c"}))
    prints = {
        base,
        batches(train=SourceSection(path=str(copy))).fingerprint(),
        batches(settings={"seed": 6}).fingerprint(),
        batches(max_length=32).fingerprint(),
        batches(packing=True).fingerprint(),
        batches(eval_fraction=0.1).fingerprint(),
        batches(streaming=False).fingerprint(),
    }
    assert len(prints) == 7
