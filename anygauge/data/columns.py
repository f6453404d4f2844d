"""Columns of a record: read with their type checked, and named well where they are missing."""

from __future__ import annotations

import difflib
from typing import Any

from anygauge.data.files import DoubleKeyError, Record, kind, load_json
from anygauge.interface import DataError


def column(record: Record, name: str, setting: str | None) -> Any:
    """A column's value. `setting` is the run file's field that names it; None where fixed.

    Raises:
        DataError: the record has no such column.
    """
    if name not in record.values:
        raise missing(record, name, setting)
    return record.values[name]


def missing(record: Record, name: str, setting: str | None) -> DataError:
    """The error for a column that is not there; names those that are, and the nearest."""
    near = difflib.get_close_matches(name, record.values, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    remedy = f"; set {setting} to one of them" if setting else "; alpaca rows need it"
    return DataError(
        f"{record.origin}: no column {name!r}; columns here: {listed(record)}{remedy}{meant}"
    )


def text_column(record: Record, name: str, setting: str | None) -> str:
    """A column as text.

    Raises:
        DataError: missing, no text (a number in another writing is another text), or no valid one.
    """
    value = column(record, name, setting)
    if not isinstance(value, str):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        raise DataError(
            f"{record.origin}: column {name!r} holds {kind(value)}"
            f"{f' ({value!r:.40})' if number else ''}; text is expected. "
            + ("Write it as text, in quotes" if number else "Correct or remove the row")
            + ", or name another column"
        )
    check_text(value, f"{record.origin}: column {name!r}")
    return value


def byte_length(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_text(text: str, where: str) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer can read.

    Raises:
        DataError: names the place and the half.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X} at character {error.start}), which is not a "
            "character; correct or remove the row"
        ) from None


def from_json(value: Any, where: str, expected: str) -> Any:
    """A value, or what it means where it is JSON text: tables keep lists and objects as text.

    Args:
        expected: what should be there, in words; for the message.

    Raises:
        DataError: text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except DoubleKeyError as error:
        raise DataError(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        shown = value if len(value) <= 60 else value[:60] + "..."
        raise DataError(
            f"{where} holds text that is not JSON ({shown!r}); {expected} is expected"
        ) from None


def listed(record: Record) -> str:
    """The names of a record's columns."""
    return ", ".join(record.values) or "none"
