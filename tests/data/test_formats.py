from __future__ import annotations

import json
from typing import Any

import pytest

from anygauge.config.schema import SourceSection
from anygauge.data.chat import Chat
from anygauge.data.formats import (
    Row,
    detect_format,
    parse,
    parse_all,
    prompt_template,
    render,
    render_alpaca,
)
from anygauge.data.records import Record
from anygauge.interface import DataError, RunFileError
from tests.helpers.tokenizer import FIXTURES

PAIR = {"prompt": "p", "completion": "c"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def record(values: dict[str, Any], line: int = 1) -> Record:
    return Record(values, f"data.jsonl:{line}")


def section(path: str = "data.jsonl", **fields: Any) -> SourceSection:
    return SourceSection(path=path, **fields)


def row(values: dict[str, Any], **fields: Any) -> Row:
    result = either(values, **fields)
    assert isinstance(result, Row)
    return result


def either(values: dict[str, Any], **fields: Any) -> Row | Chat:
    source = section(**fields)
    first = record(values)
    return parse(first, detect_format(first, source, "data.train"), source, "data.train")


def failure(
    values: dict[str, Any],
    error: type[Exception] = DataError,
    field: str = "data.train",
    **fields: Any,
) -> str:
    source, first = section(**fields), record(values)
    with pytest.raises(error) as caught:
        parse(first, detect_format(first, source, field), source, field)
    return str(caught.value)


# -- which format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fields", "form"),
    [
        (PAIR, {}, "prompt_completion"),
        ({"prompt": "p", "messages": TURNS, "prompt_id": "1"}, {}, "messages"),
        ({"conversations": SHAREGPT, "tools": ""}, {}, "sharegpt"),
        ({"instruction": "i", "output": "o"}, {}, "alpaca"),
        ({"text": "t", "url": "u"}, {}, "text"),
        ({"question": "q", "answer": "a"}, {"prompt": "question"}, "prompt_completion"),
        ({"chat": TURNS}, {"messages": "chat"}, "messages"),
        ({"chat": SHAREGPT}, {"conversations": "chat"}, "sharegpt"),
        ({"prompt": "p", "completion": "c", "body": "t"}, {"text": "body"}, "text"),
        ({"instruction": "i", "output": "o"}, {"format": "text"}, "text"),
        ({"text": "words"}, {"path": "notes.TXT"}, "text"),
    ],
)
def test_the_format_is_detected_from_run_file_path_and_columns(values, fields, form):
    assert detect_format(record(values), section(**fields), "data.train") == form


def test_auto_without_a_form_says_what_to_set():
    message = failure({"question": "q", "answer": "a"})
    assert "columns here: question, answer" in message
    assert "data.train.prompt: question" in message
    assert "data.train.messages" in message


def test_settings_that_do_not_go_together():
    with pytest.raises(RunFileError, match="has no columns"):
        detect_format(record({"text": "t"}), section("notes.txt", format="alpaca"), "data.train")
    assert "lacks {prompt}" in failure(PAIR, RunFileError, template="Question:")
    # A template is of no use to the other formats, and does no harm.
    assert row({"text": "t"}, template="Question:").text == "t"


# -- prompts, answers, texts ----------------------------------------------------------------------


def test_prompt_and_completion_with_template():
    assert row(PAIR, template="Q {prompt} A:") == Row("Q p A:", "c", "data.jsonl:1")
    other = {"prompt": "é\r\n", "completion": "東京 🙂"}
    assert row(other, template="Q {prompt} A:") == Row("Q é\r\n A:", "東京 🙂", "data.jsonl:1")


def test_named_columns():
    values = {"question": "q", "answer": "a"}
    assert row(values, prompt="question", completion="answer").prompt == "q\n"
    assert row({"body": "words"}, text="body") == Row(None, "words", "data.jsonl:1")


def test_alpaca_prompts_with_and_without_an_input():
    rows = [row(values) for values in json.loads((FIXTURES / "alpaca.json").read_text())]
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
    for without in ({}, {"input": None}, {"input": ""}):
        prompt = row({"instruction": "i", "output": "o", **without}).prompt
        assert prompt is not None
        assert "### Input" not in prompt


@pytest.mark.parametrize("given", ["{instruction}", "{input}", "{prompt}", "{0}"])
def test_braces_in_the_data_are_data(given):
    assert render("<{prompt}{x}>", given) == f"<{given}{{x}}>"
    assert f"### Instruction:\n{given}\n\n### Input:\n{given}\n" in render_alpaca(given, given)


def test_prompt_and_completion_may_be_turns():
    chat = either({"prompt": TURNS, "completion": TURNS[1:]})
    assert isinstance(chat, Chat)
    assert [turn["content"] for turn in chat.turns] == ["q", "a", "a"]
    assert chat.answers == (2,)
    message = failure({"prompt": TURNS, "completion": "text"})
    assert "'prompt' holds a list and 'completion' does not" in message
    assert "no turn of the assistant" in failure({"prompt": TURNS, "completion": TURNS[:1]})


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        (PAIR, {}, "{prompt}\n"),
        (PAIR, {"template": "Q {prompt}"}, "Q {prompt}"),
        ({"text": "t"}, {}, "{prompt}"),
        ({"messages": TURNS}, {}, None),
        ({"prompt": TURNS, "completion": TURNS}, {}, None),
    ],
)
def test_what_a_question_is_put_in(values, fields, expected):
    assert prompt_template(record(values), section(**fields)) == expected


def test_alpaca_questions():
    template = prompt_template(record({"instruction": "i", "output": "o"}), section())
    assert template is not None
    assert "### Instruction:\n{prompt}\n\n### Response:\n" in template


# -- rows that cannot be read ---------------------------------------------------------------------


def test_a_wrong_column_lists_the_columns_and_the_nearest():
    message = failure({"question": "q", "answer": "a"}, prompt="quesiton", completion="answer")
    assert "data.jsonl:1: no column 'quesiton'" in message
    assert "columns here: question, answer" in message
    assert "set data.train.prompt to one of them" in message
    assert "did you mean 'question'?" in message


@pytest.mark.parametrize("lacking", [[26], [26, 28]])
def test_a_column_that_one_row_lacks(lacking):
    columns = {"prompt": "q", "completion": "a"}
    records = [
        Record({"prompt": "q"} if line in lacking else columns, f"data.jsonl:{line}")
        for line in range(1, 31)
    ]
    source = SourceSection(path="data.jsonl")
    with pytest.raises(DataError) as caught:
        parse_all(records, "prompt_completion", source, "data.train")
    also = "" if len(lacking) == 1 else ", as 1 more here do"
    message = f"data.jsonl:26: the row lacks the column 'completion'{also}; the others have it"
    assert str(caught.value).startswith(message)


def test_messages_name_the_field_they_are_about():
    values = {"question": "q", "answer": "a"}
    message = failure(values, field="data.train[1]", format="prompt_completion")
    assert "set data.train[1].prompt to one of them" in message


def test_a_misspelt_column_is_not_passed_over():
    values = {"instruction": "i", "output": "o"}
    assert "no column 'instructions'" in failure(values, prompt="instructions")
    assert "no column 'mesages'" in failure({"messages": TURNS}, messages="mesages")
    assert "did you mean 'conversations'" in failure(
        {"conversations": SHAREGPT}, conversations="conversation"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "null"), ([1], "a list"), ({}, "an object"), (True, "true or false")],
)
def test_values_that_are_no_text_name_row_and_column(value, words):
    message = failure({"instruction": "i", "output": value})
    assert f"data.jsonl:1: column 'output' holds {words}" in message


def test_halves_of_surrogate_pairs():
    message = failure({"prompt": "ab\ud83d", "completion": "b"})
    assert "column 'prompt' holds half of a surrogate pair (U+D83D at character 2)" in message
