"""Turns records into rows: which format a source has; prompts with answers, texts, chats, tokens,
pairs of answers.

Whatever the layout, a chat becomes the turns that chat templates of the transformers library read:
`role` and `content`, `tool_calls` with arguments as objects, and tools as
`{"type": "function", "function": {...}}`. What cannot be used raises DataError, which names file,
row, turn and what was expected.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.config.paths import data_suffix
from anygauge.config.schema import SourceSection
from anygauge.data.readers import DoubleKeyError, Record, load_json, type_name
from anygauge.interface import DataError, RunFileError
from anygauge.util.text import did_you_mean, shorten

Turn = dict[str, Any]

PLACEHOLDER = "{prompt}"

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
"""The prompt of Stanford Alpaca's training script for rows with an input, to the letter."""

ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""The same for rows without an input."""

MOST_TEXT = 2_000_000
"""Bytes of text in a row: a tokenizer takes some 200 of memory for each."""

NO_LOSS = -100
"""In `labels`: a token without a loss; what the transformers library and torch leave out."""

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

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Row:
    """One row without turns, ready to be tokenized; `origin` is its record's."""

    prompt: str | None
    """All that the model reads before it answers; None for plain text: every token has a loss."""
    text: str
    origin: str

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to learn; such rows are counted and left out."""
        return not self.text.strip()


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation, as chat templates read it; no value of a turn is null."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] | None
    answers: tuple[int, ...]
    """Indices of the turns with a loss, in order; each is one of the assistant."""
    origin: str

    @property
    def is_blank(self) -> bool:
        """Whether the turns with a loss are empty."""
        turns = [self.turns[index] for index in self.answers]
        said = [turn.get(key) for turn in turns for key in _TEXT_KEYS]
        texts = [value.strip() for value in said if isinstance(value, str)]
        return not any(texts) and not any(turn.get("tool_calls") for turn in turns)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row that was tokenized elsewhere; its ids are not yet compared with a vocabulary."""

    ids: list[int]
    loss_mask: list[bool]
    origin: str


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, each with the prompt before it."""

    chosen: Row | Chat
    rejected: Row | Chat


AnyRow = Row | Chat | TokenRow | AnswerPair


def of_objective(source: SourceSection, field: str, *, pairs: bool) -> SourceSection:
    """A source as an objective reads it: of one that trains on pairs, each row is one.

    Raises:
        RunFileError: the run file sets a format that does not go with the objective.
    """
    if pairs and source.format == "auto":
        return source.model_copy(update={"format": "preference"})
    if pairs != (source.format == "preference"):
        valid = "auto or preference" if pairs else "another, or objective: dpo or orpo"
        raise RunFileError(
            f"{field}.format: {source.format}, but the run's objective trains on "
            f"{'pairs of answers' if pairs else 'single answers'}; set {valid}"
        )
    return source


def detect_format(first: Record, source: SourceSection, field: str) -> str:
    """The format of a source's rows, from the run file, else from its path and first record;
    `field`: where it stands in the run file, as ``data.train[1]``."""
    row_format: str = source.format
    if data_suffix(source.path) == ".txt":
        if row_format not in ("auto", "text"):
            raise RunFileError(
                f"{field}.format is {row_format!r}, but {source.path} is plain text and has no "
                "columns; set format to 'text' or 'auto', or give a file with columns"
            )
        return "text"
    if row_format == "auto":
        row_format = _by_columns(first, source, field)
    if row_format in ("prompt_completion", "preference") and PLACEHOLDER not in source.template:
        raise RunFileError(
            f"{field}.template is {source.template!r}, which lacks {PLACEHOLDER}: "
            "the model would never see the prompt"
        )
    return row_format


def _by_columns(first: Record, source: SourceSection, field: str) -> str:
    settings = {
        "prompt_completion": ("prompt", "completion"),
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "text": ("text",),
    }
    # A column that the run file names decides the format, so a misspelt one is never ignored.
    for row_format, names in settings.items():
        if any(getattr(source, n) != SourceSection.model_fields[n].default for n in names):
            return row_format
    needs = {row: {getattr(source, name) for name in names} for row, names in settings.items()}
    needs |= {"alpaca": {"instruction", "output"}, "tokens": {"input_ids"}}
    for row_format in ("prompt_completion", "messages", "sharegpt", "alpaca", "text", "tokens"):
        if needs[row_format] <= first.values.keys():
            return row_format
    example = next(iter(first.values), "question")
    raise DataError(
        f"{first.origin}: cannot detect the format of these rows; columns here: "
        f"{_column_names(first)}. "
        f"Name the two columns ({field}.prompt: {example} and {field}.completion: ...), one "
        f"column of turns ({field}.messages: ... or {field}.conversations: ...), or one column of "
        f"plain text ({field}.text: ...). For pairs of answers, set objective: dpo or orpo"
    )


def question_text(
    first: Record, source: SourceSection, prompt: str, *, has_chat_template: bool = False
) -> str | None:
    """A question as a model trained on this source is asked; None where it goes through the chat
    template: for chats, and for rows of tokens where there is one, made in ways not known."""
    match detect_format(first, source, "data.train"):
        case "messages" | "sharegpt" | "alpaca_chat":
            return None
        case "prompt_completion":
            is_turns = isinstance(first.values.get(source.prompt), list)
            return None if is_turns else source.template.replace(PLACEHOLDER, prompt)
        case "preference":
            names = (source.prompt, source.chosen)
            if not all(isinstance(first.values.get(name, ""), str) for name in names):
                return None
            # Without a column of prompts, texts are whole, in a form of their own.
            text = source.template if source.prompt in first.values else PLACEHOLDER
            return text.replace(PLACEHOLDER, prompt)
        case "alpaca":
            return ALPACA_WITHOUT_INPUT.format(instruction=prompt)
        case "tokens" if has_chat_template:
            return None
    return prompt


def parse_all(
    records: Sequence[Record], row_format: str, source: SourceSection, field: str
) -> list[AnyRow]:
    """Parse neighbouring records; see `parse`. Others say more of a column that one lacks."""
    rows = []
    for record in records:
        try:
            rows.append(parse(record, row_format, source, field))
        except MissingColumnError as error:
            lacking = sum(error.name not in each.values for each in records)
            if lacking == len(records):
                raise
            also = f", as {lacking - 1} more here do" if lacking > 1 else ""
            raise DataError(
                f"{record.origin}: the row lacks the column {error.name!r}{also}; the others have "
                f"it. Correct or remove the row; columns here: {_column_names(record)}"
            ) from None
    return rows


def parse(record: Record, row_format: str, source: SourceSection, field: str) -> AnyRow:
    """One record as a row, a chat or tokens; for the format see `detect_format`."""

    def text(setting: str) -> str:
        return _text_column(record, getattr(source, setting), f"{field}.{setting}")

    def turns(setting: str, read: Callable[..., Turn] = _parse_message) -> list[Turn]:
        return _parse_turns(record, getattr(source, setting), f"{field}.{setting}", field, read)

    match row_format:
        case "messages":
            return _parse_chat(record, source, turns("messages"), field)
        case "sharegpt":
            return _parse_chat(record, source, turns("conversations", _parse_sharegpt), field)
        case "prompt_completion":
            if _are_turns(record, source, field):
                prompt = turns("prompt")
                answer = turns("completion")
                return _parse_chat(record, source, prompt + answer, field, first_answer=len(prompt))
            # Replaced literally: other braces are left alone.
            put = source.template.replace(PLACEHOLDER, text("prompt"))
            return _make_row(record, put, text("completion"))
        case "preference":
            return _parse_pair(record, source, field)
        case "alpaca":
            return _parse_alpaca(record)
        case "alpaca_chat":
            return _parse_chat(record, source, _alpaca_turns(record), field)
        case "text":
            return _make_row(record, None, text("text"))
    return _parse_tokens(record)


def parse_question(record: Record, source: SourceSection) -> Chat:
    """What a row asks, without an answer; its columns are named as in a source, or as usual."""
    names = (source.messages, source.prompt, "messages", "prompt")
    name = next((name for name in names if name in record.values), "prompt")
    if not isinstance(_column_value(record, name, None), list):
        return user_chat(_text_column(record, name, None), record.origin)
    turns = _parse_turns(record, name, None, "data.train", _parse_message)
    if turns[-1]["role"] == "assistant":
        raise DataError(f"{record.origin}: the last turn is the assistant's; remove it to ask")
    return Chat(tuple(turns), _parse_tools(record, source.tools), (), record.origin)


def user_chat(text: str, origin: str = "the prompt") -> Chat:
    """A question, as the one turn of a user."""
    return Chat(({"role": "user", "content": text},), None, (), origin)


def _parse_turns(
    record: Record, name: str, setting: str | None, field: str, read: Callable[..., Turn]
) -> list[Turn]:
    value = _list_column(record, name, setting, "a list of turns")
    if not value:
        raise DataError(
            f"{record.origin}: column {name!r} holds an empty list; correct or remove the row"
        )
    found = []
    for number, turn in enumerate(value, start=1):
        place = f"{record.origin}: turn {number} of {name!r}"
        found.append(read(_expect(turn, Mapping, f"{place} is", "an object"), place, field))
    return found


def _column_names(record: Record) -> str:
    return ", ".join(record.values) or "none"


class MissingColumnError(DataError):
    """A column that is not there; names those that are, and the nearest."""

    def __init__(self, record: Record, name: str, setting: str | None) -> None:
        remedy = f"; set {setting} to one of them" if setting else "; rows of this format need it"
        super().__init__(
            f"{record.origin}: no column {name!r}; columns here: {_column_names(record)}{remedy}"
            + did_you_mean(name, record.values)
        )
        self.name = name


def _column_value(record: Record, name: str, setting: str | None) -> Any:
    """A column's value. `setting` is the run file's field that names it; None where fixed."""
    if name not in record.values:
        raise MissingColumnError(record, name, setting)
    return record.values[name]


def _text_column(record: Record, name: str, setting: str | None) -> str:
    """A column as text; a number is refused, for in another writing it is another text."""
    value = _column_value(record, name, setting)
    if not isinstance(value, str):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        raise DataError(
            f"{record.origin}: column {name!r} holds {type_name(value)}"
            f"{f' ({value!r:.40})' if number else ''}; text is expected. "
            + ("Write it as text, in quotes" if number else "Correct or remove the row")
            + ", or name another column"
        )
    _check_text(value, f"{record.origin}: column {name!r}")
    return value


def _check_text(text: str, where: str) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X} at character {error.start}), which is not a "
            "character; correct or remove the row"
        ) from None


def _from_json(value: Any, where: str, expected: str) -> Any:
    """A value, or what it means where it is JSON text: tables keep lists and objects as text."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except DoubleKeyError as error:
        raise DataError(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        raise DataError(
            f"{where} holds text that is not JSON ({shorten(value)!r}); {expected} is expected"
        ) from None


def _make_row(record: Record, prompt: str | None, text: str) -> Row:
    _refuse_long(f"{prompt or ''}{text}", record)
    return Row(prompt, text, record.origin)


def _parse_alpaca(record: Record) -> Row:
    instruction = _text_column(record, "instruction", None)
    given = "" if record.values.get("input") is None else _text_column(record, "input", None)
    template = ALPACA_WITH_INPUT if given else ALPACA_WITHOUT_INPUT
    prompt = template.format(instruction=instruction, input=given)
    return _make_row(record, prompt, _text_column(record, "output", None))


def _alpaca_turns(record: Record) -> list[Turn]:
    """The same columns as a chat: what was said before, then the instruction with its input."""
    pairs = record.values.get("history") or []
    where = f"{record.origin}: column 'history'"
    said: list[str] = []
    for pair in _expect(pairs, list, f"{where} holds", "a list of pairs"):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise DataError(
                f"{where} holds {pair!r:.60}; pairs of question and answer are expected"
            )
        said += pair
    columns = ("instruction", "input") if record.values.get("input") else ("instruction",)
    said.append("\n".join(_text_column(record, name, None) for name in columns))
    said.append(_text_column(record, "output", None))
    for text in said:
        _check_text(text, where)
    return [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(said)
    ]


def _are_turns(record: Record, source: SourceSection, field: str) -> bool:
    """Whether prompt and completion are lists of turns."""
    names = {"prompt": source.prompt, "completion": source.completion}
    turns = {n: isinstance(record.values.get(n), list) for n in names.values()}
    if any(turns.values()) and not all(turns.values()):
        for setting, name in names.items():
            _column_value(record, name, f"{field}.{setting}")
        one, other = sorted(turns, key=lambda name: not turns[name])
        raise DataError(
            f"{record.origin}: {one!r} holds a list and {other!r} does not; both are text, or both "
            "are lists of turns"
        )
    return all(turns.values())


def _parse_pair(record: Record, source: SourceSection, field: str) -> AnswerPair:
    """Two answers to the prompt of a column; or two whole texts or conversations, whose common
    beginning is the prompt (`extract_prompt` of TRL)."""
    where, names = record.origin, (source.chosen, source.rejected)
    settings = (f"{field}.chosen", f"{field}.rejected")
    answers = [_column_value(record, *each) for each in zip(names, settings, strict=True)]
    prompt = record.values.get(source.prompt)
    if all(isinstance(each, str) for each in (*answers, prompt or "")):
        chosen, rejected = (_text_column(record, *e) for e in zip(names, settings, strict=True))
        if prompt is not None:
            put = source.template.replace(
                PLACEHOLDER, _text_column(record, source.prompt, f"{field}.prompt")
            )
        else:
            put = chosen[: _shared(chosen, rejected, record, names)].removesuffix(" ")
            chosen, rejected = chosen[len(put) :], rejected[len(put) :]
        return AnswerPair(*(_make_row(record, put, text) for text in (chosen, rejected)))
    before = [] if prompt is None else _turns_of(record, source.prompt, prompt, "user", field)
    turns = [
        _turns_of(record, name, answer, "assistant", field)
        for name, answer in zip(names, answers, strict=True)
    ]
    shared = len(before)
    if any(each[0]["role"] not in ("assistant", "tool") for each in turns):
        before, shared = [], _shared(turns[0], turns[1], record, names)
        if not shared:
            raise DataError(
                f"{where}: the conversations of {names[0]!r} and {names[1]!r} begin differently, "
                "so they are not answers to one prompt; correct or remove the row"
            )
    return AnswerPair(
        *(_parse_chat(record, source, before + each, field, first_answer=shared) for each in turns)
    )


def _shared(chosen: Any, rejected: Any, record: Record, names: tuple[str, str]) -> int:
    """How many characters or turns two answers have in common at their beginning."""
    if chosen == rejected:
        raise DataError(
            f"{record.origin}: columns {names[0]!r} and {names[1]!r} are the same, and no column "
            "of a prompt says where the answer begins; correct or remove the row"
        )
    equal = (one == other for one, other in zip(chosen, rejected, strict=False))
    return sum(itertools.takewhile(bool, equal))


def _turns_of(record: Record, name: str, value: Any, role: str, field: str) -> list[Turn]:
    """The turns of a column: a list of them, one alone, or the text of one with a role."""
    if isinstance(value, str):
        return [{"role": role, "content": _text_column(record, name, None)}]
    where = f"{record.origin}: column {name!r}"
    turns = [value] if isinstance(value, Mapping) else value
    if not _expect(turns, list, f"{where} holds", "text, a turn or a list of turns"):
        raise DataError(f"{where} holds an empty list; correct or remove the row")
    found = []
    for number, turn in enumerate(turns, start=1):
        place = f"{record.origin}: turn {number} of {name!r}"
        read = _parse_sharegpt if isinstance(turn, Mapping) and "from" in turn else _parse_message
        found.append(read(_expect(turn, Mapping, f"{place} is", "an object"), place, field))
    return found


def _refuse_long(text: str, record: Record) -> None:
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > MOST_TEXT:
        raise DataError(
            f"{record.origin}: the row has {length:,} bytes of text, at most {MOST_TEXT:,} are "
            "taken (a tokenizer takes hundreds of times as much memory); split it into several rows"
        )


def _parse_tokens(record: Record) -> TokenRow:
    where = record.origin
    ids = _list_column(record, "input_ids", None, "a list of numbers")
    for place, one in enumerate(ids):
        if type(one) is not int or one < 0:
            raise DataError(
                f"{where}: input_ids[{place}] is {one!r:.40}; whole numbers from 0 are expected"
            )
    attended = record.values.get("attention_mask")
    if isinstance(attended, list) and 0 in attended:
        raise DataError(
            f"{where}: attention_mask[{attended.index(0)}] is 0, which is padding; rows have none: "
            "remove these tokens"
        )
    masks = [name for name in ("labels", "loss_mask") if name in record.values]
    if len(masks) > 1:
        raise DataError(f"{where}: the row has 'labels' and 'loss_mask'; give one of them")
    if not masks:
        return TokenRow(ids, [True] * len(ids), where)
    [name] = masks
    marks = _list_column(record, name, None, "a list of numbers")
    if len(marks) != len(ids):
        raise DataError(
            f"{where}: 'input_ids' has {len(ids)} values and {name!r} {len(marks)}; both have one "
            "for each token"
        )
    for place, (one, token) in enumerate(zip(marks, ids, strict=True)):
        if name == "loss_mask" and not (isinstance(one, int) and one in (0, 1)):
            raise DataError(f"{where}: loss_mask[{place}] is {one!r:.40}; valid: 0, 1, false, true")
        if name == "labels" and (type(one) is not int or one not in (token, NO_LOSS)):
            raise DataError(
                f"{where}: labels[{place}] is {one!r:.40}; valid: {token}, which is "
                f"input_ids[{place}], or {NO_LOSS} for no loss. Labels are not shifted: each "
                "stands at the place of its own token"
            )
    without = NO_LOSS if name == "labels" else 0
    return TokenRow(ids, [one != without for one in marks], where)


def _list_column(record: Record, name: str, setting: str | None, expected: str) -> list[Any]:
    where = f"{record.origin}: column {name!r}"
    value = _from_json(_column_value(record, name, setting), where, expected)
    values: list[Any] = _expect(value, list, f"{where} holds", expected)
    return values


def _expect(value: Any, wanted: type, found: str, expected: str) -> Any:
    """The value, if it is of the wanted type; `found`: its place with a verb, as "turn 3 holds"."""
    if not isinstance(value, wanted):
        raise DataError(f"{found} {type_name(value)}; {expected} is expected")
    return value


def _parse_chat(
    record: Record, source: SourceSection, turns: list[Turn], field: str, first_answer: int = 0
) -> Chat:
    where = record.origin
    has_system = record.values.get(source.system) not in (None, "")
    if has_system:
        system = _text_column(record, source.system, f"{field}.system")
        turns.insert(0, {"role": "system", "content": system})
        first_answer += 1
    systems = [number for number, turn in enumerate(turns, 1) if turn["role"] == "system"]
    if len(systems) > 1:
        of_column = f" (the first comes from column {source.system!r})" if has_system else ""
        raise DataError(
            f"{where}: turns {', '.join(map(str, systems))} are system turns{of_column}, but a "
            "chat may have only one; join them into one turn"
        )
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    answers = [number for number in answers if number >= first_answer]
    if not answers:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(
            f"{where}: no turn of the assistant to learn from (turns here: {roles}); "
            "correct or remove the row"
        )
    weights = {number: turns[number].pop("weight", 1) for number in answers}
    for number, weight in weights.items():
        if weight not in (0, 1):
            raise DataError(f"{where}: turn {number + 1} has the weight {weight!r}; valid: 0, 1")
    tools = _parse_tools(record, source.tools)
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
    _check_text(text, f"{where}: the chat")
    _refuse_long(text, record)
    learned = tuple(number for number, weight in weights.items() if weight)
    return Chat(tuple(turns), tools, learned, where)


def _parse_message(turn: Mapping[str, Any], where: str, field: str) -> Turn:
    foreign = ""
    if "role" not in turn and "from" in turn:
        foreign = "'from' instead of 'role'"
    elif turn.get("role") in _SHAREGPT_ALONE:
        foreign = f"the role {turn['role']!r}, which is ShareGPT's"
    if foreign:
        raise DataError(
            f"{where} has {foreign}: set {field}.format to sharegpt and {field}.conversations to "
            "this column"
        )
    role = _parse_role(turn, "role", ROLES, where)
    # Other keys that a template may read are kept: name, tool_call_id, reasoning_content.
    kept = {key: value for key, value in turn.items() if value is not None}
    legacy = kept.pop("function_call", None)
    calls = kept.pop("tool_calls", None) or (None if legacy is None else [legacy])
    if calls is not None:
        if role != "assistant":
            raise DataError(
                f"{where} has tool calls and the role {role!r}; only the assistant may call tools"
            )
        kept["tool_calls"] = _parse_tool_calls(calls, where)
    if calls is None or "content" in kept:
        kept["content"] = _parse_content(turn, "content", role, where)
    return kept


def _parse_sharegpt(turn: Mapping[str, Any], where: str, field: str) -> Turn:
    if "from" not in turn and "role" in turn:
        name = _parse_role(turn, "role", tuple(SHAREGPT_ROLES), where)
        if name != "function_call":
            return _parse_message({**turn, "role": SHAREGPT_ROLES[name]}, where, field)
        turn = {"from": name, "value": turn.get("content")}
    name = _parse_role(turn, "from", tuple(SHAREGPT_ROLES), where)
    if name == "function_call" and (value := turn.get("value")) is not None:
        calls = _from_json(value, f"{where} (function_call)", "an object with name and arguments")
        return {"role": "assistant", "tool_calls": _parse_tool_calls(calls, where)}
    return {"role": SHAREGPT_ROLES[name], "content": _parse_content(turn, "value", name, where)}


def _parse_role(turn: Mapping[str, Any], key: str, roles: tuple[str, ...], where: str) -> str:
    if key not in turn:
        keys = ", ".join(map(repr, turn)) or "none"
        raise DataError(f"{where} has no {key!r}; keys here: {keys}")
    role = turn[key]
    if role not in roles:
        meant = did_you_mean(str(role), roles)
        raise DataError(f"{where} has the {key} {role!r}; valid: {', '.join(roles)}{meant}")
    return str(role)


def _parse_content(turn: Mapping[str, Any], key: str, role: str, where: str) -> str:
    """Read a turn's text under a key."""
    value = turn.get(key)
    if value is None:
        found = f"null as {key}" if key in turn else f"no {key}"
        raise DataError(f"{where} ({role}) has {found}; text is expected")
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                type_ = part.get("type") if isinstance(part, Mapping) else type_name(part)
                raise DataError(
                    f"{where} has a part of the type {type_!r}; only text can be trained on, as "
                    '{"type": "text", "text": ...}'
                )
            if not isinstance(part.get("text"), str):
                raise DataError(f"{where} has a part of the type 'text' without a text")
        value = "".join(part["text"] for part in value)
    _check_text(_expect(value, str, f"{where} holds", "text"), where)
    return str(value)


def _parse_tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where} has a tool call that is not an object with a name and arguments: "
                f"{call!r:.80}"
            )
        given = function.get("arguments")
        place = f"{where}: arguments of {function['name']!r}"
        # Templates write arguments as JSON themselves: JSON text would be written as a string.
        arguments = {} if given in (None, "") else _from_json(given, place, "an object")
        _expect(arguments, Mapping, f"{place}:", "an object")
        identity = {"id": call["id"]} if call.get("id") is not None else {}
        named = {"name": function["name"], "arguments": dict(arguments)}
        calls.append({**identity, "type": "function", "function": named})
    return calls


def _parse_tools(record: Record, name: str) -> tuple[dict[str, Any], ...] | None:
    value = record.values.get(name)
    if value in (None, ""):
        return None
    where = f"{record.origin}: column {name!r}"
    value = _from_json(value, where, "a list of tools")
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        if not isinstance(function, Mapping):
            raise DataError(f"{where} holds {type_name(function)} as a tool; an object is expected")
        if "name" not in function:
            keys = ", ".join(map(repr, function)) or "none"
            raise DataError(f"{where}: a tool has no 'name'; keys here: {keys}")
        tools.append({**tool} if "function" in tool else {"type": "function", "function": {**tool}})
    return tuple(tools) or None
