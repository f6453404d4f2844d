"""Reads JSON, JSON Lines and plain text files, and says exactly where one is malformed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import DataError

SUFFIXES = (".json", ".jsonl", ".txt")
_BOM = "\ufeff"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object and where it stands: `data.jsonl:17` (line) or `data.json[16]` (index)."""

    values: Mapping[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class Document:
    """One stretch of plain text and the line on which it begins: `notes.txt:17`."""

    text: str
    origin: str


def read_records(path: str, limit: int | None = None) -> list[Record]:
    """The objects of a .jsonl file (one a line) or a .json file (a list, or one a line).

    Args:
        limit: stop after so many objects; what lies beyond is not parsed in JSON Lines.

    Raises:
        DataError: missing, unreadable, malformed or empty; names the line.
    """
    text = _read(path)
    if not text.strip():
        raise DataError(f"{path} is empty; at least one row is needed")
    if path.lower().endswith(".json"):
        records = _from_json(path, text)
    else:
        records = _from_lines(path, text, limit)
    if not records:
        raise DataError(f"{path} holds an empty list; at least one row is needed")
    return records[:limit]


def read_documents(path: str, limit: int | None = None) -> list[Document]:
    """The documents of a plain text file.

    Blank lines separate documents. A file without any blank line between its lines holds one
    document a line, as corpora do that are written by programs. Line ends become ``\\n``.

    Raises:
        DataError: missing, unreadable or empty.
    """
    lines = _read(path).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if not filled:
        raise DataError(f"{path} is empty; at least one line of text is needed")
    one_a_line = filled[-1] - filled[0] + 1 == len(filled)
    groups: list[list[int]] = []
    for number in filled:
        if one_a_line or not groups or groups[-1][-1] != number - 1:
            groups.append([])
        groups[-1].append(number)
    return [
        Document("\n".join(lines[number] for number in group), f"{path}:{group[0] + 1}")
        for group in groups[:limit]
    ]


def _read(path: str) -> str:
    file = Path(path).expanduser()
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file (looked at {file.absolute()})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return raw.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        seems = "; it seems to be UTF-16" if raw.startswith(_UTF16_MARKS) else ""
        raise DataError(
            f"{path}:{line}: not UTF-8 at byte {error.start} of the file "
            f"(0x{raw[error.start]:02x}){seems}; save the file as UTF-8"
        ) from None


def _from_lines(path: str, text: str, limit: int | None) -> list[Record]:
    records: list[Record] = []
    # Not splitlines(): it also cuts at U+2028 and others that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(records) == limit:
            break
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{origin}: one JSON object per line is expected, "
                f"but this line is not valid JSON ({_complaint(error)}): {_excerpt(line)}"
            ) from None
        records.append(_record(value, origin))
    return records


def _from_json(path: str, text: str) -> list[Record]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _from_lines(path, text, None)
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON "
            f"({error.msg} at column {error.colno}); a list of objects is expected"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not valid JSON ({_complaint(error)}); a list of objects is expected"
        ) from None
    if not isinstance(value, list):
        keys = f" with the keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
        raise DataError(
            f"{path}: a list of objects is expected at the top, found {kind(value)}{keys}; "
            "write the rows as [{...}, {...}], or one a line in a .jsonl file"
        )
    return [_record(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _record(value: Any, origin: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a JSON object is expected, found {kind(value)}")
    return Record(value, origin)


def kind(value: Any) -> str:
    """What a parsed JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _complaint(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _excerpt(line: str, width: int = 60) -> str:
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."
