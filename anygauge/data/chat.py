"""Chats: turns as `messages`, as ShareGPT's `conversations`, or as prompt and completion.

Whatever the layout, a chat becomes the turns that chat templates of the transformers library read:
`role` and `content`, `tool_calls` with arguments as objects, and tools as
`{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import SourceSection
from anygauge.data.readers import Record, byte_length, check_text, column, from_json, kind
from anygauge.interface import DataError
from anygauge.util.text import did_you_mean

Turn = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_SHAREGPT_ALONE = tuple(role for role in SHAREGPT_ROLES if role not in ROLES)


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation.

    Attributes:
        turns: as chat templates read them; no value is null.
        tools: what the assistant may call, or None.
        answers: indices of the turns with a loss, in order; each is one of the assistant.
        origin: where it stands, as in its record.
        size: bytes of all of it as JSON in UTF-8.
    """

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] | None
    answers: tuple[int, ...]
    origin: str
    size: int = 0

    @property
    def is_blank(self) -> bool:
        """Whether the turns with a loss are empty."""
        return not any(_says_something(self.turns[index]) for index in self.answers)


def chat_from_messages(record: Record, source: SourceSection, field: str) -> Chat:
    """A column of turns with `role` and `content`.

    Raises:
        DataError: the record cannot be used; names file, row and turn.
    """
    turns = _turns(record, source.messages, f"{field}.messages", _message, field)
    return _chat(record, turns, source, first_loss_turn=0)


def chat_from_sharegpt(record: Record, source: SourceSection, field: str) -> Chat:
    """A column of turns with `from` and `value`, or with `role` and `content` and its roles.

    Raises:
        DataError: the record cannot be used; names file, row and turn.
    """
    turns = _turns(record, source.conversations, f"{field}.conversations", _sharegpt, field)
    return _chat(record, turns, source, first_loss_turn=0)


def chat_from_columns(record: Record, source: SourceSection, field: str) -> Chat:
    """Two columns of turns; only the second has a loss.

    Raises:
        DataError: the record cannot be used; names file, row and turn.
    """
    prompt = _turns(record, source.prompt, f"{field}.prompt", _message, field)
    answer = _turns(record, source.completion, f"{field}.completion", _message, field)
    return _chat(record, prompt + answer, source, first_loss_turn=len(prompt))


def _chat(
    record: Record, turns: list[Turn], source: SourceSection, *, first_loss_turn: int
) -> Chat:
    where = record.origin
    system = record.values.get(source.system)
    if system not in (None, ""):
        if not isinstance(system, str):
            raise DataError(
                f"{where}: column {source.system!r} holds {kind(system)}; text is expected"
            )
        check_text(system, f"{where}: column {source.system!r}")
        turns.insert(0, {"role": "system", "content": system})
        first_loss_turn += 1
    systems = [number for number, turn in enumerate(turns, 1) if turn["role"] == "system"]
    if len(systems) > 1:
        of_column = f" (the first comes from column {source.system!r})" if system else ""
        raise DataError(
            f"{where}: turns {', '.join(map(str, systems))} are system turns{of_column}, but a "
            "chat may have only one; join them into one turn"
        )
    answered = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answered or answered[-1] < first_loss_turn:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(
            f"{where}: no turn of the assistant to learn from (turns here: {roles}); "
            "correct or remove the row"
        )
    answers = tuple(
        number
        for number in answered
        if number >= first_loss_turn and _weight(turns[number], where, number + 1)
    )
    tools = _tools(record, source.tools)
    # Names and arguments of calls and tools are text too; contents were checked with their turn.
    try:
        text = json.dumps([turns, tools], ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        raise DataError(
            f"{where}: a number in the chat is NaN or infinite, which JSON does not have; correct "
            "or remove the row"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: the chat is nested too deeply; correct the row") from None
    check_text(text, f"{where}: the chat")
    return Chat(tuple(turns), tools, answers, where, byte_length(text))


def _turns(
    record: Record,
    name: str,
    setting: str,
    read: Callable[[Mapping[str, Any], str, str], Turn],
    field: str,
) -> list[Turn]:
    where = f"{record.origin}: column {name!r}"
    value = from_json(column(record, name, setting), where, "a list of turns")
    if not isinstance(value, list):
        raise DataError(f"{where} holds {kind(value)}; a list of turns is expected")
    if not value:
        raise DataError(f"{where} holds an empty list; correct or remove the row")
    turns = []
    for number, turn in enumerate(value, start=1):
        place = f"{record.origin}: turn {number} of {name!r}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{place} is {kind(turn)}; an object is expected")
        turns.append(read(turn, place, field))
    return turns


def _message(turn: Mapping[str, Any], where: str, field: str) -> Turn:
    if "role" not in turn and "from" in turn:
        raise DataError(
            f"{where} has 'from' instead of 'role': set {field}.format to sharegpt and "
            f"{field}.conversations to this column"
        )
    if turn.get("role") in _SHAREGPT_ALONE:
        raise DataError(
            f"{where} has the role {turn['role']!r}, which is ShareGPT's: set {field}.format to "
            f"sharegpt and {field}.conversations to this column"
        )
    role = _role(turn, "role", ROLES, where)
    # Other keys that a template may read are kept: name, tool_call_id, reasoning_content.
    kept = {key: value for key, value in turn.items() if value is not None}
    calls = kept.pop("tool_calls", None) or None
    if (legacy := kept.pop("function_call", None)) is not None and calls is None:
        calls = [legacy]
    if calls is not None:
        if role != "assistant":
            raise DataError(
                f"{where} has tool calls and the role {role!r}; only the assistant may call tools"
            )
        kept["tool_calls"] = _calls(calls, where)
    if "content" in kept:
        kept["content"] = _content(kept["content"], where)
    elif calls is None:
        found = "null as content" if "content" in turn else "no content"
        raise DataError(f"{where} ({role}) has {found}; text is expected")
    return kept


def _sharegpt(turn: Mapping[str, Any], where: str, field: str) -> Turn:
    if "from" not in turn and "role" in turn:
        name = _role(turn, "role", tuple(SHAREGPT_ROLES), where)
        if name != "function_call":
            return _message({**turn, "role": SHAREGPT_ROLES[name]}, where, field)
        turn = {"from": name, "value": turn.get("content")}
    name = _role(turn, "from", tuple(SHAREGPT_ROLES), where)
    if turn.get("value") is None:
        found = "null as value" if "value" in turn else "no value"
        raise DataError(f"{where} ({name}) has {found}; text is expected")
    value = turn["value"]
    if name == "function_call":
        calls = from_json(value, f"{where} (function_call)", "an object with name and arguments")
        return {"role": "assistant", "tool_calls": _calls(calls, where)}
    return {"role": SHAREGPT_ROLES[name], "content": _content(value, where)}


def _role(turn: Mapping[str, Any], key: str, roles: tuple[str, ...], where: str) -> str:
    if key not in turn:
        keys = ", ".join(map(repr, turn)) or "none"
        raise DataError(f"{where} has no {key!r}; keys here: {keys}")
    role = turn[key]
    if role not in roles:
        meant = did_you_mean(str(role), roles)
        raise DataError(f"{where} has the {key} {role!r}; valid: {', '.join(roles)}{meant}")
    return str(role)


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                found = part.get("type") if isinstance(part, Mapping) else kind(part)
                raise DataError(
                    f"{where} has a part of the type {found!r}; only text can be trained on, as "
                    '{"type": "text", "text": ...}'
                )
            if not isinstance(part.get("text"), str):
                raise DataError(f"{where} has a part of the type 'text' without a text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise DataError(f"{where} holds {kind(value)}; text is expected")
    check_text(value, where)
    return value


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = value if isinstance(value, list) else [value]
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where} has a tool call that is not an object with a name and arguments: "
                f"{call!r:.80}"
            )
        given = function.get("arguments")
        if given is None or given == "":
            given = {}
        arguments = from_json(given, f"{where}: arguments of {function['name']!r}", "an object")
        if not isinstance(arguments, Mapping):
            raise DataError(
                f"{where}: arguments of {function['name']!r}: {kind(arguments)}; an object is "
                "expected"
            )
        identity = {"id": call["id"]} if call.get("id") is not None else {}
        # Templates write arguments as JSON themselves: JSON text would be written as a string.
        named = {"name": function["name"], "arguments": dict(arguments)}
        result.append({**identity, "type": "function", "function": named})
    return result


def _tools(record: Record, name: str) -> tuple[dict[str, Any], ...] | None:
    value = record.values.get(name)
    if value is None or value in ("", []):
        return None
    where = f"{record.origin}: column {name!r}"
    value = from_json(value, where, "a list of tools")
    tools = value if isinstance(value, list) else [value]
    for tool in tools:
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function", tool), Mapping):
            raise DataError(f"{where} holds {kind(tool)} as a tool; an object is expected")
        if "name" not in tool.get("function", tool):
            keys = ", ".join(map(repr, tool)) or "none"
            raise DataError(f"{where}: a tool has no 'name'; keys here: {keys}")
    return (
        tuple(
            dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
            for tool in tools
        )
        or None
    )


def _weight(turn: Turn, where: str, number: int) -> bool:
    weight = turn.pop("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: turn {number} has the weight {weight!r}; valid: 0, 1")
    return bool(weight)


def _says_something(turn: Turn) -> bool:
    if turn.get("tool_calls"):
        return True
    return any(isinstance(value, str) and value.strip() for value in _contents(turn))


def _contents(turn: Turn) -> list[Any]:
    return [turn.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking")]
