"""Records: one row as it stands in its source, its JSON and its columns, with its place.

A record's origin is its file and a place: `data.jsonl:17` (a line), `data.json[16]` (an index).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anygauge.interface import DataError
from anygauge.util.text import did_you_mean

MOST_LINE = 2**25
"""Bytes of a line; its text is bounded below that (`formats.MOST_TEXT`), JSON writes more."""
BOM = b"\xef\xbb\xbf"
LINE_MARK = ":{}"
INDEX_MARK = "[{}]"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class Record:
    """One row as it stands in its file, and where: `data.jsonl:17` or `data.json[16]`."""

    values: Mapping[str, Any]
    origin: str


class RawRow(NamedTuple):
    """A row as a source gives it, before anything is parsed.

    Attributes:
        place: its line or index, to be written behind the source's name.
        value: a line of JSON, or the values by column.
        offset: of a line in its file, in bytes.
        where: of a line, where it stands in one of a source's several files; "" where it is one.
    """

    place: int
    value: bytes | Mapping[str, Any]
    offset: int = 0
    where: str = ""

    def record(self, origin: str) -> Record:
        """The row, parsed. `origin`: ``data.jsonl:{}``, with a place for the row's.

        Raises:
            DataError: a line is not UTF-8, not JSON, or no object.
        """
        place = origin.format(self.place)
        if not isinstance(self.value, bytes):
            return Record(self.value, place)
        where = f"{place} ({self.where})" if self.where else place
        return Record(parse_object(self.value, where, self.offset), place)


def parse_object(line: bytes, origin: str, offset: int) -> Mapping[str, Any]:
    """The JSON object on a line.

    Args:
        origin: the line's place, for messages.
        offset: of the line in its file, in bytes.

    Raises:
        DataError: not UTF-8, not JSON, or no object.
    """
    # Up to the next filled line: JSON itself takes fewer blanks than may stand between them.
    text = decode(line.rstrip(), lambda _: origin, offset)
    try:
        value = load_json(text)
    except DoubleKeyError as error:
        raise DataError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{origin}: one JSON object per line is expected, "
            f"but this line is not valid JSON ({complaint(error)}): {_excerpt(text)}"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a JSON object is expected, found {kind(value)}")
    return value


class DoubleKeyError(ValueError):
    """An object of JSON that has a key twice: one of its values would be lost."""


def load_json(text: str) -> Any:
    """What JSON means.

    Raises:
        DoubleKeyError: a key stands twice in one object.
        ValueError: not JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(text, object_pairs_hook=plain_object)


def plain_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its pairs.

    Raises:
        DoubleKeyError: a key stands twice.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        double = _first_double(key for key, _ in pairs)
        raise DoubleKeyError(f"the key {double[:60]!r} is written twice in one object; keep one")
    return made


def _first_double(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is there twice")


def decode(raw: bytes, where: Any, offset: int = 0) -> str:
    """Text of bytes in UTF-8.

    Args:
        where: error position in `raw` -> the place, for the message.
        offset: of `raw` in its file.

    Raises:
        DataError: not UTF-8; says at which byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        seems = "; it seems to be UTF-16" if raw[:2] in _UTF16_MARKS else ""
        raise DataError(
            f"{where(error.start)}: not UTF-8 at byte {offset + error.start} of the file "
            f"(0x{raw[error.start]:02x}){seems}; save the file as UTF-8"
        ) from None


def kind(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def complaint(error: Exception) -> str:
    """What is wrong with JSON, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _excerpt(line: str, width: int = 60) -> str:
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."


def column(record: Record, name: str, setting: str | None) -> Any:
    """A column's value. `setting` is the run file's field that names it; None where fixed.

    Raises:
        DataError: the record has no such column.
    """
    if name not in record.values:
        raise MissingColumnError(record, name, setting)
    return record.values[name]


class MissingColumnError(DataError):
    """A column that is not there; names those that are, and the nearest."""

    def __init__(self, record: Record, name: str, setting: str | None) -> None:
        remedy = f"; set {setting} to one of them" if setting else "; rows of this format need it"
        super().__init__(
            f"{record.origin}: no column {name!r}; columns here: {listed(record)}{remedy}"
            + did_you_mean(name, record.values)
        )
        self.name = name


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
