"""Sources to tokenised rows: several of them, splits, the cache, and what is said of bad ones."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from anygauge.config.schema import DataSection
from anygauge.data import advice, described, peek, prepare
from anygauge.interface import DataError


def rows(*texts):
    return [{"prompt": text, "completion": text.upper()} for text in texts]


def section(train, cache="off", **fields):
    return DataSection(train=train, max_length=32, cache=str(cache), **fields)


def texts(found, tokenizer):
    return [tokenizer.decode(found.row(index)) for index in range(len(found))]


def origins(found):
    return [found.origin(index).rpartition("/")[2] for index in range(len(found))]


def test_several_sources_of_several_forms(source, tokenizer):
    sources = [
        source(rows("a", "b"), name="one.jsonl"),
        source("question,answer\nq,r\n", name="two.csv", prompt="question", completion="answer"),
        source("some words " * 12, name="three.txt"),
    ]
    peek(section(sources))
    found = prepare(section(sources), tokenizer, seed=0).train
    assert found.sizes[:2] == [2, 1]
    assert found.sizes[2] > 1
    beginning = ["one.jsonl:1", "one.jsonl:2", "two.csv:2"]
    assert origins(found)[:5] == [*beginning, "three.txt:1 (part 1)", "three.txt:1 (part 2)"]
    assert origins(prepare(section(sources[0], eval=sources[:2]), tokenizer, 0).eval) == beginning
    assert found.report.rows == 4
    assert found.report.sequences == len(found)
    assert texts(found, tokenizer)[2] == "<s>q\nr</s>"
    assert found.report.tokens == int(found.lengths.sum())
    for index in range(len(found)):
        loss_mask = found.loss_mask(index)
        assert not loss_mask[0]
        assert found.num_loss_tokens(index) == loss_mask.sum() > 0
        assert len(loss_mask) == len(found.row(index)) == found.lengths[index]


def test_rows_come_from_the_cache_and_are_the_same(source, tokenizer, tmp_path):
    lines = "\n".join(json.dumps(row) + "\n" for row in rows("a", "bcd"))
    sources = [source(lines, name="one.jsonl"), source("x\ny\n", name="two.txt")]
    data = section(sources, tmp_path / "cache", loss_on="all")
    first = prepare(data, tokenizer, seed=0).train
    again = prepare(data, tokenizer, seed=0).train
    assert first.built is None
    assert described(again) == f"{first.report} (from the cache of {again.built})"
    assert abs(time.mktime(time.strptime(again.built, "%Y-%m-%d %H:%M:%S")) - time.time()) < 600
    assert again.fingerprint() == first.fingerprint()
    assert origins(again) == origins(first)
    assert origins(again)[:2] == ["one.jsonl:1", "one.jsonl:3"]
    for index in range(len(first)):
        assert np.array_equal(again.loss_mask(index), first.loss_mask(index))
        assert (again.row(index).dtype, again.loss_mask(index).dtype) == (np.int32, np.bool_)
    assert texts(again, tokenizer) == texts(first, tokenizer)
    uncached = prepare(section(sources, loss_on="all"), tokenizer, seed=0).train
    assert uncached.fingerprint() == first.fingerprint()


def test_what_needs_another_entry(source, tokenizer, tmp_path):
    one = source(rows("a", "bcd"))
    data = section(one, tmp_path / "cache")

    def found(**changes):
        return prepare(data.model_copy(update=changes), tokenizer, seed=0).train

    assert found().built is None
    for change in ({"max_length": 16}, {"loss_on": "all"}):
        assert found(**change).built is None
    for change in ({"limit": 1}, {"template": "{prompt}:"}):
        assert found(train=one.model_copy(update=change)).built is None
    copy = found(train=source(rows("a", "bcd"), name="{copy}.jsonl"))
    assert copy.built is not None, "as the file that it is a copy of"
    assert origins(copy) == ["{copy}.jsonl:1", "{copy}.jsonl:2"]
    source(rows("b"))
    changed = found()
    assert changed.built is None
    assert texts(changed, tokenizer) == ["<s>b\nB</s>"]


def test_of_each_source_a_share_is_held_out_whole(source, tokenizer, tmp_path):
    long = " ".join(str(number) for number in range(60))
    sources = [
        source(rows(*"abcdefghij"), name="one.jsonl"),
        source([{"text": f"{letter} {long}"} for letter in "klmnopqrst"], name="two.jsonl"),
    ]
    data = section(sources, tmp_path / "cache", eval_fraction=0.2)
    prepared = prepare(data, tokenizer, seed=3)
    kept, held_out = prepared.train, prepared.eval
    assert (kept.report.rows, held_out.report.rows) == (16, 4)
    assert [piece.counts.rows for piece in held_out.pieces] == [2, 2]

    def records(found):
        return {origin.partition(" ")[0] for origin in origins(found)}

    assert not records(kept) & records(held_out)
    assert len(records(kept) | records(held_out)) == 20
    again = prepare(data, tokenizer, seed=3)
    assert again.train.built
    assert again.eval.built
    assert origins(again.eval) == origins(held_out)
    assert origins(prepare(data, tokenizer, seed=4).eval) != origins(held_out)


def test_a_source_of_which_nothing_is_left(source, tokenizer):
    good = source(rows("a"), name="good.jsonl")
    empty, long = {"prompt": "x", "completion": ""}, {"prompt": "x " * 99, "completion": "y"}
    bad = source([empty, long], name="bad.jsonl")
    with pytest.raises(DataError, match=r"none of the 2 rows of .*bad\.jsonl is left to") as caught:
        prepare(section([good, bad]), tokenizer, seed=0)
    assert "1 too long for data.max_length 32" in str(caught.value)
    assert "1 with nothing to learn" in str(caught.value)


def test_a_peek_names_the_source_and_reads_no_further(source):
    good = source(rows("a"), name="good.jsonl")
    late = "".join(json.dumps(row) + "\n" for row in rows(*"abcdefghijklmnopqrst")) + "no json\n"
    peek(section([good, source(late, name="late.jsonl")]))
    wrong = source([{"question": "a"}], name="wrong.jsonl")
    with pytest.raises(DataError, match=r"wrong\.jsonl:1: .*data\.train\[1\]\.prompt"):
        peek(section([good, wrong]))
    with pytest.raises(DataError, match=r"data\.eval\.prompt"):
        peek(section(good, eval=wrong))


def test_a_peek_looks_into_the_first_rows_unless_bad_ones_are_skipped(source):
    wrong = source([*rows("a"), {"prompt": "q", "completion": None}])
    with pytest.raises(DataError, match=r"data\.jsonl:2: column 'completion' holds null"):
        peek(section(wrong))
    peek(section(wrong, on_bad_row="skip"))


def test_what_a_process_of_this_run_has_built_is_not_from_the_cache(source, tokenizer, tmp_path):
    """One rank tokenises, the others find its entry: whoever reports, the run made it."""
    data = section(source(rows("a", "b")), tmp_path / "cache")
    first = prepare(data, tokenizer, seed=0, run="one").train
    beside = prepare(data, tokenizer, seed=0, run="one").train
    another = prepare(data, tokenizer, seed=0, run="two").train
    assert described(beside) == described(first) == str(first.report)
    assert "(from the cache of " in described(another)


def test_rows_of_a_part_are_counted_with_those_of_the_file(source, tokenizer):
    bad = [{"prompt": "x " * 99, "completion": "y"}] * 40
    said = r"none of the 38 rows that data\.eval_fraction 0\.05 leaves for training \(of 40 rows of"
    with pytest.raises(DataError, match=said):
        prepare(section(source(bad), eval_fraction=0.05), tokenizer, seed=0)
    good = rows(*"abcdefghijklmnopqrstuvwxyz")
    one = source([*good, *bad[:14]])
    for seed in range(60):  # until only bad rows are held out
        try:
            prepare(section(one, eval_fraction=0.05), tokenizer, seed=seed)
        except DataError as error:
            said = "data.eval_fraction 0.05 holds out for evaluation (of 40 rows of"
            assert f"none of the 2 rows that {said}" in str(error)
            return
    raise AssertionError("no seed held out two bad rows")


def test_a_length_that_cuts_many_rows_is_told_with_one_that_would_hold_them(source, tokenizer):
    long, longer = "x " * 40, "x " * 200
    given = [{"prompt": "a", "completion": "b"}] * 10
    given += [{"prompt": "a", "completion": long}] * 5 + [{"prompt": longer, "completion": "b"}] * 5
    data = section(source(given))
    found = prepare(data, tokenizer, seed=0).train
    assert (found.report.truncated, found.report.dropped_long) == (5, 5)
    held = found.report.length_for(0.95)
    text = advice(found, data)
    assert text == (
        "data.max_length 32 is too short for 10 of 20 rows (5 cut at the end, 5 left out); "
        f"{held:,} would hold 95% of the rows"
    )
    whole = data.model_copy(update={"max_length": held})
    enough = prepare(whole, tokenizer, seed=0).train
    assert advice(enough, whole) is None
    assert enough.report.truncated + enough.report.dropped_long == 0
