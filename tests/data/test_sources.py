from __future__ import annotations

import re

import pytest

from anygauge.config.schema import SourceSection
from anygauge.data import read_rows, render, render_alpaca
from anygauge.interface import DataError, RunFileError
from tests.helpers.tokenizer import FIXTURES

PAIR = {"prompt": "p", "completion": "c"}


def failure(section: SourceSection, error: type[Exception] = DataError) -> str:
    with pytest.raises(error) as caught:
        read_rows(section)
    return str(caught.value)


def test_prompt_and_completion_with_template_and_line_numbers(source):
    section = source([PAIR, {"prompt": "é\r\n", "completion": "東京 🙂"}], template="Q {prompt} A:")
    rows = read_rows(section)
    assert [(row.prompt, row.text) for row in rows] == [("Q p A:", "c"), ("Q é\r\n A:", "東京 🙂")]
    assert [row.origin for row in rows] == [f"{section.path}:1", f"{section.path}:2"]


def test_blank_lines_crlf_and_a_byte_order_mark_do_not_shift_line_numbers(source):
    text = '\ufeff{"prompt": "a", "completion": "b"}\r\n\r\n{"prompt": "c", "completion": "d"}\r\n'
    rows = read_rows(source(text))
    assert [(row.prompt, row.text) for row in rows] == [("a\n", "b"), ("c\n", "d")]
    assert rows[1].origin.endswith("data.jsonl:3")


def test_line_separators_inside_a_string_do_not_end_the_row(source):
    rows = read_rows(source([{"prompt": "a\u2028b\x85c", "completion": "d"}, PAIR]))
    assert rows[0].prompt == "a\u2028b\x85c\n"
    assert len(rows) == 2


def test_json_lists_give_the_index(source):
    section = source(
        '[{"prompt": "a", "completion": "b"}, {"prompt": 1, "completion": 2.5}]', "d.json"
    )
    rows = read_rows(section)
    assert rows[1].origin == f"{section.path}[1]"
    assert (rows[1].prompt, rows[1].text) == ("1\n", "2.5")


def test_json_lines_under_the_name_json(source):
    rows = read_rows(source([PAIR, PAIR], "d.json"))
    assert rows[1].origin.endswith("d.json:2")


def test_named_columns(source):
    section = source([{"question": "q", "answer": "a"}], prompt="question", completion="answer")
    assert read_rows(section)[0].prompt == "q\n"


def test_limit_takes_the_first_rows(source):
    rows = read_rows(source([{"prompt": str(n), "completion": "c"} for n in range(5)], limit=2))
    assert [row.prompt for row in rows] == ["0\n", "1\n"]


def test_alpaca_is_told_from_its_columns():
    rows = read_rows(SourceSection(path=str(FIXTURES / "alpaca.json")))
    assert len(rows) == 8
    assert rows[0].prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nName the largest ocean.\n\n### Response:\n"
    )
    assert rows[1].prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Translate the word to French.\n\n### Input:\nbread\n\n### Response:\n"
    )
    assert rows[1].text == "pain"


def test_alpaca_without_any_input_column(source):
    row = read_rows(source([{"instruction": "i", "output": "o"}]))[0]
    assert "### Input" not in row.prompt


@pytest.mark.parametrize("given", ["{instruction}", "{input}", "{prompt}", "{0}"])
def test_braces_in_the_data_are_data(given):
    assert render("<{prompt}{x}>", given) == f"<{given}{{x}}>"
    assert f"### Instruction:\n{given}\n\n### Input:\n{given}\n" in render_alpaca(given, given)


def test_text_columns(source):
    rows = read_rows(source([{"body": "words"}], text="body"))
    assert (rows[0].prompt, rows[0].text) == (None, "words")
    assert read_rows(source([{"text": "words"}]))[0].prompt is None


def test_plain_text_is_cut_at_blank_lines(source):
    section = source("one\r\ntwo\r\n\r\n \r\nthree\r\n", "notes.txt")
    rows = read_rows(section)
    assert [(row.prompt, row.text) for row in rows] == [(None, "one\ntwo"), (None, "three")]
    assert rows[1].origin == f"{section.path}:5"


def test_plain_text_without_blank_lines_has_one_document_a_line(source):
    rows = read_rows(source("\none\ntwo\n", "notes.txt"))
    assert [row.text for row in rows] == ["one", "two"]
    assert rows[0].origin.endswith("notes.txt:2")


def test_the_text_fixture_has_three_documents():
    rows = read_rows(SourceSection(path=str(FIXTURES / "text.txt")))
    assert len(rows) == 3
    assert "«rodadura desplazable»" in rows[2].text


# -- what cannot be read -----------------------------------------------------------------------


def test_a_wrong_column_lists_the_columns_and_the_nearest(source):
    message = failure(
        source([{"question": "q", "answer": "a"}], prompt="quesiton", completion="answer")
    )
    assert "data.jsonl:1: no column 'quesiton'" in message
    assert "columns here: question, answer" in message
    assert "set data.train.prompt to one of them" in message
    assert "did you mean 'question'?" in message


def test_messages_name_the_field_they_are_about(source):
    section = source([{"question": "q", "answer": "a"}], form="prompt_completion")
    with pytest.raises(DataError, match=re.escape("set data.eval.prompt to one of them")):
        read_rows(section, field="data.eval")


def test_a_column_missing_in_a_later_row_names_that_row(source):
    assert "data.jsonl:2: no column 'completion'" in failure(source([PAIR, {"prompt": "p"}]))


def test_a_misspelt_column_is_not_passed_over_for_alpaca(source):
    section = source([{"instruction": "i", "output": "o"}], prompt="instructions")
    assert "no column 'instructions'" in failure(section)


def test_auto_without_a_form_says_what_to_set(source):
    message = failure(source([{"question": "q", "answer": "a"}]))
    assert "columns here: question, answer" in message
    assert "data.train.prompt: question" in message


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "null"), ([1], "a list"), ({}, "an object"), (True, "true or false")],
)
def test_values_that_are_no_text_name_row_and_column(source, value, words):
    message = failure(source([PAIR, {"prompt": "p", "completion": value}]))
    assert f"data.jsonl:2: column 'completion' holds {words}" in message


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', "data.jsonl:2: one JSON object"),
        ("[1, 2]\n", "data.jsonl:1: a JSON object is expected, found a list"),
        ("[" * 100_000 + "\n", "data.jsonl:1: one JSON object"),
        ('{"prompt": "\\ud83d", "completion": "b"}', "half of a surrogate pair (U+D83D"),
        (" \n\n", "is empty"),
        (b'{"a": 1}\n{"b": "\xe9"}\n', "data.jsonl:2: not UTF-8 at byte 16 of the file (0xe9)"),
        ('{"prompt": "a"}'.encode("utf-16"), "it seems to be UTF-16"),
    ],
)
def test_malformed_lines(source, content, where):
    assert where in failure(source(content))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('[\n{"prompt": "a",\n}]', "d.json:3: not valid JSON"),
        ('{"data": []}', "found an object with the keys 'data'"),
        ("[]", "holds an empty list"),
        ("[{}, 3]", "d.json[1]: a JSON object is expected, found a number"),
        ("", "is empty"),
    ],
)
def test_malformed_lists(source, content, where):
    assert where in failure(source(content, "d.json"))


def test_files_that_are_not_there_or_of_another_kind(tmp_path, source):
    assert "no such file" in failure(SourceSection(path=str(tmp_path / "none.jsonl")))
    assert ".json, .jsonl, .txt" in failure(SourceSection(path="rows.parquet"))
    assert "is empty" in failure(source("\n \n", "notes.txt"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be read" in failure(SourceSection(path=str(tmp_path / "folder.jsonl")))


def test_settings_that_do_not_go_together(source):
    assert "has no columns" in failure(source("words", "notes.txt", form="alpaca"), RunFileError)
    assert "lacks {prompt}" in failure(source([PAIR], template="Question:"), RunFileError)
