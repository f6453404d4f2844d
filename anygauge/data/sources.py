"""A source of rows, opened: which reader it has, what its rows are called, what tells its content.

Rows are read in the source's own order; whoever wants others numbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from anygauge.config.paths import (
    DATA_SUFFIXES,
    data_suffix,
    names_address,
    names_data_set,
)
from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, quick_identity, unreadable
from anygauge.data.hub import (
    ConvertedSplit,
    DownloadedSplit,
    StreamedFiles,
    hub_name,
    streamed_split,
)
from anygauge.data.json_rows import document_rows, holds_lines, line_rows, list_rows
from anygauge.data.records import INDEX_MARK, LINE_MARK, RawRow, Record
from anygauge.data.remote import BLOCK, FEW, copied, open_remote, remote_identity, shown, unpacked
from anygauge.data.tables import parquet_count, table_rows
from anygauge.interface import DataError
from anygauge.util.files import open_regular

_TABLES = (".csv", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows in their own order.

    Attributes:
        name: of the source, as origins show it.
        mark: how a place is written behind the name: ``:{}`` or ``[{}]``.
        read: the rows from a number on, to the end.
        count: rows, where that is known before they are read.
        identity: hexadecimal digest that changes with the content.
    """

    name: str
    mark: str
    read: Callable[[int], Iterator[RawRow]]
    count: Callable[[], int | None]
    identity: Callable[[], str]

    @property
    def origin(self) -> str:
        """How a place is written: ``data.jsonl:{}``."""
        return self.name.replace("{", "{{").replace("}", "}}") + self.mark

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """The rows from a number on, to the end; at least one from the beginning.

        Raises:
            DataError: unreadable, malformed or empty.
        """
        rows = self.read(start)
        try:
            first = next(rows, None)
            if first is None and not start:
                raise DataError(f"{self.name} is empty; at least one row is needed")
            if first is not None:
                yield first
                yield from rows
        except OSError as error:
            raise unreadable(self.name, error) from None


def open_source(
    section: SourceSection, field: str, cache: Cache | None = None, *, beginning: bool = False
) -> Source:
    """A source, opened.

    Args:
        field: where it stands in the run file, for messages.
        cache: for a copy of a remote file, or of a data set of the hub; None reads them over the
            network.
        beginning: only the first rows will be asked for: fetch little at once.

    Raises:
        DataError: there is no such source, or it cannot be read.
    """
    if names_data_set(section.path):
        split: DownloadedSplit | ConvertedSplit | StreamedFiles
        if cache is not None:
            split = DownloadedSplit(section, field, cache)
        elif beginning:
            split = ConvertedSplit(section, field)
        else:
            split = streamed_split(section, field)
        source = Source(
            name=hub_name(section),
            mark=INDEX_MARK,
            read=split.rows,
            count=split.count,
            identity=split.identity,
        )
    else:
        source = _file(section, field, cache, FEW if beginning else BLOCK)
    return source if section.limit is None else _limited(source, section.limit)


def first_records(
    section: SourceSection, count: int, field: str, *, streaming: bool = False
) -> list[Record]:
    """The first records of a source, at least one; reads little of a large one.

    JSON lists and plain text are read whole all the same.

    Args:
        streaming: read a data set of the hub as it is when it is streamed.

    Raises:
        DataError: unreadable, malformed or empty.
    """
    source = open_source(section, field, beginning=not streaming)
    return [row.record(source.origin) for row in islice(source.rows(), count)]


def source_name(section: SourceSection) -> str:
    """A source as the origins of its rows show it."""
    if names_data_set(section.path):
        return hub_name(section)
    return shown(section.path) if names_address(section.path) else section.path


def _limited(source: Source, limit: int) -> Source:
    def rows(start: int) -> Iterator[RawRow]:
        return islice(source.read(start), max(0, limit - start))

    def count() -> int:
        # As many are promised: the stream says where they are fewer.
        known = source.count()
        return limit if known is None else min(known, limit)

    return Source(
        name=source.name, mark=source.mark, read=rows, count=count, identity=source.identity
    )


def _file(section: SourceSection, field: str, cache: Cache | None, block: int) -> Source:
    path, name = section.path, source_name(section)
    suffix = data_suffix(path)
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{name}: this kind of file is not read; {field}.path takes "
            f"{', '.join(DATA_SUFFIXES)}, these compressed (.gz, .zst, ...), or the name of a data "
            "set on the hub"
        )
    address = path if names_address(path) else None
    if address and cache is not None:
        address, path = None, str(copied(path, cache))

    def opened() -> BinaryIO:
        if address is None:
            return unpacked(path, _open(path, name))
        # Of Parquet, exactly the columns' parts are read; a buffer would fetch what lies between.
        return unpacked(address, open_remote(address, 0 if suffix == ".parquet" else block))

    def identity() -> str:
        if address is not None:
            return remote_identity(address)
        return quick_identity(path) if cache is None else cache.digest(path)

    def rows(start: int) -> Iterator[RawRow]:
        if suffix in _TABLES:
            return table_rows(opened, name, suffix, start)
        if suffix == ".txt":
            return islice(document_rows(opened, name, section.text), start, None)
        if suffix == ".json" and not holds_lines(opened, name):
            return islice(list_rows(opened, name), start, None)
        return islice(line_rows(opened, name), start, None)

    numbered = suffix in (".jsonl", ".csv", ".txt")
    if suffix == ".json":
        numbered = holds_lines(opened, name)
    return Source(
        name=name,
        mark=LINE_MARK if numbered else INDEX_MARK,
        read=rows,
        count=lambda: parquet_count(opened, name) if suffix == ".parquet" else None,
        identity=identity,
    )


def _open(path: str, name: str) -> BinaryIO:
    try:
        return open_regular(Path(path).expanduser())
    except OSError as error:
        raise unreadable(name, error) from None
