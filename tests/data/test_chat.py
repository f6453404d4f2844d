from __future__ import annotations

import json
from typing import Any

import pytest

from anygauge.config.schema import SourceSection
from anygauge.data.chat import Chat
from anygauge.data.formats import parse
from anygauge.data.readers import Record
from anygauge.interface import DataError

U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def chat(form: str, values: dict[str, Any], **fields: Any) -> Chat:
    source = SourceSection(path="c.jsonl", **fields)
    result = parse(Record(values, "c.jsonl:7"), form, source, "data.train")
    assert isinstance(result, Chat)
    return result


def messages(*turns: Any, **columns: Any) -> Chat:
    return chat("messages", {"messages": list(turns), **columns})


def sharegpt(*turns: tuple[str, Any], **columns: Any) -> Chat:
    values = [{"from": name, "value": value} for name, value in turns]
    return chat("sharegpt", {"conversations": values, **columns})


def refused(form: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        chat(form, values)
    assert str(caught.value).startswith("c.jsonl:7: ")
    assert words in str(caught.value)


def test_turns_and_which_of_them_are_answers():
    system = {"role": "system", "content": "s"}
    one = messages(system, U, A, U, A, A, U)
    assert list(one.turns) == [system, U, A, U, A, A, U]
    assert one.answers == (2, 4, 5)
    assert one.tools is None
    assert one.origin == "c.jsonl:7"


def test_what_templates_read_besides_goes_along_and_nulls_do_not():
    called = {"role": "assistant", "content": None, "tool_calls": [ADD], "name": None}
    tool = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "x1"}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": None}
    one = messages({"role": "developer", "content": "d"}, U, called, tool, thought)
    assert one.turns[2] == {"role": "assistant", "tool_calls": [ADD]}
    assert one.turns[3] == tool
    assert one.turns[4] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "call",
    [
        ADD,
        {"function": {"name": "add", "arguments": '{"a": 1, "b": "\\u00fc"}'}},
        {"name": "add", "arguments": {"a": 1, "b": "ü"}},
    ],
)
def test_arguments_are_objects_however_they_are_written(call):
    one = messages(U, {"role": "assistant", "tool_calls": [call]})
    assert one.turns[1]["tool_calls"] == [ADD]
    legacy = {"role": "assistant", "content": None, "function_call": call.get("function", call)}
    assert messages(U, legacy).turns[1]["tool_calls"] == [ADD]


def test_calls_keep_their_id_and_may_have_no_arguments():
    call = {"id": "x1", "type": "function", "function": {"name": "now", "arguments": ""}}
    named = messages(U, {"role": "assistant", "tool_calls": [call]}).turns[1]["tool_calls"][0]
    assert named == {"id": "x1", "type": "function", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_have_one_layout(wrapped, as_text):
    whole = {"type": "function", "function": TOOL}
    tools: Any = [whole if wrapped else TOOL]
    tools = json.dumps(tools) if as_text else tools
    assert messages(U, A, tools=tools).tools == (whole,)
    assert sharegpt(("human", "q"), ("gpt", "a"), tools=tools).tools == (whole,)


def test_columns_beside_the_turns():
    one = chat("messages", {"messages": [U, A], "sys": "Be brief."}, system="sys")
    assert one.turns[0] == {"role": "system", "content": "Be brief."}
    assert one.answers == (2,)
    assert messages(U, A, system="").turns == messages(U, A, system=None).turns == (U, A)
    assert all(messages(U, A, tools=tools).tools is None for tools in (None, "", [], "[]"))
    assert chat("messages", {"messages": json.dumps([U, A])}).turns == (U, A), "as JSON text"


def test_turns_of_weight_0_are_not_learned():
    one = messages(U, {**A, "weight": 0}, U, {**A, "weight": 1})
    assert one.answers == (3,)
    assert one.turns[1] == A


@pytest.mark.parametrize(
    ("turn", "is_blank"),
    [
        (A, False),
        ({"role": "assistant", "content": " \n"}, True),
        ({"role": "assistant", "content": "", "reasoning_content": "hm"}, False),
        ({"role": "assistant", "tool_calls": [ADD]}, False),
    ],
)
def test_chats_that_say_nothing(turn, is_blank):
    assert messages(U, turn).is_blank is is_blank
    assert messages(U, {**A, "weight": 0}).is_blank


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("[oops", "holds text that is not JSON ('[oops')"),
        ('{"role": "user"}', "holds an object; a list of turns is expected"),
        (None, "holds null; a list of turns is expected"),
        ([], "column 'messages' holds an empty list"),
        (["hi"], "turn 1 of 'messages' is text; an object is expected"),
        ([{"content": "q"}], "turn 1 of 'messages' has no 'role'; keys here: 'content'"),
        ([{"role": "usr", "content": "q"}], "has the role 'usr'; valid: system, developer, user"),
        ([{"role": "usr", "content": "q"}], "did you mean 'user'?"),
        ([{"role": ["user"], "content": "q"}], "has the role ['user']"),
        ([{"from": "human", "value": "q"}], "set data.train.format to sharegpt"),
        (
            [U, {"role": "gpt", "content": "a"}],
            "set data.train.format to sharegpt and data.train.conversations to this column",
        ),
        ([U, {"role": "assistant"}], "turn 2 of 'messages' (assistant) has no content"),
        ([{"role": "user", "content": None}], "turn 1 of 'messages' (user) has null as content"),
        ([{"role": "user", "content": 3}], "turn 1 of 'messages' holds a number; text is expected"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of the type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "of the type 'text' without a text"),
        ([{"role": "user", "content": ["x"]}], "a part of the type 'text'; only text"),
        ([{"role": "user", "content": "\ud83d"}], "turn 1 of 'messages' holds half of a surrogate"),
        ([{**U, "tool_calls": [ADD]}, A], "has tool calls and the role 'user'; only the assistant"),
        ([U, {**A, "tool_calls": ["add"]}], "a tool call that is not an object"),
        ([U, {**A, "tool_calls": [{"name": "f", "arguments": "{a"}]}], "not JSON ('{a')"),
        ([U, {**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "'f': a list; an object"),
        ([U, {**A, "tool_calls": [{"name": "f\udc00"}]}], "the chat holds half of a surrogate"),
        ([U], "no turn of the assistant to learn from (turns here: user)"),
        ([SYSTEM, SYSTEM, U, A], "turns 1, 2 are system turns, but a chat"),
        ([U, {**A, "weight": 0.5}], "the weight 0.5; valid: 0, 1"),
    ],
)
def test_malformed_turns(turns, words):
    refused("messages", {"messages": turns}, words)


@pytest.mark.parametrize(
    ("turns", "columns", "words"),
    [
        ([U, A], {"system": 3}, "column 'system' holds a number; text is expected"),
        ([U, A], {"tools": "[{"}, "column 'tools' holds text that is not JSON"),
        ([U, A], {"tools": [3]}, "column 'tools' holds a number as a tool"),
        ([U, A], {"tools": [{"description": "d"}]}, "no 'name'; keys here: 'description'"),
        ([SYSTEM, U, A], {"system": "t"}, "system turns (the first comes from column 'system')"),
    ],
)
def test_malformed_columns_beside_the_turns(turns, columns, words):
    refused("messages", {"messages": turns, **columns}, words)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"from": "bot", "value": "a"}, "has the from 'bot'; valid: human, user, gpt"),
        ({"from": "gpt", "value": None}, "(gpt) has null as value; text is expected"),
        ({"from": "gpt"}, "(gpt) has no value"),
        ({"from": "function_call", "value": "add(1)"}, "not JSON ('add(1)'); an object with name"),
        ({"from": "function_call", "value": "{}"}, "not an object with a name and arguments"),
        ({"role": "bot", "content": "a"}, "has the role 'bot'; valid: human, user, gpt"),
    ],
)
def test_malformed_sharegpt(turn, words):
    refused("sharegpt", {"conversations": [{"from": "human", "value": "q"}, turn]}, words)


def test_roles_of_sharegpt_in_turns_of_messages_are_read_as_sharegpt():
    calls = {"role": "function_call", "content": '{"name": "add", "arguments": {"a": 1}}'}
    turns = [{"role": "system", "content": "s"}, {"role": "human", "content": "q"}, calls]
    turns += [{"role": "observation", "content": "1"}, {"role": "gpt", "content": "a", "weight": 0}]
    one = chat("sharegpt", {"messages": turns}, conversations="messages")
    roles = [turn["role"] for turn in one.turns]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert one.turns[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert one.answers == (2,) and one.turns[4]["content"] == "a"


def test_parts_of_text_are_joined_and_the_turns_of_a_record_not_changed():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    turns = [{**U, "content": parts}, {**A, "weight": 0}]
    before = json.dumps(turns)
    assert messages(*turns).turns[0]["content"] == "one two"
    assert json.dumps(turns) == before
