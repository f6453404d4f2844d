"""From records to rows: which format a source has, and prompts with answers, texts and chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.config.paths import data_suffix
from anygauge.config.schema import SourceSection
from anygauge.data.chat import Chat, chat_from_columns, chat_from_messages, chat_from_sharegpt
from anygauge.data.readers import (
    MissingColumnError,
    Record,
    byte_length,
    column,
    from_json,
    kind,
    listed,
    text_column,
)
from anygauge.interface import DataError, RunFileError

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

CHAT_FORMATS = ("messages", "sharegpt")

NO_LOSS = -100
"""In `labels`: a token without a loss; what the transformers library and torch leave out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row without turns, ready to be tokenised.

    Attributes:
        prompt: all that the model reads before it answers, template applied; None for plain
            text, where every token has a loss.
        text: the answer or the plain text; may be empty (such rows are counted and left out).
        origin: where it stands, as in its record.
    """

    prompt: str | None
    text: str
    origin: str

    @property
    def size(self) -> int:
        """Bytes of its text in UTF-8."""
        return sum(byte_length(text) for text in (self.prompt or "", self.text))


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row that was tokenised elsewhere.

    Attributes:
        ids: token numbers, not yet compared with a vocabulary.
        loss_mask: which of them have a loss; as many.
        origin: where it stands, as in its record.
    """

    ids: list[int]
    loss_mask: list[bool]
    origin: str


AnyRow = Row | Chat | TokenRow


def detect_format(first: Record, source: SourceSection, field: str) -> str:
    """The format of a source's rows, from the run file, else from its path and first record.

    Args:
        field: where the source stands in the run file, as ``data.train`` or ``data.train[1]``.

    Raises:
        DataError: no format fits.
        RunFileError: format, template and file do not match.
    """
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
    if row_format == "prompt_completion" and PLACEHOLDER not in source.template:
        raise RunFileError(
            f"{field}.template is {source.template!r}, which lacks {PLACEHOLDER}: "
            "the model would never see the prompt"
        )
    return row_format


def parse_all(
    records: Sequence[Record], row_format: str, source: SourceSection, field: str
) -> list[AnyRow]:
    """Neighbouring records; see `parse`. Of a column that one lacks, the others say more."""
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
                f"it. Correct or remove the row; columns here: {listed(record)}"
            ) from None
    return rows


def parse(record: Record, row_format: str, source: SourceSection, field: str) -> AnyRow:
    """One record as a row, a chat or tokens.

    Args:
        row_format: see `detect_format`.

    Raises:
        DataError: the record cannot be used; names file, row and what was expected.
    """
    row = _parsed(record, row_format, source, field)
    length = 0 if isinstance(row, TokenRow) else row.size
    if length > MOST_TEXT:
        raise DataError(
            f"{record.origin}: the row has {length:,} bytes of text, at most {MOST_TEXT:,} are "
            "taken (a tokenizer takes hundreds of times as much memory); split it into several rows"
        )
    return row


def _parsed(record: Record, row_format: str, source: SourceSection, field: str) -> AnyRow:
    match row_format:
        case "messages":
            return chat_from_messages(record, source, field)
        case "sharegpt":
            return chat_from_sharegpt(record, source, field)
        case "alpaca":
            return _alpaca(record)
        case "text":
            return Row(None, text_column(record, source.text, f"{field}.text"), record.origin)
        case "prompt_completion":
            return _prompt_completion(record, source, field)
        case "tokens":
            return _tokens(record)
    raise ValueError(f"no format {row_format!r}")


def render(template: str, prompt: str) -> str:
    """The prompt in its template. Replaced literally: other braces are left alone."""
    return template.replace(PLACEHOLDER, prompt)


def render_alpaca(instruction: str, given: str = "") -> str:
    """Alpaca's prompt for an instruction and an input, which may be empty."""
    template = ALPACA_WITH_INPUT if given else ALPACA_WITHOUT_INPUT
    # The instruction last, so that "{input}" written in an instruction stays as it is.
    before, after = template.split("{instruction}")
    return before + instruction + after.replace("{input}", given)


def prompt_template(
    first: Record, source: SourceSection, *, has_chat_template: bool = False
) -> str | None:
    """What stands around a question, ``{prompt}``, when a model trained on this source is asked.

    None for chats: there a question goes through the chat template. So it does for rows of tokens
    where there is one: how those were made is not known.
    """
    row_format = detect_format(first, source, "data.train")
    if row_format == "tokens":
        return None if has_chat_template else PLACEHOLDER
    is_turns = row_format == "prompt_completion" and isinstance(
        first.values.get(source.prompt), list
    )
    if row_format in CHAT_FORMATS or is_turns:
        return None
    if row_format == "alpaca":
        return ALPACA_WITHOUT_INPUT.replace("{instruction}", PLACEHOLDER)
    return PLACEHOLDER if row_format == "text" else source.template


def _by_columns(first: Record, source: SourceSection, field: str) -> str:
    formats = {
        "prompt_completion": ("prompt", "completion"),
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "text": ("text",),
    }
    # A column that the run file names decides the format, so a misspelt one is never ignored.
    for row_format, names in formats.items():
        if any(getattr(source, name) != _default(name) for name in names):
            return row_format
    columns = set(first.values)
    for row_format in ("prompt_completion", "messages", "sharegpt"):
        if {getattr(source, name) for name in formats[row_format]} <= columns:
            return row_format
    if {"instruction", "output"} <= columns:
        return "alpaca"
    if source.text in columns:
        return "text"
    if "input_ids" in columns:
        return "tokens"
    example = next(iter(first.values), "question")
    raise DataError(
        f"{first.origin}: cannot detect the format of these rows; columns here: {listed(first)}. "
        f"Name the two columns ({field}.prompt: {example} and {field}.completion: ...), one "
        f"column of turns ({field}.messages: ... or {field}.conversations: ...), or one column of "
        f"plain text ({field}.text: ...)"
    )


def _default(name: str) -> str:
    return str(SourceSection.model_fields[name].default)


def _prompt_completion(record: Record, source: SourceSection, field: str) -> Row | Chat:
    names = (source.prompt, source.completion)
    turns = [isinstance(record.values.get(name), list) for name in names]
    if all(turns):
        return chat_from_columns(record, source, field)
    for name, setting in zip(names, ("prompt", "completion"), strict=True):
        column(record, name, f"{field}.{setting}")
    if any(turns):
        raise DataError(
            f"{record.origin}: {names[turns.index(True)]!r} holds a list and "
            f"{names[turns.index(False)]!r} does not; both are text, or both are lists of turns"
        )
    prompt = text_column(record, source.prompt, f"{field}.prompt")
    answer = text_column(record, source.completion, f"{field}.completion")
    return Row(render(source.template, prompt), answer, record.origin)


def _alpaca(record: Record) -> Row:
    instruction = text_column(record, "instruction", None)
    given = "" if record.values.get("input") is None else text_column(record, "input", None)
    return Row(
        render_alpaca(instruction, given), text_column(record, "output", None), record.origin
    )


def _tokens(record: Record) -> TokenRow:
    where = record.origin
    ids = _numbers(record, "input_ids")
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
    marks = _numbers(record, name)
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
    if name == "labels":
        return TokenRow(ids, [one != NO_LOSS for one in marks], where)
    return TokenRow(ids, [bool(one) for one in marks], where)


def _numbers(record: Record, name: str) -> list[Any]:
    where = f"{record.origin}: column {name!r}"
    value = from_json(column(record, name, None), where, "a list of numbers")
    if not isinstance(value, list):
        raise DataError(f"{where} holds {kind(value)}; a list of numbers is expected")
    return value
