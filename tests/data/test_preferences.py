"""Pairs of answers: which rows have them, what becomes of both, and how they stay together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import EvaluationBatches, Layout, prepare
from anygauge.data.batches import RowBatches, Schedule
from anygauge.data.formats import Chat, Row, of_objective, parse
from anygauge.data.readers import Record
from anygauge.interface import DataError, RunFileError, Share

U = {"role": "user", "content": "q"}
A, B = ({"role": "assistant", "content": each} for each in "ab")
HUMAN = {"from": "human", "value": "q"}
GPT, WORSE = ({"from": "gpt", "value": each} for each in "ab")
NAMED = {"prompt": "messages", "chosen": "good", "rejected": "bad"}
LAYOUT: Any = {"max_length": 64, "pad_id": 0, "pairs": True}
TEXTS = {"prompt": "q", "chosen": "a", "rejected": "b"}


def pair_of(values: dict[str, Any], **fields: Any) -> Any:
    source = SourceSection(path="rows.jsonl", format="preference", **fields)
    return parse(Record(values, "rows.jsonl:7"), "preference", source, "data.train")


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, {}),
        ({"prompt": [U], "chosen": A, "rejected": B}, {}),
        ({"prompt": "q", "chosen": [A], "rejected": [B]}, {}),
        ({"chosen": [U, A], "rejected": [U, B]}, {}),
        ({"prompt": "q", "chosen": [U, A], "rejected": [U, B], "messages": [U, A]}, {}),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": WORSE}, {"prompt": "conversations"}),
        ({"messages": [U], "good": A, "bad": B}, NAMED),
    ],
)
def test_turns_of_every_layout_are_the_same_pair(
    values: dict[str, Any], fields: dict[str, str]
) -> None:
    pair = pair_of(values, **fields)
    assert pair.chosen == Chat((U, A), None, (1,), "rows.jsonl:7")
    assert pair.rejected == Chat((U, B), None, (1,), "rows.jsonl:7")


def test_texts_have_the_template_and_whole_texts_a_common_beginning() -> None:
    assert pair_of(TEXTS, template="Q: {prompt} A: ").chosen == Row("Q: q A: ", "a", "rows.jsonl:7")
    whole = pair_of({"chosen": "Q: q A: a", "rejected": "Q: q A: b"})
    assert (whole.chosen.prompt, whole.chosen.text, whole.rejected.text) == ("Q: q A:", " a", " b")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": "q", "chosen": "a"}, "no column 'rejected'"),
        ({"chosen": "same", "rejected": "same"}, "'chosen' and 'rejected' are the same"),
        ({"chosen": [U, A], "rejected": [A]}, "begin differently"),
        ({"prompt": [U], "chosen": [], "rejected": [A]}, "column 'chosen' holds an empty list"),
        ({"prompt": "q", "chosen": 1, "rejected": "b"}, "column 'chosen' holds"),
        ({"prompt": [U], "chosen": [U], "rejected": [A]}, "begin differently"),
    ],
)
def test_a_row_that_is_no_pair_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:7") as refused:
        pair_of(values)
    assert said in str(refused.value)


def test_format_and_objective_go_together() -> None:
    source = SourceSection(path="rows.jsonl")
    assert of_objective(source, "data.train", pairs=True).format == "preference"
    assert of_objective(source, "data.train", pairs=False) is source
    for row_format, pairs in (("messages", True), ("preference", False)):
        with pytest.raises(RunFileError, match=r"data\.train\.format"):
            of_objective(SourceSection(path="r", format=row_format), "data.train", pairs=pairs)


@pytest.fixture
def rows(tmp_path, tokenizer):
    def make(values, **data):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in values))
        section = DataSection(train={"path": str(path)}, cache="off", **data)
        return prepare(section, tokenizer, 0, pairs=True).train

    return make


def test_both_answers_have_one_fate(rows) -> None:
    long = "a b c d e f g h " * 4
    found = rows(
        [TEXTS, {**TEXTS, "chosen": ""}, {**TEXTS, "rejected": long}, {**TEXTS, "prompt": long}],
        max_length=24,
    )
    counts = found.report
    assert (counts.rows, counts.used, counts.sequences) == (4, 2, 4)
    assert (counts.dropped_empty, counts.dropped_long, counts.truncated) == (1, 1, 1)
    assert sum(counts.beyond.values()) == 2, "a pair counts once"
    dropped = rows([TEXTS, {**TEXTS, "rejected": long}], max_length=24, too_long="drop")
    assert len(dropped) == 2 and dropped.tokens(1).origin.endswith("pairs.jsonl:1 (part 2)")


def test_pairs_stay_together_whoever_reads_them(rows) -> None:
    found = rows([{**TEXTS, "chosen": "a" * n, "rejected": "b" * (9 - n)} for n in range(1, 8)])

    def steps(micro_batch: int, ranks: int = 1) -> list[list[str]]:
        every: list[list[list[str]]] = []
        for rank in range(ranks):
            layout = Layout(
                micro_batch=micro_batch,
                max_length=64,
                pad_id=0,
                pairs=True,
                share=Share(rank, ranks),
            )
            batches = RowBatches(found, Schedule(seed=3, global_batch=4), layout)
            assert [batches.normalizer(index) for index in range(batches.steps)] == [4, 3]
            laid = [batches.step(index) for index in range(batches.steps)]
            for batch in (one for step in laid for one in step):
                chosen, rejected = batch.origins[::2], batch.origins[1::2]
                assert [o.replace("part 1", "part 2") for o in chosen] == list(rejected)
                assert batch.input_ids.shape[0] == 2 * micro_batch
                labels = batch.shift_labels.numpy() != -100
                assert batch.loss_counts == tuple(labels.sum(axis=1).tolist())
                assert np.array_equal(batch.loss_rows, np.flatnonzero(labels))
            assert sum(batches.real_tokens(index) for index in range(2)) == found.lengths.sum()
            every.append([[o for one in step for o in one.origins] for step in laid])
        return [sorted(o for part in step for o in part) for step in zip(*every, strict=True)]

    assert steps(1) == steps(2) == steps(1, ranks=2)
    evaluation = EvaluationBatches(found, Layout(micro_batch=4, **LAYOUT))
    assert (len(evaluation), evaluation.normalizer) == (2, 7)
