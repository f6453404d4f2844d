"""The reader of a source: which it is, what its rows are called, and what tells its content."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anygauge.config.paths import DATA_SUFFIXES, names_data_set
from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, quick_identity
from anygauge.data.files import Reader, Record, read_documents, read_json_list
from anygauge.data.hub import HubRows, first_hub_rows, hub_name
from anygauge.data.lines import JsonLines, first_lines, holds_lines
from anygauge.data.tables import Table, first_rows
from anygauge.interface import DataError


def open_reader(source: SourceSection, cache: Cache, field: str) -> Reader:
    """A reader of the records of a source, the first `source.limit` of them where it is set.

    Args:
        cache: for indexes and tables.
        field: where the source stands in the run file, for messages.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    path, limit = source.path, source.limit
    if names_data_set(path):
        return HubRows(source, cache, field)
    suffix = _suffix(path, field)
    if suffix == ".txt":
        return read_documents(path, source.text, limit)
    if suffix in (".csv", ".parquet"):
        return Table(path, cache, limit)
    if suffix == ".json" and not holds_lines(path):
        return read_json_list(path, limit)
    return JsonLines(path, cache, limit)


def first_records(source: SourceSection, count: int, field: str) -> list[Record]:
    """The first records of a source, at least one; reads little of a large file.

    JSON lists and plain text are read whole all the same.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    path, count = source.path, min(count, source.limit or count)
    if names_data_set(path):
        return first_hub_rows(source, count, field)
    suffix = _suffix(path, field)
    if suffix in (".csv", ".parquet"):
        return first_rows(path, count)
    if suffix == ".jsonl" or (suffix == ".json" and holds_lines(path)):
        return first_lines(path, count)
    reader = (
        read_documents(path, source.text, count)
        if suffix == ".txt"
        else read_json_list(path, count)
    )
    return reader.records(np.arange(len(reader)))


def source_name(source: SourceSection) -> str:
    """A source as the origins of its rows show it."""
    return hub_name(source) if names_data_set(source.path) else source.path


def content_digest(source: SourceSection, cache: Cache, field: str) -> str:
    """Hexadecimal digest of all that the records of a source are read from.

    Raises:
        DataError: the source cannot be read.
    """
    if names_data_set(source.path):
        with_all = source.model_copy(update={"limit": None})
        return HubRows(with_all, cache, field).digest()
    _suffix(source.path, field)
    return cache.digest(source.path)


def quick_digest(source: SourceSection, cache: Cache, field: str, *, with_times: bool) -> str:
    """The same of a large file from its size, its first and its last MiB.

    Args:
        with_times: see `quick_identity`.

    Raises:
        DataError: the source cannot be read.
    """
    if names_data_set(source.path):
        return content_digest(source, cache, field)
    return quick_identity(source.path, with_times=with_times)


def _suffix(path: str, field: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{path}: this kind of file is not read; {field}.path takes "
            f"{', '.join(DATA_SUFFIXES)}, or the name of a data set on the hub"
        )
    return suffix
