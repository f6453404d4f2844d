"""Local files of JSON and of text.

A file with one JSON object a line is never held: it is scanned once in blocks, which gives an index
of 8 bytes a line, kept in the cache, and then read line by line wherever they are asked for. JSON
lists and plain text are read whole.

Why our own, and not the JSON reader of `datasets` (5.2): it makes a table of the rows. Types are
inferred over rows, so that texts which look like dates become times and "1" beside 2 becomes 1; a
key that a row lacks becomes null; a number beyond 64 bits is rounded; messages count rows within a
block and name neither line nor file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import Cache, key_of, quick_identity, unreadable
from anygauge.data.records import (
    BOM,
    INDEX_MARK,
    LINE_MARK,
    MOST_LINE,
    NEWLINE,
    DoubleKeyError,
    Record,
    complaint,
    decode,
    kind,
    load_json,
    parse_object,
    plain_object,
    refuse_long_line,
)
from anygauge.interface import DataError
from anygauge.util.files import open_regular, read_bounded

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
            f"{path}:{error.lineno}: not valid JSON "
            f"({error.msg} at column {error.colno}); a list of objects is expected"
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


_BLOCK = 2**24
_BEGIN = 4096
_LINE_END = ord("\n")
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")
_BLANKS = np.frombuffer(b" \t\r\v\f", dtype=np.uint8)


class JsonLines:
    """A reader of a file with one JSON object a line; blank lines are passed over.

    Args:
        name: the file's, for messages; "": its path.

    Raises:
        DataError: missing, unreadable or empty.
    """

    mark = LINE_MARK

    def __init__(self, path: str, cache: Cache, limit: int | None = None, name: str = "") -> None:
        self.name = name or path
        self._file = _open(path)
        self._state = _state(self._file)
        key = key_of("lines", quick_identity(path, with_times=True), limit)
        entry = cache.entry("lines", key, lambda folder: _index(self._file, folder, limit))
        if not entry.facts["lines"]:
            raise DataError(f"{self.name} is empty; at least one row is needed")
        self._starts = entry.array("starts", np.int64)
        # Only a file with blank lines has a list of numbers.
        self._numbers = entry.array("numbers", np.int64) if entry.facts["blank"] else None

    def __len__(self) -> int:
        return len(self._starts) - 1

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Reader`."""
        return indices + 1 if self._numbers is None else self._numbers[indices]

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """See `Reader`."""
        starts, ends = self._starts[indices], self._starts[indices + 1]
        for number in np.flatnonzero(ends - starts > MOST_LINE).tolist():
            place = int(self.places(indices[number : number + 1])[0])
            refuse_long_line(int(ends[number] - starts[number]), f"{self.name}:{place}")
        try:
            if _state(self._file) != self._state:
                raise DataError(f"{self.name} changed while it was being read; start again")
            lines = self._lines(starts, ends)
        except OSError as error:
            raise unreadable(self.name, error) from None
        records = []
        for line, start, place in zip(
            lines, starts.tolist(), self.places(indices).tolist(), strict=True
        ):
            origin = f"{self.name}:{place}"
            records.append(Record(parse_object(line, origin, start), origin))
        return records

    def _lines(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[bytes]:
        descriptor = self._file.fileno()
        together = len(starts) > 1 and bool((starts[1:] == ends[:-1]).all())
        if not together or ends[-1] - starts[0] > _BLOCK:
            spans = zip(starts.tolist(), ends.tolist(), strict=True)
            return [os.pread(descriptor, end - start, start) for start, end in spans]
        first = int(starts[0])
        block = os.pread(descriptor, int(ends[-1]) - first, first)
        spans = zip((starts - first).tolist(), (ends - first).tolist(), strict=True)
        return [block[start:end] for start, end in spans]


def first_lines(path: str, count: int) -> list[Record]:
    """The first records of a file, without reading more of it.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    try:
        with _open(path) as file:
            lines = islice(FilledLines(file, path), count)
            records = [
                Record(parse_object(line, f"{path}:{number}", offset), f"{path}:{number}")
                for number, offset, line in lines
            ]
    except OSError as error:
        raise unreadable(path, error) from None
    if not records:
        raise DataError(f"{path} is empty; at least one row is needed")
    return records


class FilledLines:
    """The lines that hold more than blanks: number from 1, first byte in the file, content.

    Args:
        file: at its beginning.
        name: its name, for messages.
        skip: such lines that need not come; most of them are counted in blocks and do not.

    Attributes:
        count: how many there were so far, those included that did not come.

    Raises:
        DataError: a line is too long.
    """

    def __init__(self, file: BinaryIO, name: str, skip: int = 0) -> None:
        self._file, self._name, self._skip = file, name, skip
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        number, offset, block = self._pass_over()
        for line in chain(BytesIO(block), _lines_of(self._file)):
            number += 1
            if len(line) > MOST_LINE:
                length = len(line) + _rest_of_line(self._file)
                refuse_long_line(length, f"{self._name}:{number}")
            skipped = len(BOM) if number == 1 and line.startswith(BOM) else 0
            if line[skipped:].strip():
                self.count += 1
                yield number, offset + skipped, line[skipped:]
            offset += len(line)

    def _pass_over(self) -> tuple[int, int, bytes]:
        """Lines and bytes of the blocks that are wholly skipped, and the block that is not."""
        number = offset = 0
        while self.count < self._skip:
            block = self._file.read(_BLOCK)
            block += self._file.readline() if block else b""
            lines, filled = _counted(block if offset else block.removeprefix(BOM))
            if not block or self.count + filled > self._skip:
                return number, offset, block
            number, offset = number + lines, offset + len(block)
            self.count += filled
        return number, offset, b""


def _counted(block: bytes) -> tuple[int, int]:
    """Lines of a block, and how many of them hold more than blanks."""
    if not block:
        return 0, 0
    block = b"\n" + block + (b"" if block.endswith(b"\n") else b"\n")
    lines = block.count(b"\n") - 1
    return lines, lines - len(_BLANK_LINE.findall(block))


def holds_lines(path: str) -> bool:
    """Whether a .json file holds one object a line: see `are_lines`.

    Raises:
        DataError: missing or unreadable.
    """
    with _open(path) as file:
        return are_lines(file)


def are_lines(file: BinaryIO) -> bool:
    """Whether a file's first filled line is a JSON object, and not its only one."""
    begin = file.read(_BEGIN).removeprefix(BOM).lstrip()
    if not begin.startswith(b"{"):
        return False
    file.seek(0)
    filled = (line for line in _lines_of(file) if line.strip())
    first, second = next(filled, b""), next(filled, b"")
    if not second:
        return False
    try:
        return isinstance(json.loads(first.removeprefix(BOM)), dict)
    except (ValueError, RecursionError):
        return second.lstrip().startswith(b"{")


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Lines; of one beyond the bound, its beginning."""
    return iter(lambda: file.readline(MOST_LINE + 1), b"")


def _rest_of_line(file: BinaryIO) -> int:
    """Bytes up to the end of the line."""
    length = 0
    while part := file.readline(_BLOCK):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def _open(path: str) -> BinaryIO:
    try:
        return open_regular(Path(path).expanduser())
    except OSError as error:
        raise unreadable(path, error) from None


def _state(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def _index(file: BinaryIO, folder: Path, limit: int | None) -> Mapping[str, Any]:
    """Write where the filled lines begin (and the last ends), and their numbers.

    Returns how many there are, and how many blank ones stand before the last of them.
    """
    found = before = last = end = 0
    with (folder / "starts").open("wb") as to_starts, (folder / "numbers").open("wb") as to_numbers:
        for starts, ends, first in _spans(file):
            filled = _filled(file, starts, ends, first)
            room = None if limit is None else limit - found
            numbers = (np.flatnonzero(filled) + before + 1)[:room]
            before += len(starts)
            if not len(numbers):
                continue
            found, last = found + len(numbers), int(numbers[-1])
            to_starts.write(starts[filled][:room].tobytes())
            to_numbers.write(numbers.astype(np.int64).tobytes())
            end = int(ends[filled][:room][-1])
            if found == limit:
                break
        to_starts.write(np.int64(end).tobytes())
    if last == found:  # without blank lines, numbers say nothing
        (folder / "numbers").write_bytes(b"")
    return {"lines": found, "blank": last - found}


def _spans(
    file: BinaryIO,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]]:
    """Where lines begin and end, in bytes, and the first byte of each, block by block."""
    descriptor = file.fileno()
    begin = at = len(BOM) if os.pread(descriptor, len(BOM), 0) == BOM else 0
    buffer = bytearray(_BLOCK)
    view = np.frombuffer(buffer, dtype=np.uint8)
    while count := os.preadv(descriptor, [buffer], at):
        ends = np.flatnonzero(view[:count] == _LINE_END).astype(np.int64) + at + 1
        if len(ends):
            starts = np.concatenate([[begin], ends[:-1]])
            first = view[np.maximum(starts - at, 0)]
            first[0] = os.pread(descriptor, 1, begin)[0]  # it may stand in the block before
            yield starts, ends, first
            begin = int(ends[-1])
        at += count
    if begin < at:
        last = np.frombuffer(os.pread(descriptor, 1, begin), dtype=np.uint8)
        yield np.array([begin]), np.array([at]), last


def _filled(
    file: BinaryIO,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    first: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Which lines hold more than blanks; only those that begin with a blank are looked into."""
    filled = first != _LINE_END
    for number in np.flatnonzero(filled & np.isin(first, _BLANKS)).tolist():
        start, end = int(starts[number]), int(ends[number])
        length = min(end - start, MOST_LINE)
        filled[number] = bool(os.pread(file.fileno(), length, start).strip())
    return filled
