"""The rows of JSON files, one object a line or all in a list, and the documents of text files.

Why our own, and not the JSON reader of `datasets` (5.2): it makes a table of the rows. Types are
inferred over rows, so that texts which look like dates become times and "1" beside 2 becomes 1; a
key that a row lacks becomes null; a number beyond 64 bits is rounded; messages count rows within a
block and name neither line nor file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

from anygauge.data.records import (
    BOM,
    MOST_LINE,
    NEWLINE,
    DoubleKeyError,
    RawRow,
    complaint,
    decode,
    kind,
    load_json,
)
from anygauge.interface import DataError

MOST_WHOLE = 2**32
"""Bytes of a file that is read whole: of a list, and of text."""

_BEGIN = 4096

OpenFile = Callable[[], BinaryIO]
"""Opens a source's file at its beginning, unpacked."""


def line_rows(open_file: OpenFile, name: str, where: str = "") -> Iterator[RawRow]:
    """The lines that hold more than blanks, not parsed yet.

    Args:
        name: of the file, for messages.
        where: see `RawRow`; ``{}`` becomes the number of the line.

    Raises:
        DataError: unreadable, or a line is too long.
    """
    for number, offset, line in _filled_lines(open_file, name):
        yield RawRow(number, line, offset, where.format(number))


def _filled_lines(open_file: OpenFile, name: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, place in bytes and content of the lines that hold more than blanks."""
    number = offset = 0
    with open_file() as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise DataError(
                    f"{name}:{number}: the row has more than {MOST_LINE:,} bytes, which is as many "
                    "as are read; split it into several rows"
                )
            skipped = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line[skipped:].strip():
                yield number, offset + skipped, line[skipped:]
            offset += len(line)


def holds_lines(open_file: OpenFile, name: str) -> bool:
    """Whether a .json file's first filled line is a JSON object, and not its only one."""
    with open_file() as file:
        if not file.read(_BEGIN).removeprefix(BOM).lstrip().startswith(b"{"):
            return False
    first, *others = [line for _, _, line in islice(_filled_lines(open_file, name), 2)]
    if not others:
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return others[0].lstrip().startswith(b"{")


def list_rows(open_file: OpenFile, name: str) -> Iterator[RawRow]:
    """The objects of a .json file that holds a list of them; read whole.

    Raises:
        DataError: unreadable, malformed or empty.
    """
    text = whole_text(open_file, name)
    if not text.strip():
        return
    expected = "a list of objects is expected"
    try:
        value = load_json(text)
    except json.JSONDecodeError as error:
        line = f"{name}:{error.lineno}"
        raise DataError(f"{line}: not valid JSON ({complaint(error)}); {expected}") from None
    except DoubleKeyError as error:
        raise DataError(f"{name}{_index_of_double(text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not valid JSON ({complaint(error)}); {expected}") from None
    if not isinstance(value, list):
        keys = f" with the keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
        raise DataError(
            f"{name}: {expected} at the top, found {kind(value)}{keys}; "
            "write the rows as [{...}, {...}], or one a line in a .jsonl file"
        )
    if not value:
        raise DataError(f"{name} holds an empty list; at least one row is needed")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{name}[{index}]: a JSON object is expected, found {kind(item)}")
        yield RawRow(index, item)


def _index_of_double(text: str) -> str:
    """``[17]``, the first object of a list that has a key twice; "" if the text holds no list."""
    found: list[Any] = json.loads(text, object_pairs_hook=lambda pairs: _Pairs(pairs))
    if not isinstance(found, list):
        return ""
    return next((f"[{index}]" for index, item in enumerate(found) if _has_double(item)), "")


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON with its keys as often as they stand there."""


def _has_double(value: Any) -> bool:
    if isinstance(value, _Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(_has_double(below) for _, below in value)
    return isinstance(value, list) and any(map(_has_double, value))


def document_rows(open_file: OpenFile, name: str, column: str) -> Iterator[RawRow]:
    """The documents of a plain text file, each a row with one value under `column`.

    Blank lines separate documents. A file without any blank line between its lines holds one
    document a line, as corpora do that are written by programs. Line ends become ``\\n``. The
    place of a document is the line on which it begins.

    Raises:
        DataError: unreadable, or not UTF-8.
    """
    text = whole_text(open_file, name)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    one_a_line = bool(filled) and filled[-1] - filled[0] + 1 == len(filled)
    groups: list[list[int]] = []
    for number in filled:
        if one_a_line or not groups or groups[-1][-1] != number - 1:
            groups.append([])
        groups[-1].append(number)
    for group in groups:
        yield RawRow(group[0] + 1, {column: "\n".join(lines[number] for number in group)})


def whole_text(open_file: OpenFile, name: str) -> str:
    """All that a file holds.

    Raises:
        DataError: unreadable, too large, or not UTF-8.
    """
    with open_file() as file:
        raw = file.read(MOST_WHOLE + 1)
    if len(raw) > MOST_WHOLE:
        raise DataError(
            f"{name}: text and JSON lists are read whole, at most {MOST_WHOLE:,} bytes; write the "
            "rows as JSON Lines or Parquet"
        )
    text = decode(raw, lambda start: f"{name}:{raw.count(NEWLINE, 0, start) + 1}")
    return text.removeprefix("\ufeff")
