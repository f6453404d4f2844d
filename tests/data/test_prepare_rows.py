"""Sources to tokenized rows: several of them, splits, the cache, and what is said of bad ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from anygauge.config.schema import DataSection
from anygauge.data import advice, describe_rows, peek, prepare
from anygauge.interface import DataError


def rows(*texts):
    return [{"prompt": text, "completion": text.upper()} for text in texts]


def section(train, cache="off", **fields):
    return DataSection(train=train, max_length=32, cache=str(cache), **fields)


def content(found, tokenizer):
    """Of each sequence: its text, its loss mask, and the end of its origin."""
    every = [found.tokens(index) for index in range(len(found))]
    assert all(each.ids.dtype == np.int32 and each.loss_mask.dtype == np.bool_ for each in every)
    return [
        (tokenizer.decode(each.ids), each.loss_mask.tolist(), each.origin.rpartition("/")[2])
        for each in every
    ]


def origins(found):
    return [found.tokens(index).origin.rpartition("/")[2] for index in range(len(found))]


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
    assert (found.report.rows, found.report.sequences) == (4, len(found))
    masks = [loss_mask for _, loss_mask, _ in content(found, tokenizer)]
    assert content(found, tokenizer)[2][0] == "<s>q\nr</s>"
    assert [len(each) for each in masks] == found.lengths.tolist()
    assert [sum(each) for each in masks] == found.column("num_loss_tokens").tolist()
    assert found.report.tokens == sum(map(len, masks))
    assert not any(each[0] for each in masks)
    assert all(map(any, masks))


def test_rows_come_from_the_cache_and_are_the_same(source, tokenizer, tmp_path):
    """One rank tokenizes, the others find its entry: whoever reports, the run made it."""
    lines = "\n".join(json.dumps(row) + "\n" for row in rows("a", "bcd"))
    sources = [source(lines, name="one.jsonl"), source("x\ny\n", name="two.txt")]
    data = section(sources, tmp_path / "cache", loss_on="all")
    first, beside, again = (
        prepare(data, tokenizer, seed=0, run=run).train for run in ("one", "one", "two")
    )
    uncached = prepare(section(sources, loss_on="all"), tokenizer, seed=0).train
    assert describe_rows(beside) == describe_rows(first) == str(first.report)
    assert describe_rows(again) == f"{first.report} (from the cache of {again.built})"
    assert content(again, tokenizer) == content(uncached, tokenizer) == content(first, tokenizer)
    assert uncached.fingerprint() == again.fingerprint() == first.fingerprint()
    assert origins(again)[:2] == ["one.jsonl:1", "one.jsonl:3"]


def test_what_needs_another_entry(source, tokenizer, tmp_path):
    one = source(rows("a", "bcd"))
    data = section(one, tmp_path / "cache")

    def found(**changes):
        return prepare(data.model_copy(update=changes), tokenizer, seed=0).train

    others = [one.model_copy(update={"limit": 1}), one.model_copy(update={"template": "{prompt}:"})]
    changes = [{}, {"max_length": 16}, *({"train": other} for other in others)]
    assert [found(**change).built for change in changes] == [None] * 4
    copy = found(train=source(rows("a", "bcd"), name="{copy}.jsonl"))
    assert copy.built is not None, "as the file that it is a copy of"
    assert origins(copy) == ["{copy}.jsonl:1", "{copy}.jsonl:2"]
    source(rows("b"))
    changed = found()
    assert changed.built is None
    assert content(changed, tokenizer)[0][0] == "<s>b\nB</s>"


def test_of_each_source_a_share_is_held_out_whole(source, tokenizer, tmp_path):
    long = " ".join(str(number) for number in range(60))
    sources = [
        source(rows(*"abcdefghij"), name="one.jsonl"),
        source([{"text": f"{letter} {long}"} for letter in "klmnopqrst"], name="two.jsonl"),
    ]
    data = section(sources, tmp_path / "cache", eval_fraction=0.2)
    prepared, again = (prepare(data, tokenizer, seed=3) for _ in range(2))
    kept, held_out = prepared.train, prepared.eval
    assert (kept.report.rows, held_out.report.rows) == (16, 4)
    assert [piece.counts.rows for piece in held_out.pieces] == [2, 2]
    of_kept = {origin.partition(" ")[0] for origin in origins(kept)}
    of_held_out = {origin.partition(" ")[0] for origin in origins(held_out)}
    assert len(of_kept) + len(of_held_out) == len(of_kept | of_held_out) == 20
    assert again.train.built and again.eval.built
    assert content(again.eval, tokenizer) == content(held_out, tokenizer)
    assert origins(prepare(data, tokenizer, seed=4).eval) != origins(held_out)


def test_a_source_of_which_nothing_is_left(source, tokenizer):
    good = source(rows("a"), name="good.jsonl")
    empty, long = {"prompt": "x", "completion": ""}, {"prompt": "x " * 99, "completion": "y"}
    bad = source([empty, long], name="bad.jsonl")
    many = source([long] * 40, name="many.jsonl")
    few = source([*rows(*"abcdefghijklmnopqrstuvwxyz"), *[long] * 14])
    part = {"eval_fraction": 0.05}
    for data, said in (
        (
            section([good, bad]),
            r"none of the 2 rows of .*bad\.jsonl is left to use: 1 too long for data\.max_length "
            r"32 \(.*\); 1 with nothing to learn",
        ),
        (
            section(many, **part),
            r"none of the 38 rows that data\.eval_fraction 0\.05 leaves for training \(of 40 rows",
        ),
        (
            section(few, **part),
            r"of the 2 rows that data\.eval_fraction 0\.05 holds out for evaluation \(of 40 rows",
        ),
    ):
        with pytest.raises(DataError, match=said):
            for seed in range(60):  # until only bad rows are held out
                prepare(data, tokenizer, seed=seed)


def test_a_peek_names_the_source_and_reads_no_further(source):
    good = source(rows("a"), name="good.jsonl")
    late = "".join(json.dumps(row) + "\n" for row in rows(*"abcdefghijklmnopqrst")) + "no json\n"
    peek(section([good, source(late, name="late.jsonl")]))
    wrong = source([{"question": "a"}], name="wrong.jsonl")
    bad = source([*rows("a"), {"prompt": "q", "completion": None}])
    for data, said in (
        (section([good, wrong]), r"wrong\.jsonl:1: .*data\.train\[1\]\.prompt"),
        (section(good, eval=wrong), r"data\.eval\.prompt"),
        (section(bad), r"data\.jsonl:2: column 'completion' holds null"),
    ):
        with pytest.raises(DataError, match=said):
            peek(data)
    peek(section(bad, on_bad_row="skip"))


def test_a_length_that_cuts_many_rows_is_told_with_one_that_would_hold_them(source, tokenizer):
    lengths = [(1, 1)] * 10 + [(1, 40)] * 5 + [(200, 1)] * 5
    data = section(source([{"prompt": "x " * a, "completion": "y " * b} for a, b in lengths]))
    found = prepare(data, tokenizer, seed=0).train
    held = found.report.length_for(0.95)
    assert advice(found, data) == (
        "data.max_length 32 is too short for 10 of 20 rows (5 cut at the end, 5 left out); "
        f"{held:,} would hold 95% of the rows"
    )
    whole = data.model_copy(update={"max_length": held})
    enough = prepare(whole, tokenizer, seed=0).train
    assert advice(enough, whole) is None
    assert enough.report.truncated + enough.report.dropped_long == 0
