"""Rows as they stand in their source, and how each kind of file is read.

A record's origin is its file and a place: `data.jsonl:17` (a line), `data.json[16]` (an index).
What cannot be read or used raises `DataError`, which names that place.

What reads JSON, and the options of CSV, are our own, since `datasets` 5.2 changes rows. In JSON it
infers types over rows (texts that look like dates become times, ``"1"`` beside ``2`` becomes 1,
numbers beyond 64 bits are rounded), makes a missing key null, and names no line. In CSV it shifts
the cells of a row with one too many, fills up a short row and renames a duplicate column, without a
message. Here all cells of CSV are text: ``007`` stays what it is, an empty one is empty text.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa

from anygauge.interface import DataError
from anygauge.util.text import shorten

MOST_LINE = 2**25
"""Bytes of a line; its text is bounded below that (`formats.MOST_TEXT`), JSON writes more."""
MOST_WHOLE = 2**32
"""Bytes of a file that is read whole: of a list, and of text."""
LINES = (".jsonl", ".ndjson")
BATCH = 256
"""Rows of a table that are read at once."""

_BOM = b"\xef\xbb\xbf"
_NEWLINE = b"\n"
_CSV_BLOCK = 2**24
"""Bytes; a row must fit in it."""
_CSV_HEADER = 2**20

OpenFile = Callable[[], BinaryIO]
"""Opens a source's file at its beginning, unpacked."""
Batches = Iterator[tuple[int, Any]]
"""Arrow's batches of rows, in order, each with the number of its first row."""


class Record(NamedTuple):
    """One row as it stands in its file.

    Attributes:
        values: by column; or a line of JSON that is not parsed yet.
        origin: of a parsed row: `data.jsonl:17` or `data.json[16]`.
        place: its line or index.
        offset: of a line in its file, in bytes.
        where: where a line stands in one of a source's several files; "" where it has one.
    """

    values: Any
    origin: str = ""
    place: int = 0
    offset: int = 0
    where: str = ""

    def parse(self, origin: str) -> Record:
        """The row with its values. `origin`: ``data.jsonl:{}``, with a place for the row's."""
        place = origin.format(self.place)
        if not isinstance(self.values, bytes):
            return Record(self.values, place)
        where = f"{place} ({self.where})" if self.where else place
        # JSON itself takes fewer blanks behind an object than may stand there: no form feed.
        text = _decode_text(self.values.rstrip(), lambda _: where, self.offset)
        try:
            value = load_json(text)
        except DoubleKeyError as error:
            raise DataError(f"{where}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: one JSON object per line is expected, "
                f"but this line is not valid JSON ({_json_error(error)}): {shorten(text.strip())}"
            ) from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: a JSON object is expected, found {type_name(value)}")
        return Record(value, place)


def type_name(value: Any) -> str:
    """What a value of a record is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def file_rows(
    open_file: OpenFile, name: str, suffix: str, start: int, column: str
) -> Iterator[Record]:
    """The rows of a file from a number on.

    Args:
        suffix: what kind of file it is; of one in JSON, ``.json`` for a list, else one of `LINES`.
        column: of the documents of a text file.
    """
    if suffix == ".csv":
        # The header is line 1: a row has the number that a spreadsheet shows.
        rows = rows_of(with_row_numbers(_csv_rows(open_file, name)), start, shift=2)
    elif suffix == ".parquet":
        rows = rows_of(_parquet_batches(open_file, start), start)
    elif suffix == ".arrow":
        rows = rows_of(with_row_numbers(_arrow_batches(open_file)), start)
    elif suffix == ".txt":
        rows = islice(_document_rows(open_file, name, column), start, None)
    else:
        objects = _list_rows if suffix == ".json" else _line_rows
        rows = islice(objects(open_file, name), start, None)
    with _name_file_in_errors(name):
        yield from rows


@contextlib.contextmanager
def _name_file_in_errors(name: str) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    of_packed = (EOFError, zlib.error, lzma.LZMAError)
    try:
        yield
    except (OSError, *of_packed, pa.ArrowException, UnicodeError, csv.Error) as error:
        said = str(error).strip().partition("\n")[0]
        remedy = "is the file whole, and of the kind that its name says?"
        if isinstance(error, pa.ArrowNotImplementedError):
            remedy = f"pyarrow {pa.__version__} cannot do it. Write the rows as JSON Lines"
        raise DataError(f"{name} cannot be read: {said}; {remedy}") from None


# JSON: one object a line, or all in a list


class DoubleKeyError(ValueError):
    """An object of JSON that has a key twice: one of its values would be lost."""


def plain_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its pairs; `DoubleKeyError` where a key stands twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        [(double, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise DoubleKeyError(f"the key {double[:60]!r} is written twice in one object; keep one")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=plain_object)
load_json = _DECODER.decode
"""What JSON means. Raises ValueError, `DoubleKeyError` among them, or RecursionError."""


def _json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _line_rows(open_file: OpenFile, name: str) -> Iterator[Record]:
    """The lines that hold more than blanks, not parsed yet."""
    number = offset = 0
    with open_file() as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise DataError(
                    f"{name}:{number}: the row has more than {MOST_LINE:,} bytes, which is as many "
                    "as are read; split it into several rows"
                )
            skipped = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[skipped:].strip():
                yield Record(line[skipped:], place=number, offset=offset + skipped)
            offset += len(line)


def holds_lines(open_file: OpenFile, name: str) -> bool:
    """Whether the first filled line of a .json file is an object, and not the only line."""
    with _name_file_in_errors(name):
        with open_file() as file:  # a list may have no line that is short enough to be read
            if not file.read(4096).removeprefix(_BOM).lstrip().startswith(b"{"):
                return False
        values = [row.values for row in islice(_line_rows(open_file, name), 2)]
    first, *others = [line.strip() for line in values if isinstance(line, bytes)]
    return bool(others) and (first.endswith(b"}") or others[0].startswith(b"{"))


def _list_rows(open_file: OpenFile, name: str) -> Iterator[Record]:
    """The objects of a list; read whole."""
    text = _whole_text(open_file, name)
    if not text.strip():
        return
    expected = "a list of objects is expected"
    try:
        value = load_json(text)
    except DoubleKeyError as error:
        raise DataError(f"{name}{_index_of_double(text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        said = f"not valid JSON ({_json_error(error)})"
        raise DataError(f"{name}{line}: {said}; {expected}") from None
    if not isinstance(value, list):
        keys = f" with the keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
        raise DataError(
            f"{name}: {expected} at the top, found {type_name(value)}{keys}; "
            "write the rows as [{...}, {...}], or one a line in a .jsonl file"
        )
    if not value:
        raise DataError(f"{name} holds an empty list; at least one row is needed")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{name}[{index}]: a JSON object is expected, found {type_name(item)}")
        yield Record(item, place=index)


def _index_of_double(text: str) -> str:
    """``[17]``: in a list, the first item with an object that has a key twice; "" in an object."""
    if not text.lstrip().startswith("["):
        return ""
    at, index = text.index("[") + 1, 0
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        try:
            _, at = _DECODER.raw_decode(text, at)
        except DoubleKeyError:
            return f"[{index}]"
        index += 1


# Text


def _document_rows(open_file: OpenFile, name: str, column: str) -> Iterator[Record]:
    """The documents of a plain text file; the place of each is the line on which it begins.

    Blank lines separate documents. A file without any blank line between its lines holds one
    document a line, as corpora do that are written by programs. Line ends become ``\\n``.
    """
    text = _whole_text(open_file, name)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    one_a_line = bool(filled) and filled[-1] - filled[0] + 1 == len(filled)
    groups: list[list[int]] = []
    for number in filled:
        if one_a_line or not groups or groups[-1][-1] != number - 1:
            groups.append([])
        groups[-1].append(number)
    for group in groups:
        text = "\n".join(lines[number] for number in group)
        yield Record({column: text}, place=group[0] + 1)


def _whole_text(open_file: OpenFile, name: str) -> str:
    with open_file() as file:
        raw = file.read(MOST_WHOLE + 1)
    if len(raw) > MOST_WHOLE:
        raise DataError(
            f"{name}: text and JSON lists are read whole, at most {MOST_WHOLE:,} bytes; write the "
            "rows as JSON Lines or Parquet"
        )
    text = _decode_text(raw, lambda at: f"{name}:{raw.count(_NEWLINE, 0, at) + 1}")
    return text.removeprefix("\ufeff")


def _decode_text(raw: bytes, place: Callable[[int], str], offset: int = 0) -> str:
    """Text of bytes in UTF-8, which begin at `offset` of their file; `place`: of one of them."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        seems = "; it seems to be UTF-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        raise DataError(
            f"{place(error.start)}: not UTF-8 at byte {offset + error.start} of the file "
            f"(0x{raw[error.start]:02x}){seems}; save the file as UTF-8"
        ) from None


# Tables


def parquet_count(open_file: OpenFile, name: str) -> int:
    """Rows of a Parquet file; reads its footer alone."""
    from pyarrow import parquet

    with _name_file_in_errors(name), open_file() as file:
        return int(parquet.ParquetFile(file).metadata.num_rows)


def rows_of(batches: Batches, start: int, shift: int = 0) -> Iterator[Record]:
    """The rows from a number on, without the nulls that a table filled in.

    Structs of one column have all fields of all rows. A field that is null at one place was not
    written there: a tool call would be trained with arguments that nobody wrote.

    Args:
        shift: from a row's number to its place.
    """
    for first, batch in batches:
        left = batch.slice(max(0, start - first))
        kinds = {
            field.name: field.type
            for field in batch.schema
            if pa.types.is_nested(field.type) or isinstance(field.type, pa.JsonType)
        }
        for number, row in enumerate(left.to_pylist(), first + batch.num_rows - left.num_rows):
            row.update({name: _convert(row[name], kind) for name, kind in kinds.items()})
            yield Record(row, place=number + shift)


def _convert(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and isinstance(kind, pa.JsonType):
        with contextlib.suppress(ValueError, RecursionError):  # `datasets` (5.2) lets 007 stand
            return json.loads(value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {
            name: _convert(below, kinds[name]) for name, below in value.items() if below is not None
        }
    # Items of a list are as many as were written; a map keeps its keys.
    if isinstance(value, list) and hasattr(kind, "value_field"):
        return [_convert(item, kind.value_type) for item in value]
    return value


def with_row_numbers(batches: Any, first: int = 0) -> Batches:
    """Batches with the numbers of their first rows."""
    for batch in batches:
        yield first, batch
        first += batch.num_rows


def _csv_rows(open_file: OpenFile, name: str) -> Iterator[Any]:
    import pyarrow.csv

    with open_file() as opened:
        # The header is looked at before: pyarrow must know which columns are to be text.
        file = io.BufferedReader(cast("io.RawIOBase", opened), _CSV_HEADER)
        head = io.StringIO(file.peek().decode("utf-8-sig", "replace"), newline="")
        names = next(filter(None, csv.reader(head)), [])
        if not names:
            return
        rows = pyarrow.csv.open_csv(
            file,
            # One thread: only then does the complaint about a row tell its number.
            pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
        if rows.schema.names != names:
            raise DataError(
                f"{name}:1: the header cannot be read; write each name as it is or in quotes, and "
                f"all in at most {_CSV_HEADER:,} bytes"
            )
        [(double, times)] = Counter(names).most_common(1)
        if times > 1:
            raise DataError(
                f"{name}:1: the header names the column {double!r} more than once; rename one"
            )
        yield from rows


def _parquet_batches(open_file: OpenFile, start: int) -> Batches:
    from pyarrow import parquet

    # A buffer would be filled by another thread, and Ctrl-C would wait for it.
    with open_file() as file, parquet.ParquetFile(file, pre_buffer=False) as opened:
        first = 0
        # One by one: pyarrow does not join the categories of several below a list or struct.
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if first + rows > start:
                batches = opened.iter_batches(batch_size=BATCH, row_groups=[group])
                yield from with_row_numbers(batches, first)
            first += rows


def _arrow_batches(open_file: OpenFile) -> Iterator[Any]:
    """Both of Arrow's layouts: `datasets` writes streams, pyarrow writes files."""
    with open_file() as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            opened = pa.ipc.open_file(file)
            yield from map(opened.get_batch, range(opened.num_record_batches))
        else:
            yield from pa.ipc.open_stream(file)


_UNPACKERS: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": partial(pa.CompressedInputStream, compression="zstd"),
}


def open_decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """A file unpacked on the way, where its name says that it is compressed."""
    unpacker = _UNPACKERS.get(Path(name).suffix.lower())
    if unpacker is None:
        return file
    return cast("BinaryIO", io.BufferedReader(unpacker(file), 2**16))
