"""CSV and Parquet files, and data sets of the hub, as Arrow tables that stay on disk.

A CSV or Parquet file is converted once to an uncompressed Arrow file in the cache, which is then
mapped: any row is found without reading others. All cells of a CSV file are text, as written:
``007`` stays what it is, and an empty cell is empty text.

Why our own CSV, and not that of `datasets` (5.2): there a row with a cell too many silently moves
its cells one column on, one with too few is filled up, and a column named twice is renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anygauge.config.paths import data_suffix
from anygauge.data.cache import Cache, key_of, unreadable
from anygauge.data.records import INDEX_MARK, LINE_MARK, Record
from anygauge.interface import DataError

_ARROW = "rows.arrow"
_BATCH = 4096
_CSV_BLOCK = 2**24  # bytes; a row must fit in it


class Table:
    """A reader of a CSV or Parquet file.

    A row of a CSV file has the number that a spreadsheet shows, where the header is 1; one of a
    Parquet file its index.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """

    def __init__(self, path: str, cache: Cache, limit: int | None = None, name: str = "") -> None:
        import pyarrow as pa

        self.name = name or path
        self.mark = table_mark(path)
        self._first = 2 if self.mark == LINE_MARK else 0
        key = key_of("plain table", cache.digest(path), self.mark, limit)
        entry = cache.entry("tables", key, lambda folder: _convert(path, self.name, folder, limit))
        file = pa.ipc.open_file(pa.memory_map(str(entry.folder / _ARROW)))
        self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Reader`."""
        return indices + self._first

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """See `Reader`."""
        which = np.searchsorted(self._ends, indices, side="right")
        values: dict[int, Mapping[str, Any]] = {}
        for number in np.unique(which).tolist():
            here = indices[which == number]
            batch = self._batches[number]
            rows = rows_of(batch.take(here - (self._ends[number] - batch.num_rows)))
            values.update(zip(here.tolist(), rows, strict=True))
        return [
            Record(values[index], self.name + self.mark.format(index + self._first))
            for index in indices.tolist()
        ]


def table_mark(path: str) -> str:
    """How a row of a table is written behind the file's name."""
    return LINE_MARK if data_suffix(path) == ".csv" else INDEX_MARK


def first_rows(path: str, count: int) -> list[Record]:
    """The first records of a CSV or Parquet file, without converting it.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    mark = table_mark(path)
    first = 2 if mark == LINE_MARK else 0
    rows = [row for batch in _local_batches(path, path, count) for row in rows_of(batch)]
    if not rows:
        raise _empty(path)
    return [Record(row, path + mark.format(first + number)) for number, row in enumerate(rows)]


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


def _convert(path: str, name: str, folder: Path, limit: int | None) -> Mapping[str, Any]:
    import pyarrow as pa

    rows = 0
    writer = None
    for batch in _local_batches(path, name, limit):
        writer = writer or pa.ipc.new_file(str(folder / _ARROW), batch.schema)
        writer.write_batch(batch)
        rows += batch.num_rows
    if writer is None:
        raise _empty(name)
    writer.close()
    return {"rows": rows}


def _local_batches(path: str, name: str, limit: int | None) -> Iterator[Any]:
    """Record batches of a file that hold rows, up to a number of rows.

    Raises:
        DataError: missing, unreadable or malformed.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise unreadable(path, FileNotFoundError())
    left = limit
    for batch in batches_of(lambda: file.open("rb"), name):
        kept = batch if left is None else batch.slice(0, left)
        if kept.num_rows:
            yield kept
        if left is not None:
            left -= kept.num_rows
            if not left:
                return


def batches_of(
    open_file: Callable[[], BinaryIO],
    name: str,
    groups: range | None = None,
    batch_size: int = _BATCH,
) -> Any:
    """Record batches of a CSV or Parquet file, in order.

    Args:
        open_file: opens it, perhaps several times.
        name: the file's, for messages; its suffix says which of both it is.
        groups: of a Parquet file, the row groups to read; None: all.
        batch_size: most rows of a batch of Parquet, which may be of several row groups.

    Raises:
        DataError: unreadable or malformed.
    """
    import pyarrow as pa

    is_csv = table_mark(name) == LINE_MARK
    try:
        yield from _csv(open_file, name) if is_csv else _parquet(open_file, groups, batch_size)
    except (pa.ArrowException, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        what = "not valid CSV" if is_csv else "not valid Parquet"
        if isinstance(error, pa.ArrowNotImplementedError):
            what = f"pyarrow {pa.__version__} cannot read it"
        raise DataError(
            f"{name}: {what} ({said}); correct the file, or write its rows as JSON Lines"
        ) from None


def group_sizes(open_file: Callable[[], BinaryIO], name: str) -> list[int]:
    """Rows of each row group of a Parquet file; reads its footer alone.

    Raises:
        DataError: not Parquet.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open_file() as file:
            footer = parquet.ParquetFile(file).metadata
            return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name}: not valid Parquet ({said}); is it another kind of file?"
        ) from None


def _csv(open_file: Callable[[], BinaryIO], name: str) -> Iterator[Any]:
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
        yield from csv.open_csv(opened, reading, parsing, texts)


def _parquet(
    open_file: Callable[[], BinaryIO], groups: range | None, batch_size: int
) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    # Buffered before, all row groups would be read at once.
    with open_file() as file, parquet.ParquetFile(file, pre_buffer=False) as opened:
        found = opened.schema_arrow
        plain = pa.schema(column.with_type(_plain(column.type)) for column in found)
        wanted = list(range(opened.num_row_groups) if groups is None else groups)
        parts = [wanted]
        if any(pa.types.is_nested(kind) and kind != _plain(kind) for kind in found.types):
            # pyarrow does not join the categories of several row groups below a list or struct.
            parts = [[group] for group in wanted]
        for part in parts:
            for batch in opened.iter_batches(batch_size=batch_size, row_groups=part):
                yield batch.cast(plain)


def _plain(kind: Any) -> Any:
    """A type without categories and views.

    An Arrow file has one dictionary per column, while each row group of Parquet has its own; and
    rows of views cannot be taken by number.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type), kind.keys_sorted)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(_plain(kind.value_type))
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item, size)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _empty(path: str) -> DataError:
    return DataError(f"{path} is empty; at least one row is needed")
