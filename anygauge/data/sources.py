"""Turns files of any accepted form into rows: what the model reads, and what it should write."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import SourceSection
from anygauge.data.files import SUFFIXES, Record, kind, read_documents, read_records
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


@dataclass(frozen=True, slots=True)
class Row:
    """One row, ready to be tokenised.

    Attributes:
        prompt: all that the model reads before it answers, template applied; None for plain
            text, where every token is to be learned.
        text: the answer or the plain text; may be empty (such rows are counted and left out).
        origin: where it stands: ``data.jsonl:17``, ``data.txt:17`` (line, from 1) or
            ``data.json[16]`` (index, from 0).
    """

    prompt: str | None
    text: str
    origin: str


def read_rows(source: SourceSection, *, field: str = "data.train") -> list[Row]:
    """All rows of a source, in the file's order.

    Args:
        field: where the source stands in the run file; messages name it.

    Raises:
        DataError: the file or a row cannot be used; names file, line and columns.
        RunFileError: form, template or columns do not go together.
    """
    path = source.path
    if not path.lower().endswith(SUFFIXES):
        raise DataError(
            f"{path}: this kind of file is not read; {field}.path takes {', '.join(SUFFIXES)}"
        )
    if path.lower().endswith(".txt"):
        if source.form not in ("auto", "text"):
            raise RunFileError(
                f"{field}.form is {source.form!r}, but {path} is plain text and has no columns; "
                "set the form to 'text' or 'auto', or give a .json or .jsonl file"
            )
        documents = read_documents(path, source.limit)
        return [Row(None, document.text, document.origin) for document in documents]
    if PLACEHOLDER not in source.template:
        raise RunFileError(
            f"{field}.template is {source.template!r}, which lacks {PLACEHOLDER}: "
            "the model would never see the prompt"
        )
    records = read_records(path, source.limit)
    form = source.form if source.form != "auto" else _told_form(records[0], source, field)
    make = {"prompt_completion": _prompt_completion, "alpaca": _alpaca, "text": _text}[form]
    return [make(record, source, field) for record in records]


def render(template: str, prompt: str) -> str:
    """The prompt in its template. Replaced literally: other braces are left alone."""
    return template.replace(PLACEHOLDER, prompt)


def render_alpaca(instruction: str, given: str = "") -> str:
    """Alpaca's prompt for an instruction and an input, which may be empty."""
    template = ALPACA_WITH_INPUT if given else ALPACA_WITHOUT_INPUT
    # The instruction last, so that "{input}" written in an instruction stays as it is.
    before, after = template.split("{instruction}")
    return before + instruction + after.replace("{input}", given)


def prompt_template(source: SourceSection) -> str:
    """What stands around a question, ``{prompt}``, when a model trained on this source is asked.

    Raises:
        DataError: the form is ``auto`` and the file that would tell it cannot be read any more.
    """
    form: str = source.form
    if form == "auto":
        if source.path.lower().endswith(".txt"):
            form = "text"
        else:
            form = _told_form(read_records(source.path, 1)[0], source, "data.train")
    if form == "alpaca":
        return ALPACA_WITHOUT_INPUT.replace("{instruction}", PLACEHOLDER)
    return PLACEHOLDER if form == "text" else source.template


def _told_form(first: Record, source: SourceSection, field: str) -> str:
    columns = set(first.values)
    defaults = {name: SourceSection.model_fields[name].default for name in ("prompt", "completion")}
    named = source.prompt != defaults["prompt"] or source.completion != defaults["completion"]
    # A column that the run file names settles the form, so a misspelt one is never passed over.
    if named or {source.prompt, source.completion} <= columns:
        return "prompt_completion"
    if {"instruction", "output"} <= columns:
        return "alpaca"
    if source.text in columns or source.text != SourceSection.model_fields["text"].default:
        return "text"
    example = next(iter(first.values), "question")
    raise DataError(
        f"{first.origin}: cannot tell the form of these rows; columns here: {_listed(first)}. "
        f"Name the two columns ({field}.prompt: {example} and {field}.completion: ...), or one "
        f"column of plain text ({field}.text: ...)"
    )


def _prompt_completion(record: Record, source: SourceSection, field: str) -> Row:
    prompt = _column(record, source.prompt, f"{field}.prompt")
    answer = _column(record, source.completion, f"{field}.completion")
    return Row(render(source.template, prompt), answer, record.origin)


def _alpaca(record: Record, source: SourceSection, field: str) -> Row:
    instruction = _column(record, "instruction", None)
    given = "" if record.values.get("input") is None else _column(record, "input", None)
    answer = _column(record, "output", None)
    return Row(render_alpaca(instruction, given), answer, record.origin)


def _text(record: Record, source: SourceSection, field: str) -> Row:
    return Row(None, _column(record, source.text, f"{field}.text"), record.origin)


def _column(record: Record, name: str, setting: str | None) -> str:
    """A column as text. `setting` is the run file's field that names it; None where fixed."""
    if name not in record.values:
        near = difflib.get_close_matches(name, record.values, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        remedy = f"; set {setting} to one of them" if setting else "; alpaca rows need it"
        raise DataError(
            f"{record.origin}: no column {name!r}; columns here: {_listed(record)}{remedy}{meant}"
        )
    value: Any = record.values[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{record.origin}: column {name!r} holds {kind(value)}; text or a number is expected. "
            "Correct or remove the row, or name another column"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{record.origin}: column {name!r} holds half of a surrogate pair "
                f"(U+{ord(value[error.start]):04X} at character {error.start}), which is no "
                "character; correct or remove the row"
            ) from None
    return value


def _listed(record: Record) -> str:
    return ", ".join(record.values) or "none"
