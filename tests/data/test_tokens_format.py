"""Rows that were tokenised elsewhere: `input_ids` with `labels`, with `loss_mask`, or alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Record, prepare
from anygauge.data.encode import CUT, EMPTY, LONG, WHOLE
from anygauge.interface import DataError
from tests.helpers.masks import encoder

ROWS = [
    {"input_ids": [0, 5, 6, 7, 1], "labels": [-100, -100, 6, 7, 1]},
    {"input_ids": [9, 8], "labels": [-100, 8]},
]


def encoded(tokenizer: Any, row: dict[str, Any], **data: Any) -> Any:
    [one] = encoder(tokenizer, "tokens", **data).encode([Record(row, "t.jsonl:7")])
    return one


@pytest.mark.parametrize(
    ("more", "mask"),
    [
        ({"labels": [-100, -100, 6, 7]}, [False, False, True, True]),
        ({"labels": [0, 5, -100, 7]}, [False, True, False, True]),
        ({"loss_mask": [0, 0, 1, 1]}, [False, False, True, True]),
        ({"loss_mask": [True, False, False, True]}, [False, False, False, True]),
        ({"attention_mask": [1, 1, 1, 1]}, [False, True, True, True]),
        ({}, [False, True, True, True]),
    ],
)
def test_ids_as_they_are_and_their_mask(tokenizer, more, mask):
    one = encoded(tokenizer, {"input_ids": [0, 5, 6, 7], **more})
    assert one.ids.tolist() == [0, 5, 6, 7]  # nothing is put before or behind
    assert one.loss_mask.tolist() == mask
    every = encoded(tokenizer, {"input_ids": [0, 5, 6, 7], **more}, loss_on="all")
    assert every.loss_mask.tolist() == [False, True, True, True]


@given(
    ids=st.lists(st.integers(0, 399), max_size=12),
    length=st.integers(2, 14),
    too_long=st.sampled_from(["truncate", "drop"]),
    data=st.data(),
)
def test_labels_and_mask_say_the_same_and_long_rows_are_cut_or_dropped(
    tokenizer, ids, length, too_long, data
):
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    labels = [token if has_loss else -100 for token, has_loss in zip(ids, mask, strict=True)]
    if not any(mask[1:]):
        fate = EMPTY
    elif len(ids) <= length:
        fate = WHOLE
    else:
        fate = LONG if too_long == "drop" or not any(mask[1:length]) else CUT
    kept = length if fate in (WHOLE, CUT) else 0
    for more in ({"labels": labels}, {"loss_mask": mask}):
        one = encoded(tokenizer, {"input_ids": ids, **more}, max_length=length, too_long=too_long)
        assert one.fate == fate
        assert one.ids.tolist() == ids[:kept]
        assert one.loss_mask.tolist() == [False, *mask[1:]][:kept]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"labels": [1]}, "no column 'input_ids'; columns here: labels; rows of this format need"),
        ({"input_ids": 3}, "column 'input_ids' holds a number; a list of numbers is expected"),
        ({"input_ids": "a"}, "column 'input_ids' holds text that is not JSON ('a'); a list of"),
        ({"input_ids": [1, -1]}, "input_ids[1] is -1; whole numbers from 0 are expected"),
        ({"input_ids": [1.0]}, "input_ids[0] is 1.0; whole numbers from 0 are expected"),
        ({"input_ids": [1, True]}, "input_ids[1] is True; whole numbers"),
        ({"input_ids": [None]}, "input_ids[0] is None; whole numbers"),
        ({"input_ids": ["1"]}, "input_ids[0] is '1'; whole numbers"),
        ({"input_ids": [[1]]}, "input_ids[0] is [1]; whole numbers"),
        (
            {"input_ids": [1, 400]},
            "input_ids[1] is 400, but this tokenizer has 400 tokens (0 to 399); use the tokenizer "
            "that the rows were made with",
        ),
        ({"input_ids": [10**30]}, "input_ids[0] is 1000000000000000000000000000000, but this"),
        (
            {"input_ids": [1, 2], "labels": [-100]},
            "'input_ids' has 2 values and 'labels' 1; both have one for each token",
        ),
        (
            {"input_ids": [1, 2], "loss_mask": [0, 1, 1]},
            "'input_ids' has 2 values and 'loss_mask' 3; both have one for each token",
        ),
        (
            {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
            "labels[0] is 2; valid: 1, which is input_ids[0], or -100 for no loss. Labels are not "
            "shifted: each stands at the place of its own token",
        ),
        ({"input_ids": [1], "labels": [True]}, "labels[0] is True; valid: 1, which"),
        ({"input_ids": [1], "labels": [None]}, "labels[0] is None; valid: 1, which"),
        ({"input_ids": [1], "labels": None}, "column 'labels' holds null; a list of numbers"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask[0] is 2; valid: 0, 1, false, true"),
        ({"input_ids": [1], "loss_mask": [0.5]}, "loss_mask[0] is 0.5; valid: 0, 1"),
        (
            {"input_ids": [1], "labels": [1], "loss_mask": [1]},
            "the row has 'labels' and 'loss_mask'; give one of them",
        ),
        (
            {"input_ids": [1, 2, 2], "attention_mask": [1, 1, 0]},
            "attention_mask[2] is 0, which is padding; rows have none: remove these tokens",
        ),
    ],
)
def test_each_refusal_names_the_row_what_it_has_and_what_is_valid(tokenizer, row, said):
    with pytest.raises(DataError) as caught:
        encoded(tokenizer, row)
    assert str(caught.value).startswith(f"t.jsonl:7: {said}")


@pytest.mark.parametrize("small", [False, True], ids=["JSON", "int32"])
def test_rows_of_a_file(small, source, tmp_path, tokenizer):
    train = source(ROWS)
    if small:  # as `datasets` writes them
        kinds = {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int64())}
        table = pa.Table.from_pylist(ROWS, schema=pa.schema(kinds))
        train = SourceSection(path=str(tmp_path / "stream.arrow"))
        with pa.ipc.new_stream(train.path, table.schema) as writer:
            writer.write_table(table)
    rows = prepare(DataSection(train=train, cache="off"), tokenizer, seed=0).train
    found = [(rows.tokens(n).ids.tolist(), rows.tokens(n).loss_mask.tolist()) for n in range(2)]
    assert found == [
        ([0, 5, 6, 7, 1], [False, False, True, True, True]),
        ([9, 8], [False, True]),
    ]
    assert rows.report.num_loss_tokens == 4


def test_a_bad_row_ends_the_preparation_or_is_skipped(source, tokenizer):
    data = DataSection(train=source([*ROWS, {"input_ids": [400]}]), cache="off")
    with pytest.raises(DataError, match=r"data\.jsonl:3: input_ids\[0\] is 400, but this"):
        prepare(data, tokenizer, seed=0)
    skipping = data.model_copy(update={"on_bad_row": "skip"})
    assert prepare(skipping, tokenizer, seed=0).train.report.skipped == 1
