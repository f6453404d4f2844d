"""JSON lists and plain text files, which are read whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import unreadable
from anygauge.data.records import (
    INDEX_MARK,
    LINE_MARK,
    NEWLINE,
    DoubleKeyError,
    Record,
    complaint,
    decode,
    kind,
    load_json,
    plain_object,
)
from anygauge.interface import DataError
from anygauge.util.files import read_bounded

MOST_WHOLE = 2**32
"""Bytes of a file that is read whole."""


class ReadWhole:
    """A reader of records that are in memory."""

    def __init__(
        self, name: str, mark: str, values: Sequence[Mapping[str, Any]], places: Sequence[int]
    ) -> None:
        self.name, self.mark = name, mark
        self._values, self._places = values, np.asarray(places, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._values)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Reader`."""
        return self._places[indices]

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """See `Reader`."""
        return [
            Record(self._values[index], self.name + self.mark.format(self._places[index]))
            for index in indices.tolist()
        ]


def read_json_list(text: str, path: str, limit: int | None = None) -> ReadWhole:
    """The objects of a .json file that holds a list of them.

    Args:
        text: what the file holds; see `read_text`.
        path: its name, for messages.

    Raises:
        DataError: malformed or empty.
    """
    if not text.strip():
        raise DataError(f"{path} is empty; at least one row is needed")
    try:
        value = load_json(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({complaint(error)}); a list of objects is "
            "expected"
        ) from None
    except DoubleKeyError as error:
        raise DataError(f"{_place_of(text, path)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not valid JSON ({complaint(error)}); a list of objects is expected"
        ) from None
    if not isinstance(value, list):
        keys = f" with the keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
        raise DataError(
            f"{path}: a list of objects is expected at the top, found {kind(value)}{keys}; "
            "write the rows as [{...}, {...}], or one a line in a .jsonl file"
        )
    if not value:
        raise DataError(f"{path} holds an empty list; at least one row is needed")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{path}[{index}]: a JSON object is expected, found {kind(item)}")
    value = value[:limit]
    return ReadWhole(path, INDEX_MARK, value, range(len(value)))


def read_documents(text: str, path: str, column: str, limit: int | None = None) -> ReadWhole:
    """The documents of a plain text file, each a record with one value under `column`.

    Blank lines separate documents. A file without any blank line between its lines holds one
    document a line, as corpora do that are written by programs. Line ends become ``\\n``. The
    place of a document is the line on which it begins.

    Args:
        text: what the file holds; see `read_text`.
        path: its name, for messages.

    Raises:
        DataError: empty.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if not filled:
        raise DataError(f"{path} is empty; at least one line of text is needed")
    one_a_line = filled[-1] - filled[0] + 1 == len(filled)
    groups: list[list[int]] = []
    for number in filled:
        if one_a_line or not groups or groups[-1][-1] != number - 1:
            groups.append([])
        groups[-1].append(number)
    groups = groups[:limit]
    values = [{column: "\n".join(lines[number] for number in group)} for group in groups]
    return ReadWhole(path, LINE_MARK, values, [group[0] + 1 for group in groups])


def _place_of(text: str, path: str) -> str:
    """The first object of a list that has a key twice; the file alone if it holds no list."""
    if not text.lstrip().startswith("["):
        return path
    decoder = json.JSONDecoder(object_pairs_hook=plain_object)
    plain = json.JSONDecoder()
    blanks = re.compile(r"[\s,]*")
    at, index = text.index("[") + 1, 0
    while True:
        at = blanks.match(text, at).end()  # type: ignore[union-attr]
        try:
            decoder.raw_decode(text, at)
        except DoubleKeyError:
            return f"{path}[{index}]"
        except ValueError:
            return path
        at, index = plain.raw_decode(text, at)[1], index + 1


def read_text(path: str, name: str = "") -> str:
    """All that a file holds.

    Args:
        name: the file's, for messages; "": its path.

    Raises:
        DataError: missing, unreadable, too large, or not UTF-8.
    """
    name = name or path
    try:
        raw = read_bounded(Path(path).expanduser(), MOST_WHOLE)
    except OSError as error:
        raise unreadable(name, error) from None
    return text_of(raw, name)


def text_of(raw: bytes, name: str) -> str:
    """The text of a whole file.

    Raises:
        DataError: not UTF-8.
    """
    text = decode(raw, lambda start: f"{name}:{raw.count(NEWLINE, 0, start) + 1}")
    return text.removeprefix("\ufeff")
