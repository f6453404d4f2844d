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
from anygauge.data.readers import Record
from anygauge.interface import DataError, RunFileError
from tests.helpers.tokenizer import FIXTURES

PAIR = {"prompt": "p", "completion": "c"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
IDS = {"input_ids": [1]}
ALPACA = {"instruction": "i", "output": "o"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def record(values: dict[str, Any], line: int = 1) -> Record:
    return Record(values, f"data.jsonl:{line}")


def section(path: str = "data.jsonl", **fields: Any) -> SourceSection:
    return SourceSection(path=path, **fields)


def read(values: dict[str, Any], field: str = "data.train", **fields: Any) -> Row | Chat:
    source, first = section(**fields), record(values)
    return parse(first, detect_format(first, source, field), source, field)


@pytest.mark.parametrize(
    ("values", "fields", "form"),
    [
        (PAIR, {}, "prompt_completion"),
        ({"prompt": "p", "messages": TURNS, "prompt_id": "1"}, {}, "messages"),
        ({"conversations": SHAREGPT, "tools": ""}, {}, "sharegpt"),
        (ALPACA, {}, "alpaca"),
        ({"text": "t", "url": "u"}, {}, "text"),
        ({"question": "q", "answer": "a"}, {"prompt": "question"}, "prompt_completion"),
        ({"chat": TURNS}, {"messages": "chat"}, "messages"),
        ({"chat": SHAREGPT}, {"conversations": "chat"}, "sharegpt"),
        ({"prompt": "p", "completion": "c", "body": "t"}, {"text": "body"}, "text"),
        (ALPACA, {"format": "text"}, "text"),
        ({"text": "words"}, {"path": "notes.TXT"}, "text"),
        ({"input_ids": [1]}, {}, "tokens"),
        ({"input_ids": [1], "labels": [1]}, {}, "tokens"),
        ({"input_ids": [1], "text": "a"}, {}, "text"),
    ],
)
def test_the_format_is_detected_from_run_file_path_and_columns(values, fields, form):
    assert detect_format(record(values), section(**fields), "data.train") == form


QUESTION = {"question": "q", "answer": "a"}
NAMED = {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize(
    ("values", "fields", "prompt", "text"),
    [
        (PAIR, {"template": "Q {prompt} A:"}, "Q p A:", "c"),
        (
            {"prompt": "é\r\n", "completion": "東京 🙂"},
            {"template": "Q {prompt} A:"},
            "Q é\r\n A:",
            "東京 🙂",
        ),
        (QUESTION, NAMED, "q\n", "a"),
        ({"body": "words"}, {"text": "body"}, None, "words"),
        # A template is of no use to the other formats, and does no harm.
        ({"text": "t"}, {"template": "Question:"}, None, "t"),
    ],
)
def test_prompts_answers_and_texts(values, fields, prompt, text):
    assert read(values, **fields) == Row(prompt, text, "data.jsonl:1")


def test_alpaca_prompts_with_and_without_an_input():
    rows = [read(values) for values in json.loads((FIXTURES / "alpaca.json").read_text())]
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
        assert "### Input" not in read({**ALPACA, **without}).prompt


@pytest.mark.parametrize("given", ["{instruction}", "{input}", "{prompt}", "{0}"])
def test_braces_in_the_data_are_data(given):
    assert render("<{prompt}{x}>", given) == f"<{given}{{x}}>"
    assert f"### Instruction:\n{given}\n\n### Input:\n{given}\n" in render_alpaca(given, given)


def test_prompt_and_completion_may_be_turns():
    chat = read({"prompt": TURNS, "completion": TURNS[1:]})
    assert [turn["content"] for turn in chat.turns] == ["q", "a", "a"]
    assert chat.answers == (2,)


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        (PAIR, {}, "{prompt}\n"),
        (PAIR, {"template": "Q {prompt}"}, "Q {prompt}"),
        ({"text": "t"}, {}, "{prompt}"),
        ({"messages": TURNS}, {}, None),
        ({"prompt": TURNS, "completion": TURNS}, {}, None),
        (IDS, {}, "{prompt}"),
        (IDS, {"format": "tokens"}, "{prompt}"),
    ],
)
def test_what_a_question_is_put_in(values, fields, expected):
    assert prompt_template(record(values), section(**fields)) == expected
    for row_format in ("auto", "tokens"):
        through = section(format=row_format)
        assert prompt_template(record(IDS), through, has_chat_template=True) is None
    alpaca = prompt_template(record(ALPACA), section())
    assert "### Instruction:\n{prompt}\n\n### Response:\n" in alpaca


WRONG = {**NAMED, "prompt": "quesiton"}


@pytest.mark.parametrize(
    ("values", "fields", "words"),
    [
        (QUESTION, {}, "columns here: question, answer"),
        (QUESTION, {}, "data.train.prompt: question"),
        (QUESTION, {}, "data.train.messages"),
        (QUESTION, WRONG, "data.jsonl:1: no column 'quesiton'"),
        (QUESTION, WRONG, "columns here: question, answer"),
        (QUESTION, WRONG, "set data.train.prompt to one of them"),
        (QUESTION, WRONG, "did you mean 'question'?"),
        (
            QUESTION,
            {"field": "data.train[1]", "format": "prompt_completion"},
            "set data.train[1].prompt to one of them",
        ),
        (ALPACA, {"prompt": "instructions"}, "no column 'instructions'"),
        ({"messages": TURNS}, {"messages": "mesages"}, "no column 'mesages'"),
        (
            {"conversations": SHAREGPT},
            {"conversations": "conversation"},
            "did you mean 'conversations'",
        ),
        ({**ALPACA, "output": None}, {}, "data.jsonl:1: column 'output' holds null"),
        ({**ALPACA, "output": [1]}, {}, "column 'output' holds a list"),
        ({**ALPACA, "output": {}}, {}, "column 'output' holds an object"),
        ({**ALPACA, "output": True}, {}, "column 'output' holds true or false"),
        (
            {"prompt": "ab\ud83d", "completion": "b"},
            {},
            "column 'prompt' holds half of a surrogate pair (U+D83D at character 2)",
        ),
        (
            {"prompt": TURNS, "completion": "text"},
            {},
            "'prompt' holds a list and 'completion' does not",
        ),
        ({"prompt": TURNS, "completion": TURNS[:1]}, {}, "no turn of the assistant"),
        ({"text": "t"}, {"path": "notes.txt", "format": "alpaca"}, "has no columns"),
        (PAIR, {"template": "Question:"}, "lacks {prompt}"),
    ],
)
def test_rows_that_cannot_be_read(values, fields, words):
    by_run_file = words in ("has no columns", "lacks {prompt}")
    with pytest.raises(RunFileError if by_run_file else DataError) as caught:
        read(values, **fields)
    assert words in str(caught.value)


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
