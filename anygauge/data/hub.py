"""Data sets of the Hugging Face hub, through `datasets`: downloaded and mapped, or streamed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from anygauge.config.schema import SourceSection
from anygauge.data.cache import Cache, key_of
from anygauge.data.json_rows import OpenFile, line_rows
from anygauge.data.records import RawRow
from anygauge.data.remote import open_remote, unpacked
from anygauge.data.tables import as_written, parquet_count, table_rows
from anygauge.interface import DataAccessError, DataError
from anygauge.util.text import near_file

_ANSWER_S = 10.0
"""The hub must answer within this time, or it is called unreachable."""
_BATCH = 256


def hub_name(source: SourceSection) -> str:
    """A data set as origins show it: ``owner/name[train]``."""
    return f"{source.path}[{source.split}]"


class DownloadedSplit:
    """The rows of one split that `datasets` has downloaded and converted; see `Source`."""

    def __init__(self, source: SourceSection, field: str, cache: Cache) -> None:
        self._cache = cache
        folder = str(cache.folder / "hub")
        self._set = _load(source, field, lambda rows: rows, cache_dir=folder, streaming=False)

    def rows(self, start: int) -> Iterator[RawRow]:
        """The rows from a number on."""
        for first in range(start, len(self._set), _BATCH):
            columns = self._set[first : first + _BATCH]
            count = min(_BATCH, len(self._set) - first)
            for place in range(count):
                values = {name: column[place] for name, column in columns.items()}
                yield _row(first + place, values, self._set.features)

    def count(self) -> int | None:
        """Rows."""
        return len(self._set)

    def identity(self) -> str:
        """Hexadecimal digest of the rows as they were downloaded."""
        files = [file["filename"] for file in self._set.cache_files]
        return key_of(*(self._cache.digest(file) for file in files))


class ConvertedSplit:
    """A stream of the rows of one split as `datasets` converts them; see `Source`."""

    def __init__(self, source: SourceSection, field: str, identity: str = "") -> None:
        self._source, self._field, self._identity = source, field, identity

    @cached_property
    def _set(self) -> Any:
        return _load(self._source, self._field, lambda rows: rows, streaming=True)

    def rows(self, start: int) -> Iterator[RawRow]:
        """The rows from a number on."""
        index = start
        rows = iter(self._set.skip(start) if start else self._set)
        while True:
            try:
                values = next(rows, None)
            except Exception as error:
                raise _unloadable(self._source, self._field, error, index) from None
            if values is None:
                return
            yield _row(index, values, self._set.features or {})
            index += 1

    def count(self) -> int | None:
        """Rows, as the data set's card says."""
        return _described(self._set.info, self._source.split)

    def identity(self) -> str:
        """Of the data set at its commit."""
        return self._identity


class StreamedFiles:
    """The rows of a split's files of JSON lines or Parquet, read as our own are; see `Source`.

    Args:
        count: rows, where the data set's card says it.
    """

    def __init__(self, files: list[str], suffix: str, count: int | None, identity: str) -> None:
        self._files, self._suffix, self._count, self._identity = files, suffix, count, identity

    def rows(self, start: int) -> Iterator[RawRow]:
        """The rows from a number on, counted through all files."""
        index = 0
        for address in self._files:
            name = address.rpartition("/")[2]
            if self._suffix == ".parquet":
                opened: OpenFile = partial(open_remote, address, 0)
                skipped = max(0, start - index)
                rows = parquet_count(opened, name) if skipped else math.inf
                if rows <= skipped:
                    index += int(rows)
                    continue
                index += skipped
                found = table_rows(opened, name, ".parquet", skipped)
            else:
                found = line_rows(partial(unpacked, address), name, f"{name}:{{}}")
            for row in found:
                if index >= start:
                    yield row._replace(place=index)
                index += 1

    def count(self) -> int | None:
        """Rows, where they are known; those of Parquet are counted in its footers."""
        if self._count is None and self._suffix == ".parquet":
            self._count = sum(
                parquet_count(partial(open_remote, address, 0), address.rpartition("/")[2])
                for address in self._files
            )
        return self._count

    def identity(self) -> str:
        """Of the data set at its commit."""
        return self._identity


Split = DownloadedSplit | ConvertedSplit | StreamedFiles


def streamed_split(source: SourceSection, field: str) -> Split:
    """The rows of one split, without a copy of them on the disk.

    JSON Lines and Parquet are read from the files that `datasets` finds; other kinds as it converts
    them.

    Raises:
        DataError: no such data set, subset, split or revision, or the hub cannot be reached.
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
    identity = key_of("hub", source.path, source.subset, source.split, commit)
    described = _described(builder.info, source.split)
    if files and builder.name == "parquet" and all(map(_is_parquet, files)):
        return StreamedFiles(files, ".parquet", described, identity)
    if files and all(map(_is_lines, files)) and not getattr(builder.config, "field", None):
        return StreamedFiles(files, ".jsonl", None, identity)
    return ConvertedSplit(pinned, field, identity)


def _row(index: int, values: Mapping[str, Any], features: Mapping[str, Any]) -> RawRow:
    return RawRow(index, {key: as_written(each, features.get(key)) for key, each in values.items()})


def _described(info: Any, split: str) -> int | None:
    """Rows of a split, as the data set's card says."""
    found = (info.splits or {}).get(split)
    return None if found is None else found.num_examples or None


def _is_parquet(file: str) -> bool:
    return file.endswith(".parquet")


def _is_lines(file: str) -> bool:
    name = file.rpartition("/")[2]
    return ".jsonl" in name or ".ndjson" in name


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
