"""Files with one JSON object a line, read by line from an index of where each begins.

The file itself is never held: it is scanned once in blocks, which gives 8 bytes a line, kept in the
cache, and then read line by line wherever they are asked for.

Why our own, and not the JSON reader of `datasets` (5.2): it makes a table of the rows. Types are
inferred over rows, so that texts which look like dates become times and "1" beside 2 becomes 1; a
key that a row lacks becomes null; a number beyond 64 bits is rounded; messages count rows within a
block and name neither line nor file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import Cache, key_of, quick_identity, unreadable
from anygauge.data.records import (
    BOM,
    LINE_MARK,
    MOST_LINE,
    Record,
    parse_object,
    refuse_long_line,
)
from anygauge.interface import DataError
from anygauge.util.files import open_regular

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
