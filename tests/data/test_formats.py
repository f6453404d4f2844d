"""From records to rows: formats, prompts with answers, chats, and rows tokenized elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anygauge.config.schema import SourceSection
from anygauge.data.formats import Row, detect_format, parse, parse_all, question_text
from anygauge.data.readers import Record
from anygauge.interface import DataError, RunFileError
from tests.helpers.tiny_tokenizer import FIXTURES

U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
TURNS = [U, A]
PAIR = {"prompt": "p", "completion": "c"}
IDS = {"input_ids": [1]}
ALPACA = {"instruction": "i", "output": "o"}
HUMAN = {"from": "human", "value": "q"}
SHAREGPT = [HUMAN, {"from": "gpt", "value": "a"}]
QUESTION = {"question": "q", "answer": "a"}
NAMED = {"prompt": "question", "completion": "answer"}


def read(values: dict[str, Any], field: str = "data.train", **fields: Any) -> Any:
    source = SourceSection(**{"path": "data.jsonl", **fields})
    first = Record(values, "data.jsonl:7")
    return parse(first, detect_format(first, source, field), source, field)


def messages(*turns: Any, **columns: Any) -> Any:
    return read({"messages": list(turns), **columns})


@pytest.mark.parametrize(
    ("values", "fields", "form"),
    [
        (PAIR, {}, "prompt_completion"),
        ({"prompt": "p", "messages": TURNS, "prompt_id": "1"}, {}, "messages"),
        ({"conversations": SHAREGPT, "tools": ""}, {}, "sharegpt"),
        (ALPACA, {}, "alpaca"),
        ({"text": "t", "url": "u"}, {}, "text"),
        (QUESTION, {"prompt": "question"}, "prompt_completion"),
        ({"chat": TURNS}, {"messages": "chat"}, "messages"),
        ({"chat": SHAREGPT}, {"conversations": "chat"}, "sharegpt"),
        ({"prompt": "p", "completion": "c", "body": "t"}, {"text": "body"}, "text"),
        (ALPACA, {"format": "text"}, "text"),
        ({"text": "words"}, {"path": "notes.TXT"}, "text"),
        ({"input_ids": [1], "labels": [1]}, {}, "tokens"),
        ({"input_ids": [1], "text": "a"}, {}, "text"),
    ],
)
def test_the_format_is_detected_from_run_file_path_and_columns(values, fields, form):
    source = SourceSection(**{"path": "data.jsonl", **fields})
    assert detect_format(Record(values, "data.jsonl:1"), source, "data.train") == form


def test_prompts_answers_and_texts():
    written = {"prompt": "é\r\n", "completion": "東京 🙂"}
    put = read(written, template="Q {prompt} A:")
    assert put == Row("Q é\r\n A:", "東京 🙂", "data.jsonl:7")
    assert read(QUESTION, **NAMED) == Row("q\n", "a", "data.jsonl:7")
    # A template is of no use to the other formats, and does no harm.
    text = read({"body": "words"}, text="body", template="Question:")
    assert text == Row(None, "words", "data.jsonl:7")


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


def test_alpaca_rows_as_chats():
    row = {"instruction": "i", "input": "x", "output": "o", "system": "s"}
    chat = read({**row, "history": [["a", "b"]]}, format="alpaca_chat")
    assert [turn["content"] for turn in chat.turns] == ["s", "a", "b", "i\nx", "o"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [turn["role"] for turn in chat.turns] == roles
    assert chat.answers == (2, 4)
    for without in ({"input": ""}, {"input": None}):
        assert (
            read({**ALPACA, **without}, format="alpaca_chat").turns[0]["content"]
            == (ALPACA["instruction"])
        )
    with pytest.raises(DataError, match="column 'history' holds 'no'; pairs of question and"):
        read({**row, "history": ["no"]}, format="alpaca_chat")
    with pytest.raises(DataError, match="no column 'output'"):
        read({"instruction": "i"}, format="alpaca_chat")


@pytest.mark.parametrize("given", ["{instruction}", "{input}", "{prompt}", "{0}"])
def test_braces_in_the_data_are_data(given):
    assert read({**PAIR, "prompt": given}, template="<{prompt}{x}>").prompt == f"<{given}{{x}}>"
    alpaca = read({"instruction": given, "input": given, "output": "o"})
    assert f"### Instruction:\n{given}\n\n### Input:\n{given}\n" in alpaca.prompt


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        (PAIR, {}, "why {prompt}\n"),
        (PAIR, {"template": "Q {prompt}"}, "Q why {prompt}"),
        ({"text": "t"}, {}, "why {prompt}"),
        ({"messages": TURNS}, {}, None),
        ({"prompt": TURNS, "completion": TURNS}, {}, None),
        (IDS, {"format": "tokens"}, "why {prompt}"),
        (ALPACA, {}, read({**ALPACA, "instruction": "why {prompt}"}).prompt),
    ],
)
def test_what_a_question_is_put_in(values, fields, expected):
    first, source = Record(values, "data.jsonl:1"), SourceSection(path="data.jsonl", **fields)
    assert question_text(first, source, "why {prompt}") == expected
    through = question_text(first, source, "why {prompt}", has_chat_template=True)
    assert through == (None if values is IDS else expected)


def calls(call: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", **more, "tool_calls": [call]}


AS_TEXT = {"name": "add", "arguments": '{"a": 1, "b": "\\u00fc"}'}
OLD = {"role": "assistant", "function_call": AS_TEXT}
NOW = {"id": "x1", "type": "function", "function": {"name": "now", "arguments": ""}}
NOTHING = {**NOW, "function": {"name": "now", "arguments": {}}}
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
# What templates read besides goes along, and nulls do not.
ANSWERED = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "x1"}
THOUGHT = {**A, "reasoning_content": "hm"}
MORE = [{**S, "role": "developer"}, U, calls(ADD), ANSWERED, THOUGHT]
WITH_NULLS = [*MORE[:2], calls(ADD, content=None, name=None), ANSWERED, {**THOUGHT, "name": None}]


@pytest.mark.parametrize(
    ("turns", "expected", "answers"),
    [
        ([S, U, A, U, A, A, U], [S, U, A, U, A, A, U], (2, 4, 5)),
        ([U, {**A, "weight": 0}, U, {**A, "weight": 1}], [U, A, U, A], (3,)),
        (json.dumps(TURNS), TURNS, (1,)),
        ([{**U, "content": PARTS}, A], [{**U, "content": "one two"}, A], (1,)),
        (WITH_NULLS, MORE, (2, 4)),
        ([U, calls({"function": AS_TEXT})], [U, calls(ADD)], (1,)),
        ([U, calls(ADD["function"])], [U, calls(ADD)], (1,)),
        ([U, OLD], [U, calls(ADD)], (1,)),
        ([U, calls(NOW)], [U, calls(NOTHING)], (1,)),
    ],
)
def test_turns_and_which_of_them_are_answers(turns, expected, answers):
    before = json.dumps(turns)
    one = read({"messages": turns})
    assert (list(one.turns), one.answers) == (expected, answers)
    assert (one.tools, one.origin) == (None, "data.jsonl:7")
    assert json.dumps(turns) == before, "a record is not changed"


def test_columns_beside_the_turns():
    one = read({"messages": TURNS, "sys": "s"}, system="sys")
    assert (one.turns, one.answers) == ((S, U, A), (2,))
    assert messages(U, A, system="").turns == messages(U, A, system=None).turns == (U, A)
    one = read({"prompt": TURNS, "completion": [A]})
    assert (one.turns, one.answers) == ((U, A, A), (2,))


@pytest.mark.parametrize(
    ("role", "content", "answers"), [("role", "content", (2,)), ("from", "value", (2, 4))]
)
def test_turns_of_sharegpt_and_its_roles_in_turns_of_messages(role, content, answers):
    said = {"human": "q", "function_call": json.dumps(ADD["function"]), "observation": "1"}
    turns = [S, *({role: name, content: text} for name, text in said.items())]
    turns += [{role: "gpt", content: "a", "weight": 0}]
    one = read({"messages": turns}, conversations="messages")
    assert list(one.turns) == [S, U, calls(ADD), {"role": "tool", "content": "1"}, A]
    assert one.answers == answers


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_have_one_layout(wrapped, as_text):
    whole = {"type": "function", "function": TOOL}
    tools: Any = [whole if wrapped else TOOL]
    tools = json.dumps(tools) if as_text else tools
    assert messages(U, A, tools=tools).tools == (whole,)
    assert read({"conversations": SHAREGPT, "tools": tools}).tools == (whole,)
    assert all(messages(U, A, tools=none).tools is None for none in (None, "", [], "[]"))


@pytest.mark.parametrize(
    ("turn", "is_blank"),
    [
        (A, False),
        ({**A, "weight": 0}, True),
        ({"role": "assistant", "content": " \n"}, True),
        ({"role": "assistant", "content": "", "reasoning_content": "hm"}, False),
        (calls(ADD), False),
    ],
)
def test_chats_that_say_nothing(turn, is_blank):
    assert messages(U, turn).is_blank is is_blank


WRONG = {**NAMED, "prompt": "quesiton"}
COLUMNS = [
    (QUESTION, {}, "columns here: question, answer"),
    (QUESTION, {}, "data.train.prompt: question"),
    (QUESTION, {}, "data.train.messages"),
    (QUESTION, WRONG, "data.jsonl:7: no column 'quesiton'; columns here: question, answer"),
    (QUESTION, WRONG, "set data.train.prompt to one of them; did you mean 'question'?"),
    (ALPACA, {"prompt": "p", "field": "data.train[1]"}, "set data.train[1].prompt to one of them"),
    ({"messages": TURNS}, {"messages": "mesages"}, "no column 'mesages'"),
    ({"conversations": []}, {"conversations": "conversation"}, "did you mean 'conversations'"),
    ({**ALPACA, "output": None}, {}, "data.jsonl:7: column 'output' holds null"),
    ({**ALPACA, "output": [1]}, {}, "column 'output' holds a list"),
    ({**PAIR, "prompt": "ab\ud83d"}, {}, "half of a surrogate pair (U+D83D at character 2)"),
    ({**PAIR, "prompt": []}, {}, "'prompt' holds a list and 'completion' does not; both are text"),
    ({"prompt": TURNS}, {"completion": "c"}, "no column 'c'; columns here: prompt"),
    ({"prompt": TURNS, "completion": TURNS[:1]}, {}, "no turn of the assistant"),
    ({"labels": [1]}, {"format": "tokens"}, "no column 'input_ids'; columns here: labels; rows"),
    ({"text": "t"}, {"path": "notes.txt", "format": "alpaca"}, "has no columns"),
    (PAIR, {"template": "Question:"}, "lacks {prompt}"),
]
MESSAGES = [
    ("[oops", "holds text that is not JSON ('[oops')"),
    ('{"role": "user"}', "column 'messages' holds an object; a list of turns is expected"),
    (None, "column 'messages' holds null; a list of turns is expected"),
    ([], "column 'messages' holds an empty list"),
    (["hi"], "turn 1 of 'messages' is text; an object is expected"),
    ([{"content": "q"}], "turn 1 of 'messages' has no 'role'; keys here: 'content'"),
    ([{**U, "role": "usr"}], "has the role 'usr'; valid: system, developer, user, assistant, tool"),
    ([{**U, "role": "usr"}], "; did you mean 'user'?"),
    ([{**U, "role": ["user"]}], "has the role ['user']"),
    ([HUMAN], "has 'from' instead of 'role': set data.train.format to sharegpt and data.train.con"),
    ([U, {**A, "role": "gpt"}], "the role 'gpt', which is ShareGPT's: set data.train.format to sh"),
    ([U, {"role": "assistant"}], "turn 2 of 'messages' (assistant) has no content; text is exp"),
    ([{"role": "user", "content": None}], "turn 1 of 'messages' (user) has null as content"),
    ([{"role": "user", "content": 3}], "turn 1 of 'messages' holds a number; text is expected"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of the type 'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "of the type 'text' without a text"),
    ([{"role": "user", "content": ["x"]}], "a part of the type 'text'; only text"),
    ([{"role": "user", "content": "\ud83d"}], "turn 1 of 'messages' holds half of a surrogate"),
    ([{**U, "tool_calls": [ADD]}, A], "has tool calls and the role 'user'; only the assistant"),
    ([U, {**A, "tool_calls": ["add"]}], "a tool call that is not an object"),
    ([U, {**A, "tool_calls": [{"name": "f", "arguments": "{a"}]}], "not JSON ('{a')"),
    ([U, {**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "'f': a list; an object is"),
    ([U, {**A, "tool_calls": [{"name": "f\udc00"}]}], "the chat holds half of a surrogate"),
    ([U], "no turn of the assistant to learn from (turns here: user)"),
    ([S, S, U, A], "turns 1, 2 are system turns, but a chat"),
    ([U, {**A, "weight": 0.5}], "turn 2 has the weight 0.5; valid: 0, 1"),
]
BESIDE = [
    ({"system": 3}, "column 'system' holds a number (3); text is expected"),
    ({"tools": "[{"}, "column 'tools' holds text that is not JSON"),
    ({"tools": [3]}, "column 'tools' holds a number as a tool"),
    ({"tools": [{"function": 3}]}, "column 'tools' holds a number as a tool"),
    ({"tools": [{"description": "d"}]}, "no 'name'; keys here: 'description'"),
    ({"messages": [S, *TURNS], "system": "t"}, "turns (the first comes from column 'system')"),
]
TURNS_OF_SHAREGPT = [
    ({"from": "bot", "value": "a"}, "has the from 'bot'; valid: human, user, gpt"),
    ({"from": "gpt", "value": None}, "(gpt) has null as value; text is expected"),
    ({"from": "gpt"}, "(gpt) has no value"),
    ({"from": "function_call"}, "(function_call) has no value"),
    ({"from": "function_call", "value": "add(1)"}, "not JSON ('add(1)'); an object with name"),
    ({"from": "function_call", "value": {}}, "not an object with a name and arguments"),
    ({"role": "bot", "content": "a"}, "has the role 'bot'; valid: human, user, gpt"),
]
TOKENS = [
    ({"input_ids": 3}, "column 'input_ids' holds a number; a list of numbers is expected"),
    ({"input_ids": "a"}, "column 'input_ids' holds text that is not JSON ('a'); a list of"),
    ({"input_ids": [1, -1]}, "input_ids[1] is -1; whole numbers from 0 are expected"),
    ({"input_ids": [1.0]}, "input_ids[0] is 1.0; whole numbers from 0 are expected"),
    ({"input_ids": [1, True]}, "input_ids[1] is True; whole numbers"),
    ({"input_ids": [[1]]}, "input_ids[0] is [1]; whole numbers"),
    ({"labels": []}, "'input_ids' has 1 values and 'labels' 0; both have one for each token"),
    ({"loss_mask": [0, 1]}, "'input_ids' has 1 values and 'loss_mask' 2; both have one for each"),
    ({"labels": [2]}, "labels[0] is 2; valid: 1, which is input_ids[0], or -100 for no loss. Labe"),
    ({"labels": [2]}, "Labels are not shifted: each stands at the place of its own token"),
    ({"labels": [True]}, "labels[0] is True; valid: 1, which"),
    ({"labels": None}, "column 'labels' holds null; a list of numbers"),
    ({"loss_mask": [2]}, "loss_mask[0] is 2; valid: 0, 1, false, true"),
    ({"loss_mask": [0.5]}, "loss_mask[0] is 0.5; valid: 0, 1"),
    ({"labels": [1], "loss_mask": [1]}, "the row has 'labels' and 'loss_mask'; give one of them"),
    ({"attention_mask": [0]}, "attention_mask[0] is 0, which is padding; rows have none: remove"),
]


@pytest.mark.parametrize(
    ("values", "fields", "words"),
    [
        *COLUMNS,
        *(({"messages": turns}, {}, words) for turns, words in MESSAGES),
        *(({"messages": TURNS, **columns}, {}, words) for columns, words in BESIDE),
        *(({"conversations": [HUMAN, turn]}, {}, words) for turn, words in TURNS_OF_SHAREGPT),
        *(({**IDS, **columns}, {}, words) for columns, words in TOKENS),
    ],
)
def test_rows_that_cannot_be_read(values, fields, words):
    by_run_file = words in ("has no columns", "lacks {prompt}")
    with pytest.raises(RunFileError if by_run_file else DataError) as caught:
        read(values, **fields)
    assert words in str(caught.value)
    assert by_run_file or str(caught.value).startswith("data.jsonl:7: ")


@pytest.mark.parametrize(("lacking", "also"), [([26], ""), ([26, 28], ", as 1 more here do")])
def test_a_column_that_one_row_lacks(lacking, also):
    records = [
        Record({"prompt": "q"} if line in lacking else PAIR, f"data.jsonl:{line}")
        for line in range(1, 31)
    ]
    message = rf"^data\.jsonl:26: the row lacks the column 'completion'{also}; the others have it"
    with pytest.raises(DataError, match=message):
        parse_all(records, "prompt_completion", SourceSection(path="data.jsonl"), "data.train")
