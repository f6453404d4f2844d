"""The rows of CSV, Parquet and Arrow files, as written.

All cells of a CSV file are text: ``007`` stays what it is, and an empty cell is empty text. Why our
own options, and not the CSV of `datasets` (5.2): there a row with a cell too many silently moves
its cells one column on, one with too few is filled up, and a column named twice is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anygauge.data.json_rows import OpenFile
from anygauge.data.records import RawRow
from anygauge.interface import DataError

_BATCH = 256
_CSV_BLOCK = 2**24
"""Bytes; a row must fit in it."""
_HEADER = 1
"""Lines of a CSV file before its rows: a row has the number that a spreadsheet shows."""


def table_rows(open_file: OpenFile, name: str, suffix: str, start: int) -> Iterator[RawRow]:
    """The rows from a number on, without the nulls that the table filled in; see `rows_of`.

    Args:
        name: of the file, for messages.
        suffix: ``.csv``, ``.parquet`` or ``.arrow``.

    Raises:
        DataError: unreadable or malformed.
    """
    import pyarrow as pa

    read = {".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}[suffix]
    shift = _HEADER + 1 if suffix == ".csv" else 0
    try:
        for first, batch in read(open_file, name, start):
            left = batch.slice(max(0, start - first))
            at = first + batch.num_rows - left.num_rows
            for number, values in enumerate(rows_of(left), at + shift):
                yield RawRow(number, values)
    except (pa.ArrowException, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        what = f"not valid {suffix[1:].upper() if suffix == '.csv' else suffix[1:].title()}"
        if isinstance(error, pa.ArrowNotImplementedError):
            what = f"pyarrow {pa.__version__} cannot read it"
        raise DataError(
            f"{name}: {what} ({said}); correct the file, or write its rows as JSON Lines"
        ) from None


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch, without the nulls that the table filled in.

    Structs of one column have all fields of all rows. A field that is null at one place was not
    written there: a tool call would be trained with arguments that nobody wrote.
    """
    import pyarrow as pa

    rows: list[dict[str, Any]] = batch.to_pylist()
    for column in batch.schema:
        if pa.types.is_nested(column.type):
            for row in rows:
                row[column.name] = _written(row[column.name], column.type)
    return rows


def _written(value: Any, kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(value, dict) and pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {
            name: _written(below, fields[name])
            for name, below in value.items()
            if below is not None
        }
    # Items of a list are as many as were written; a map keeps its keys.
    if isinstance(value, list) and not pa.types.is_map(kind):
        return [_written(item, kind.value_type) for item in value]
    return value


def as_written(value: Any, feature: Any) -> Any:
    """A value of `datasets` without the nulls that its table filled in.

    Args:
        feature: its type, as the library has it; None where that is not known.
    """
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {
            name: as_written(below, feature.get(name))
            for name, below in value.items()
            if below is not None
        }
    if isinstance(value, list):
        is_listed = isinstance(feature, list) and len(feature) == 1
        inner = feature[0] if is_listed else getattr(feature, "feature", None)
        return [as_written(item, inner) for item in value]
    return value


Batches = Iterator[tuple[int, Any]]
"""Record batches in order, each with the number of its first row."""


def _numbered(batches: Any, first: int = 0) -> Batches:
    for batch in batches:
        yield first, batch
        first += batch.num_rows


def _csv(open_file: OpenFile, name: str, start: int) -> Batches:
    import pyarrow as pa
    from pyarrow import csv

    # One thread: only then does the complaint about a row tell its number.
    reading = csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False)
    parsing = csv.ParseOptions(newlines_in_values=True)
    with open_file() as opened:
        try:
            names = csv.open_csv(opened, reading, parsing).schema.names
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise DataError(
            f"{name}:1: the header names the column {double[0]!r} more than once; rename one"
        )
    texts = csv.ConvertOptions(
        column_types={name: pa.string() for name in names}, strings_can_be_null=False
    )
    with open_file() as opened:
        yield from _numbered(csv.open_csv(opened, reading, parsing, texts))


def _parquet(open_file: OpenFile, name: str, start: int) -> Batches:
    from pyarrow import parquet

    # Buffered before, all row groups would be read at once. They are read one by one: pyarrow does
    # not join the categories of several below a list or struct.
    with open_file() as file, parquet.ParquetFile(file, pre_buffer=False) as opened:
        first = 0
        for group in range(opened.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if first + rows > start:
                batches = opened.iter_batches(batch_size=_BATCH, row_groups=[group])
                yield from _numbered(batches, first)
            first += rows


def _arrow(open_file: OpenFile, name: str, start: int) -> Batches:
    """Both of Arrow's layouts: `datasets` writes streams, pyarrow writes files."""
    import pyarrow as pa

    with open_file() as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            opened = pa.ipc.open_file(file)
            yield from _numbered(map(opened.get_batch, range(opened.num_record_batches)))
        else:
            yield from _numbered(pa.ipc.open_stream(file))


def parquet_count(open_file: OpenFile, name: str) -> int:
    """Rows of a Parquet file; reads its footer alone.

    Raises:
        DataError: not Parquet.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open_file() as file:
            return int(parquet.ParquetFile(file).metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name}: not valid Parquet ({said}); is it another kind of file?"
        ) from None
