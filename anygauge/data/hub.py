"""Data sets of the Hugging Face hub, through `datasets`: downloaded and mapped, or streamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, key_of
from anygauge.data.records import INDEX_MARK, Record
from anygauge.data.streams import LineStream, RowStream, StreamedRow, TableStream
from anygauge.interface import DataAccessError, DataError
from anygauge.util.text import near_file

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


class ConvertedRows:
    """A stream of the rows of one split as `datasets` converts them; see `RowStream`."""

    mark = INDEX_MARK

    def __init__(self, source: SourceSection, field: str) -> None:
        self.name = hub_name(source)
        self._source, self._field = source, field
        self._set = _load(source, field, lambda rows: rows, streaming=True)
        self.count = _described(self._set.info, source.split)

    def rows(self, start: int, *, few: bool = False) -> Iterator[StreamedRow]:
        """See `RowStream`."""
        index = start
        rows = iter(self._set.skip(start) if start else self._set)
        while True:
            try:
                values = next(rows, None)
            except Exception as error:
                raise _unloadable(self._source, self._field, error, index) from None
            if values is None:
                break
            yield StreamedRow(index, partial(self._record, values, index))
            index += 1
        self.count = index if index > start else sum(1 for _ in self._set)

    def _record(self, values: dict[str, Any], index: int) -> Record:
        features = self._set.features or {}
        return Record(
            {key: written(value, features.get(key)) for key, value in values.items()},
            self.name + self.mark.format(index),
        )


def hub_stream(source: SourceSection, field: str) -> tuple[RowStream, str]:
    """The rows of one split, without a copy of them on the disk; and what tells their version.

    JSON Lines and Parquet are read from the files that `datasets` finds; other kinds as it converts
    them.

    Raises:
        DataError: as for `HubRows`.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{field}.path: data.streaming reads {source.path!r} over the network, but "
            "HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE, or leave data.streaming out"
        )
    commit = _check(source, field)
    pinned = source.model_copy(update={"revision": commit})
    try:
        builder = datasets.load_dataset_builder(source.path, source.subset, revision=commit)
        data_files = builder.config.data_files or {}
        if source.split in data_files or not data_files:
            files = [str(file) for file in data_files.get(source.split, ())]
        else:
            others = ", ".join(map(str, data_files))
            raise ValueError(f"there is no split {source.split!r}, but {others}")
    except Exception as error:
        raise _unloadable(source, field, error) from None
    name = hub_name(source)
    stream: RowStream
    if files and builder.name == "parquet" and all(map(_is_parquet, files)):
        stream = TableStream(files, name, _described(builder.info, source.split))
    elif files and all(map(_is_lines, files)) and not getattr(builder.config, "field", None):
        stream = LineStream(files, name, INDEX_MARK)
    else:
        stream = ConvertedRows(pinned, field)
    return stream, key_of("hub", source.path, source.subset, source.split, commit)


def _described(info: Any, split: str) -> int | None:
    """Rows of a split, as the data set's card says."""
    found = (info.splits or {}).get(split)
    return None if found is None else found.num_examples or None


def _is_parquet(file: str) -> bool:
    return file.endswith(".parquet")


def _is_lines(file: str) -> bool:
    name = file.rpartition("/")[2]
    return ".jsonl" in name or ".ndjson" in name


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
        raise _unloadable(source, field, error) from None


def _unloadable(
    source: SourceSection, field: str, error: Exception, index: int | None = None
) -> Exception:
    """What to say of a data set that cannot be loaded, or read on at a row."""
    from huggingface_hub import constants

    if isinstance(error, DataError):
        return error
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    at = "" if index is None else f" at row {index:,}"
    remedy = f"check {field}.subset, {field}.split and {field}.revision"
    if "gated" in said:
        page = f"{constants.ENDPOINT}/datasets/{source.path}"
        remedy = f"accept its terms at {page}, and log in (hf auth login)"
    return DataError(
        f"{field}: the data set {source.path!r} (subset {source.subset or 'default'}, split "
        f"{source.split!r}, revision {source.revision or 'main'}) cannot be loaded{at}: {said}; "
        f"{remedy}{near_file(Path(source.path).absolute())}"
    )


def _check(source: SourceSection, field: str) -> str:
    """Ask the hub for the data set, since the library itself waits minutes for a silent network.

    Returns its commit.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    file = Path(source.path).absolute()
    try:
        found = HfApi().dataset_info(source.path, revision=source.revision, timeout=_ANSWER_S)
        return str(found.sha)
    except RepositoryNotFoundError:
        raise DataError(
            f"{field}.path: {source.path!r} is not a file (looked at {file}){near_file(file)} nor "
            "a data set of the hub that can be seen from here; correct it, or log in if it is "
            "private (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise DataError(
            f"{field}.revision: {source.path!r} has no revision {source.revision!r}; give a "
            "branch, a tag or a commit"
        ) from None
    except HfHubHTTPError as error:
        said = str(error).strip().partition("\n")[0]
        raise DataError(f"{field}.path: the hub refuses {source.path!r}: {said}") from None
    except Exception as error:  # which class it is depends on the library below the library
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise DataAccessError(
            f"{field}.path: {source.path!r} is not a file (looked at {file}){near_file(file)}, and "
            f"the hub ({endpoint}) cannot be reached: {error}. If the data set was downloaded "
            "before, export HF_HUB_OFFLINE=1 to use that copy"
        ) from None
