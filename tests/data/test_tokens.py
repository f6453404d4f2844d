from __future__ import annotations

import pytest

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Row, prepare, prompt_ids, read_rows, tokenize_rows
from anygauge.interface import DataError, ModelError, RunFileError
from tests.helpers.tokenizer import FIXTURES, make_tokenizer


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def learned(rows, index):
    return rows.row(index)[rows.masked[index] :].tolist()


def test_start_prompt_answer_end_with_the_answer_learned(tokenizer):
    rows = tokenize_rows([Row("Größe?\n", "東京 🙂\r\n", "x:1")], tokenizer, max_length=64)
    answer = [*ids(tokenizer, "東京 🙂\r\n"), tokenizer.eos_token_id]
    assert rows.row(0).tolist() == [
        tokenizer.bos_token_id, *ids(tokenizer, "Größe?\n"), *answer
    ]  # fmt: skip
    assert learned(rows, 0) == answer
    assert tokenizer.decode(learned(rows, 0)[:-1]) == "東京 🙂\r\n"
    assert rows.origins == ("x:1",)


def test_generation_reads_the_tokens_that_training_masked(tokenizer):
    section = SourceSection(path=str(FIXTURES / "rows.jsonl"))
    source_rows = read_rows(section)
    rows = tokenize_rows(source_rows, tokenizer, max_length=256)
    assert len(rows) == len(source_rows)
    for index, row in enumerate(source_rows):
        assert prompt_ids(tokenizer, row.prompt) == rows.row(index)[: rows.masked[index]].tolist()
        assert learned(rows, index) == [*ids(tokenizer, row.text), tokenizer.eos_token_id]


def test_a_tokenizer_that_adds_no_start_token(tmp_path):
    tokenizer = make_tokenizer(tmp_path, adds_bos=False)
    rows = tokenize_rows([Row("a", "b", "x:1"), Row("", "bc", "x:2")], tokenizer, max_length=8)
    assert rows.row(0).tolist() == [*ids(tokenizer, "a"), *ids(tokenizer, "b"), 1]
    # Nothing stands before the first token of row 2, so it cannot be learned.
    assert rows.masked.tolist() == [1, 1]
    assert rows.report.supervised_tokens == 2 + len(ids(tokenizer, "bc"))


def test_an_end_token_that_the_tokenizer_adds_is_not_part_of_a_prompt(tokenizer):
    class AddsBoth:
        bos_token_id, eos_token_id = 0, 1

        def __call__(self, texts, add_special_tokens=True, verbose=True):
            plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
            if not add_special_tokens:
                return {"input_ids": plain}
            return {"input_ids": [0, *plain, 1]}

    assert prompt_ids(AddsBoth(), "Hi") == [0, *ids(tokenizer, "Hi")]


def test_loss_on_all_learns_the_prompt_too(tokenizer):
    rows = tokenize_rows([Row("pq\n", "r", "x:1")], tokenizer, max_length=64, loss_on="all")
    assert rows.masked.tolist() == [1]
    assert learned(rows, 0) == [*ids(tokenizer, "pq\n"), *ids(tokenizer, "r"), 1]


def test_what_is_too_long(tokenizer):
    rows = [
        Row("a\n", "b", "x:1"),
        Row("a\n", "b c d e f g h i j k", "x:2"),
        Row("a b c d e f g h i j k l\n", "b", "x:3"),
        Row("a\n", " \n", "x:4"),
    ]
    cut = tokenize_rows(rows, tokenizer, max_length=8)
    report = cut.report
    assert (report.rows, report.used, report.truncated) == (4, 2, 1)
    assert (report.dropped_long, report.dropped_empty) == (1, 1)
    assert cut.origins == ("x:1", "x:2")
    assert len(cut.row(1)) == 8
    assert tokenizer.eos_token_id not in cut.row(1).tolist()
    assert report.tokens == cut.lengths.sum()
    assert report.supervised_tokens == sum(len(learned(cut, n)) for n in range(2))
    dropped = tokenize_rows(rows, tokenizer, max_length=8, too_long="drop")
    assert dropped.origins == ("x:1",)
    assert (dropped.report.dropped_long, dropped.report.truncated) == (2, 0)
    everything = tokenize_rows(rows, tokenizer, max_length=8, loss_on="all")
    assert everything.origins == ("x:1", "x:2", "x:3")


def test_a_prompt_that_fills_the_sequence_exactly_is_dropped(tokenizer):
    rows = [Row("abc", "d", "x:1"), Row("", "d", "x:2")]
    length = len(prompt_ids(tokenizer, "abc"))
    assert tokenize_rows(rows, tokenizer, max_length=length).origins == ("x:2",)
    kept = tokenize_rows(rows, tokenizer, max_length=length + 1)
    assert kept.origins == ("x:1", "x:2")
    assert kept.supervised(0) == 1


@pytest.mark.parametrize("max_length", [2, 3, 7, 64])
@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_every_token_of_a_text_but_the_first_is_learned_once(tokenizer, max_length, too_long):
    text = "A track gauge is the distance between two rails. 東京\n\n🙂"
    rows = tokenize_rows(
        [Row(None, text, "t.txt:1")], tokenizer, max_length=max_length, too_long=too_long
    )
    whole = [tokenizer.bos_token_id, *ids(tokenizer, text), tokenizer.eos_token_id]
    assert [token for n in range(len(rows)) for token in learned(rows, n)] == whole[1:]
    assert rows.lengths.max() <= max_length
    assert rows.masked.tolist() == [1] * len(rows)
    assert rows.report.sequences == len(rows)
    assert (rows.report.used, rows.report.truncated) == (1, 0)
    for n in range(1, len(rows)):
        assert rows.row(n)[0] == rows.row(n - 1)[-1]
        assert rows.origins[n] == f"t.txt:1 (part {n + 1})"


def test_nothing_left_says_why(tokenizer):
    rows = [Row("a b c d e f\n", "b", "x:1"), Row("a", "", "x:2")]
    with pytest.raises(DataError) as caught:
        tokenize_rows(rows, tokenizer, max_length=4)
    assert "none of the 2 rows is left to use" in str(caught.value)
    assert "1 too long for data.max_length 4" in str(caught.value)
    assert "1 without an answer" in str(caught.value)
    with pytest.raises(DataError, match="no rows"):
        tokenize_rows([], tokenizer, max_length=4)


def test_refusals(tokenizer, tmp_path):
    with pytest.raises(RunFileError, match="max_length is 1"):
        tokenize_rows([Row("a", "b", "x:1")], tokenizer, max_length=1)
    endless = make_tokenizer(tmp_path)
    endless.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        tokenize_rows([Row("a", "b", "x:1")], endless, max_length=8)


def test_the_fingerprint_tells_tokens_and_masks_apart(tokenizer):
    rows = [Row("a\n", "b", "x:1")]
    first = tokenize_rows(rows, tokenizer, max_length=8).fingerprint()
    assert first == tokenize_rows(rows, tokenizer, max_length=9).fingerprint()
    masks = tokenize_rows(rows, tokenizer, max_length=8, loss_on="all").fingerprint()
    tokens = tokenize_rows([Row("a\n", "c", "x:1")], tokenizer, max_length=8).fingerprint()
    assert len({first, masks, tokens}) == 3


def test_prepare_holds_out_whole_rows(tokenizer):
    source = SourceSection(path=str(FIXTURES / "rows.jsonl"))
    data = DataSection(train=source, eval_fraction=0.2, max_length=128)
    prepared = prepare(data, tokenizer, seed=1)
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (32, 8)
    assert not set(prepared.train.origins) & set(prepared.eval.origins)
    assert prepared.report.rows == 32
    assert str(prepared.report).startswith("32 of 32 rows; ")
    assert prepare(data, tokenizer, seed=1).eval.origins == prepared.eval.origins
    assert prepare(data, tokenizer, seed=2).eval.origins != prepared.eval.origins


def test_prepare_with_an_evaluation_file_and_with_none(tokenizer):
    source = SourceSection(path=str(FIXTURES / "rows.jsonl"))
    other = SourceSection(path=str(FIXTURES / "alpaca.json"))
    both = prepare(DataSection(train=source, eval=other), tokenizer, seed=0)
    assert both.eval is not None
    assert (len(both.train), len(both.eval)) == (40, 8)
    assert prepare(DataSection(train=source), tokenizer, seed=0).eval is None
