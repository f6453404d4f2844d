"""Data sets of the Hugging Face hub, through the library that downloads and maps them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.config.paths import DATA_SUFFIXES, names_data_set
from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, key_of, quick_identity
from anygauge.data.files import JsonLines, first_lines, holds_lines, read_documents, read_json_list
from anygauge.data.records import INDEX_MARK, Reader, Record
from anygauge.data.tables import Table, first_rows
from anygauge.interface import DataError

_ANSWER_S = 10.0
"""The hub must answer within this time, or it is called unreachable."""


class HubRows:
    """A reader of one split of a data set.

    Args:
        field: where the source stands in the run file, for messages.

    Raises:
        DataError: no such data set, subset, split or revision, or the hub cannot be reached.
    """

    mark = INDEX_MARK

    def __init__(self, source: SourceSection, cache: Cache, field: str) -> None:
        self.name = hub_name(source)
        folder = str(cache.folder / "hub")
        self._rows = _load(source, field, lambda rows: rows, cache_dir=folder, streaming=False)
        if source.limit is not None:
            self._rows = self._rows.select(range(min(source.limit, len(self._rows))))
        if not len(self._rows):
            raise DataError(f"{self.name} is empty; at least one row is needed")
        self._cache = cache

    def __len__(self) -> int:
        return len(self._rows)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Reader`."""
        return indices

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """See `Reader`."""
        columns = self._rows[indices.tolist()]
        features = self._rows.features
        return [
            Record(
                {name: written(values[place], features[name]) for name, values in columns.items()},
                self.name + self.mark.format(index),
            )
            for place, index in enumerate(indices.tolist())
        ]

    def digest(self) -> str:
        """Hexadecimal digest of the rows as they were downloaded."""
        files = [file["filename"] for file in self._rows.cache_files]
        return key_of(*(self._cache.digest(file) for file in files))


def hub_name(source: SourceSection) -> str:
    """A data set as origins show it: ``owner/name[train]``."""
    return f"{source.path}[{source.split}]"


def first_hub_rows(source: SourceSection, count: int, field: str) -> list[Record]:
    """The first records, without downloading all.

    Raises:
        DataError: as for `HubRows`.
    """
    name = hub_name(source)
    found = _load(
        source, field, lambda rows: (list(rows.take(count)), rows.features), streaming=True
    )
    rows, features = found
    records = [
        Record(
            {key: written(value, (features or {}).get(key)) for key, value in row.items()},
            f"{name}[{index}]",
        )
        for index, row in enumerate(rows)
    ]
    if not records:
        raise DataError(f"{name} is empty; at least one row is needed")
    return records


def written(value: Any, feature: Any) -> Any:
    """A value without the nulls that the table filled in: see `tables`.

    Args:
        feature: its type, as the library has it; None where that is not known.
    """
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {
            name: written(below, feature.get(name))
            for name, below in value.items()
            if below is not None
        }
    if isinstance(value, list):
        is_listed = isinstance(feature, list) and len(feature) == 1
        inner = feature[0] if is_listed else getattr(feature, "feature", None)
        return [written(item, inner) for item in value]
    return value


def _load(source: SourceSection, field: str, use: Callable[[Any], Any], **options: Any) -> Any:
    """What `use` makes of the loaded rows; it may read some, and fail as loading does."""
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    if not constants.HF_HUB_OFFLINE:
        _check(source, field)
    try:
        rows = datasets.load_dataset(
            source.path,
            source.subset,
            split=source.split,
            revision=source.revision,
            **options,
        )
        return use(rows)
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{field}: the data set {source.path!r} (subset {source.subset or 'default'}, split "
            f"{source.split!r}, revision {source.revision or 'main'}) cannot be loaded: {said}; "
            f"check {field}.subset, {field}.split and {field}.revision"
        ) from None


def _check(source: SourceSection, field: str) -> None:
    """Ask the hub for the data set, since the library itself waits minutes for a silent network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    file = Path(source.path)
    try:
        HfApi().dataset_info(source.path, revision=source.revision, timeout=_ANSWER_S)
    except RepositoryNotFoundError:
        raise DataError(
            f"{field}.path: {source.path!r} is not a file (looked at {file.absolute()}) nor a data "
            "set of the hub that can be seen from here; correct it, or log in if it is private "
            "(hf auth login)"
        ) from None
    except HfHubHTTPError as error:
        raise DataError(
            f"{field}.path: the hub refuses {source.path!r}: {str(error).strip()}"
        ) from None
    except Exception as error:  # which class it is depends on the library below the library
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise DataError(
            f"{field}.path: {source.path!r} is not a file (looked at {file.absolute()}), and the "
            f"hub ({endpoint}) cannot be reached: {error}. If the data set was downloaded before, "
            "export HF_HUB_OFFLINE=1 to use that copy"
        ) from None


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
