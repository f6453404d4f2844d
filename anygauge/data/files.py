"""Records of JSON lists and plain text files, which are read whole; parsing that names the place.

A record's origin is its file and a place: `data.jsonl:17` (a line), `data.json[16]` (an index).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import unreadable
from anygauge.interface import DataError
from anygauge.util.files import read_bounded

MOST_LINE = 2**25
"""Bytes of a line; its text is bounded below that (`formats.MOST_TEXT`), JSON writes more."""

_MOST_WHOLE = 2**32
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


class Reader(Protocol):
    """The records of one source, in any order and as often as asked for.

    Attributes:
        name: of the source, as origins show it.
        mark: how a place is written behind the name: ``:{}`` or ``[{}]``.
    """

    name: str
    mark: str

    def __len__(self) -> int:
        """Records."""
        ...

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lines or indexes of records, to be written behind the name; int64 of the same shape."""
        ...

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """The records of these numbers, from 0 to the reader's length less one.

        Raises:
            DataError: one is malformed; names it.
        """
        ...


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


def read_json_list(path: str, limit: int | None = None) -> ReadWhole:
    """The objects of a .json file that holds a list of them.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    text = _read(path)
    if not text.strip():
        raise DataError(f"{path} is empty; at least one row is needed")
    try:
        value = load_json(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON "
            f"({error.msg} at column {error.colno}); a list of objects is expected"
        ) from None
    except DoubleKeyError as error:
        raise DataError(f"{_place_of(text, path)}: {error}") from None
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
    if not value:
        raise DataError(f"{path} holds an empty list; at least one row is needed")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{path}[{index}]: a JSON object is expected, found {kind(item)}")
    value = value[:limit]
    return ReadWhole(path, INDEX_MARK, value, range(len(value)))


def read_documents(path: str, column: str, limit: int | None = None) -> ReadWhole:
    """The documents of a plain text file, each a record with one value under `column`.

    Blank lines separate documents. A file without any blank line between its lines holds one
    document a line, as corpora do that are written by programs. Line ends become ``\\n``. The
    place of a document is the line on which it begins.

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
    groups = groups[:limit]
    values = [{column: "\n".join(lines[number] for number in group)} for group in groups]
    return ReadWhole(path, LINE_MARK, values, [group[0] + 1 for group in groups])


def parse_object(line: bytes, origin: str, path: str, offset: int) -> Mapping[str, Any]:
    """The JSON object on a line.

    Args:
        origin: the line's place, for messages.
        offset: of the line in its file, in bytes.

    Raises:
        DataError: not UTF-8, not JSON, or no object.
    """
    text = decode(line, path, lambda _: origin, offset)
    try:
        value = load_json(text)
    except DoubleKeyError as error:
        raise DataError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{origin}: one JSON object per line is expected, "
            f"but this line is not valid JSON ({_complaint(error)}): {_excerpt(text)}"
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
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def _place_of(text: str, path: str) -> str:
    """The first object of a list that has a key twice; the file alone if it holds no list."""
    if not text.lstrip().startswith("["):
        return path
    decoder = json.JSONDecoder(object_pairs_hook=_object)
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


def refuse_long_line(length: int, origin: str) -> None:
    """Refuse a line before it is read.

    Raises:
        DataError: names the row and its size.
    """
    if length > MOST_LINE:
        raise DataError(
            f"{origin}: the row has {length:,} bytes, at most {MOST_LINE:,} are read; split it "
            "into several rows"
        )


def decode(raw: bytes, path: str, where: Any, offset: int = 0) -> str:
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
        with Path(path).expanduser().open("rb") as file:
            seems = "; it seems to be UTF-16" if file.read(2) in _UTF16_MARKS else ""
        raise DataError(
            f"{where(error.start)}: not UTF-8 at byte {offset + error.start} of the file "
            f"(0x{raw[error.start]:02x}){seems}; save the file as UTF-8"
        ) from None


def _read(path: str) -> str:
    try:
        raw = read_bounded(Path(path).expanduser(), _MOST_WHOLE)
    except OSError as error:
        raise unreadable(path, error) from None
    text = decode(raw, path, lambda start: f"{path}:{raw.count(NEWLINE, 0, start) + 1}")
    return text.removeprefix("\ufeff")


def kind(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _complaint(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _excerpt(line: str, width: int = 60) -> str:
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."
