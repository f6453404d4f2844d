"""The reader of a source: which it is, what its rows are called, and what tells its content."""

from __future__ import annotations

from itertools import islice

import numpy as np

from anygauge.config.paths import (
    DATA_SUFFIXES,
    data_suffix,
    is_remote,
    names_address,
    names_data_set,
)
from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, quick_identity
from anygauge.data.files import (
    MOST_WHOLE,
    ReadWhole,
    read_documents,
    read_json_list,
    read_text,
    text_of,
)
from anygauge.data.hub import ConvertedRows, HubRows, hub_name, hub_stream
from anygauge.data.lines import JsonLines, are_lines, first_lines, holds_lines
from anygauge.data.records import LINE_MARK, Reader, Record
from anygauge.data.remote import FEW, copied, open_remote, remote_identity, shown
from anygauge.data.streams import Blocks, LineStream, RowStream, TableStream, first_of
from anygauge.data.tables import Table, first_rows
from anygauge.interface import DataError


def open_reader(source: SourceSection, cache: Cache, field: str) -> Reader:
    """A reader of the records of a source, the first `source.limit` of them where it is set.

    A remote file is copied into the cache, a data set of the hub downloaded.

    Args:
        cache: for indexes, tables and copies.
        field: where the source stands in the run file, for messages.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    if names_data_set(source.path):
        return HubRows(source, cache, field)
    suffix = _suffix(source.path, field)
    path, name, limit = _local(source.path, cache), source_name(source), source.limit
    if suffix == ".txt":
        return read_documents(read_text(path, name), name, source.text, limit)
    if suffix in (".csv", ".parquet"):
        return Table(path, cache, limit, name)
    if suffix == ".json" and not holds_lines(path):
        return read_json_list(read_text(path, name), name, limit)
    return JsonLines(path, cache, limit, name)


def open_stream(source: SourceSection, size: int, field: str) -> tuple[Blocks | ReadWhole, str]:
    """A reader of a remote source that keeps nothing on the disk, and what tells its version.

    Text and JSON lists are read whole even so.

    Args:
        size: rows of a block.

    Raises:
        DataError: as for `open_reader`.
    """
    found, identity = _stream(source, field)
    if isinstance(found, ReadWhole):
        return found, identity
    return Blocks(found, size, source.limit), identity


def open_beginning(source: SourceSection, field: str) -> ReadWhole:
    """The first `source.limit` rows of a remote source in memory; nothing is kept on the disk.

    Raises:
        DataError: as for `open_reader`.
    """
    found, _ = _stream(source, field)
    if isinstance(found, ReadWhole):
        return found
    rows = list(islice(found.rows(0), source.limit))
    if not rows:
        raise DataError(f"{found.name} is empty; at least one row is needed")
    values = [row.record().values for row in rows]
    return ReadWhole(found.name, found.mark, values, [row.place for row in rows])


def stream_digest(source: SourceSection, field: str) -> str:
    """Hexadecimal digest that changes with the content of a remote source; reads none of it.

    Raises:
        DataError: the source cannot be reached.
    """
    return _stream(source, field)[1]


def first_records(
    source: SourceSection, count: int, field: str, *, streaming: bool = False
) -> list[Record]:
    """The first records of a source, at least one; reads little of a large file.

    JSON lists and plain text are read whole all the same.

    Args:
        streaming: read a remote source as it is when it is streamed.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    path, count = source.path, min(count, source.limit or count)
    if is_remote(path):
        if names_data_set(path) and not streaming:
            return first_of(ConvertedRows(source, field), count)
        found, _ = _stream(source, field)
        if isinstance(found, ReadWhole):
            return found.records(np.arange(min(count, len(found))))
        return first_of(found, count)
    suffix = _suffix(path, field)
    if suffix in (".csv", ".parquet"):
        return first_rows(path, count)
    if suffix == ".jsonl" or (suffix == ".json" and holds_lines(path)):
        return first_lines(path, count)
    text = read_text(path)
    reader = (
        read_documents(text, path, source.text, count)
        if suffix == ".txt"
        else read_json_list(text, path, count)
    )
    return reader.records(np.arange(len(reader)))


def source_name(source: SourceSection) -> str:
    """A source as the origins of its rows show it."""
    if names_data_set(source.path):
        return hub_name(source)
    return shown(source.path) if names_address(source.path) else source.path


def content_digest(source: SourceSection, cache: Cache, field: str) -> str:
    """Hexadecimal digest of all that the records of a source are read from.

    Raises:
        DataError: the source cannot be read.
    """
    if names_data_set(source.path):
        with_all = source.model_copy(update={"limit": None})
        return HubRows(with_all, cache, field).digest()
    _suffix(source.path, field)
    return cache.digest(_local(source.path, cache))


def quick_digest(source: SourceSection, field: str, *, with_times: bool) -> str:
    """The same of a large local file from its size, its first and its last MiB.

    Args:
        with_times: see `quick_identity`.

    Raises:
        DataError: the source cannot be read.
    """
    _suffix(source.path, field)
    return quick_identity(source.path, with_times=with_times)


def _stream(source: SourceSection, field: str) -> tuple[RowStream | ReadWhole, str]:
    path, name = source.path, source_name(source)
    if names_data_set(path):
        return hub_stream(source, field)
    suffix = _suffix(path, field)
    identity = remote_identity(path)
    if suffix in (".csv", ".parquet"):
        return TableStream([path], name), identity
    if suffix == ".json":
        with open_remote(path, FEW) as file:
            if not are_lines(file):
                return read_json_list(_whole(path, name), name, source.limit), identity
    if suffix == ".txt":
        return read_documents(_whole(path, name), name, source.text, source.limit), identity
    return LineStream([path], name, LINE_MARK), identity


def _whole(address: str, name: str) -> str:
    with open_remote(address) as file:
        raw = file.read(MOST_WHOLE + 1)
    if len(raw) > MOST_WHOLE:
        raise DataError(
            f"{name}: text and JSON lists are read whole, at most {MOST_WHOLE:,} bytes; write the "
            "rows as JSON Lines or Parquet"
        )
    return text_of(raw, name)


def _local(path: str, cache: Cache) -> str:
    return str(copied(path, cache)) if names_address(path) else path


def _suffix(path: str, field: str) -> str:
    suffix = data_suffix(path)
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{shown(path)}: this kind of file is not read; {field}.path takes "
            f"{', '.join(DATA_SUFFIXES)}, or the name of a data set on the hub"
        )
    return suffix
