"""A source of rows, opened: a file, here or on another machine, or a data set of the hub.

What there is not, or cannot be read, raises `DataError`, which names the source or its field of
the run file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from anygauge.config.paths import DATA_SUFFIXES, data_suffix, names_address, names_data_set
from anygauge.config.schema import SourceSection
from anygauge.data import readers
from anygauge.data.cache import Cache, key_of, read_error
from anygauge.data.formats import Chat, detect_format, parse_question
from anygauge.data.readers import Record
from anygauge.data.remote_files import (
    BLOCK,
    SMALL_BLOCK,
    describe_address,
    local_copy,
    open_remote,
    remote_identity,
)
from anygauge.interface import DataAccessError, DataError
from anygauge.util.files import open_regular
from anygauge.util.text import near_file

_ANSWER_S = 10.0
"""The hub must answer within this time, or it is called unreachable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows in their own order.

    Attributes:
        origin: how a row's place is written: ``data.jsonl:{}`` (a line), ``data.json[{}]``.
        rows: those from a number on, to the end.
        count: rows, where that is known before they are read.
        identity: hexadecimal digest that changes with the content.
    """

    name: str
    origin: str
    rows: Callable[[int], Iterator[Record]]
    count: Callable[[], int | None]
    identity: Callable[[], str]


def in_turn(sources: Sequence[Source], start: int) -> Generator[tuple[int, Record], None, int]:
    """The rows of several, one after another, from a number on, each with the number of its source;
    returns how many there are in all."""
    at = 0
    for number, source in enumerate(sources):
        known = source.count() or 0
        skipped = min(known, max(0, start - at))
        at += skipped
        if skipped and skipped == known:
            continue
        for row in source.rows(skipped):
            if at >= start:
                yield number, row
            at += 1
    return at


def open_source(
    section: SourceSection, field: str, cache: Cache | None = None, *, beginning: bool = False
) -> Source:
    """A source, opened.

    Args:
        field: where it stands in the run file.
        cache: for copies of what is remote; None reads it over the network.
        beginning: only the first rows will be asked for: fetch little at once, and of a data set
            of the hub the rows as they will be in the cache.
    """
    path, limit = section.path, section.limit
    if names_data_set(path):
        source = _data_set(section, field, cache, beginning=beginning)
    else:
        name = describe_address(path) if names_address(path) else path
        if data_suffix(path) not in DATA_SUFFIXES:
            raise DataError(
                f"{name}: this kind of file is not read; {field}.path takes "
                f"{', '.join(DATA_SUFFIXES)}, these compressed (.gz, .zst, ...), or the name of a "
                "data set on the hub"
            )
        if names_address(path) and cache is not None:
            path = str(local_copy(path, cache))
        source = _file_source(path, name, cache, SMALL_BLOCK if beginning else BLOCK, section.text)
    if limit is None:
        return source

    def count() -> int:
        # As many are promised: the stream says where they are fewer.
        known = source.count()
        return limit if known is None else min(known, limit)

    def rows(start: int) -> Iterator[Record]:
        return islice(source.rows(start), max(0, limit - start))

    return replace(source, rows=rows, count=count)


def first_records(
    section: SourceSection,
    count: int,
    field: str,
    cache: Cache | None = None,
    *,
    streaming: bool = False,
) -> list[Record]:
    """The first records of a source, at least one; reads little of a large one, but JSON lists and
    plain text whole. With `streaming`, a data set of the hub is read as it then is; with a cache,
    the copy there of a remote file."""
    cache = cache if names_address(section.path) else None
    source = open_source(section, field, cache, beginning=not streaming)
    records = [row.parse(source.origin) for row in islice(source.rows(0), count)]
    if not records:
        raise DataError(f"{source.name} is empty; at least one row is needed")
    return records


def read_questions(path: str, source: SourceSection | None) -> list[Chat]:
    """What the rows of a file ask, see `parse_question`; of plain text, each line with a text.

    Raises:
        DataError: names file and row.
    """
    section = SourceSection(path=path, text="prompt")
    opened = open_source(section, "--prompts")
    rows = list(opened.rows(0))
    if data_suffix(path) == ".txt":  # whose documents may have several lines
        rows = [
            Record({"prompt": line}, place=place)
            for row in rows
            for place, line in enumerate(row.values["prompt"].split("\n"), row.place)
        ]
    if not rows:
        raise DataError(f"{path} is empty; at least one prompt is needed")
    return [parse_question(row.parse(opened.origin), source or section) for row in rows]


def row_format(
    section: SourceSection, field: str, cache: Cache | None = None, *, streaming: bool = False
) -> str:
    """The format of a source's rows, as the first of them has it; see `first_records`."""
    first = first_records(section, 1, field, cache, streaming=streaming)[0]
    return detect_format(first, section, field)


def _file_source(path: str, name: str, cache: Cache | None, block: int, column: str = "") -> Source:
    """A file of this machine, or at an address. `column`: of the documents of a text file."""
    suffix = data_suffix(path)
    contents = set()

    def opened() -> BinaryIO:
        if names_address(path):
            # Of Parquet, exact parts are read; a buffer would fetch what lies between.
            return readers.open_decompressed(
                open_remote(path, 0 if suffix == ".parquet" else block), name
            )
        try:
            file = open_regular(Path(path).expanduser())
        except OSError as error:
            raise read_error(name, error) from None
        stat = os.fstat(file.fileno())
        contents.add((stat.st_size, stat.st_mtime_ns))
        if len(contents) > 1:
            raise DataError(f"{name} changed while it was being read; start again")
        return readers.open_decompressed(file, name)

    if suffix == ".json" and readers.holds_lines(opened, name):
        suffix = ".jsonl"

    def rows(start: int) -> Iterator[Record]:
        yield from readers.file_rows(opened, name, suffix, start, column)
        if contents:
            opened().close()

    def identity() -> str:
        if names_address(path):
            return remote_identity(path)
        assert cache is not None, "a file of this machine is opened with one to be tokenized"
        return cache.digest(path)

    mark = "[{}]" if suffix in (".json", ".parquet", ".arrow") else ":{}"
    return Source(
        name=name,
        origin=name.replace("{", "{{").replace("}", "}}") + mark,
        rows=rows,
        count=once(lambda: readers.parquet_count(opened, name) if suffix == ".parquet" else None),
        identity=identity,
    )


def _data_set(
    section: SourceSection, field: str, cache: Cache | None, *, beginning: bool
) -> Source:
    """One split of a data set of the Hugging Face hub, by `datasets`: with a cache, downloaded and
    converted there; without, streamed."""
    import datasets
    from huggingface_hub import constants

    name = f"{section.path}[{section.split}]"
    offline, streamed = constants.HF_HUB_OFFLINE, cache is None and not beginning
    if offline and streamed:
        raise DataError(
            f"{field}.path: data.streaming reads {section.path!r} over the network, but "
            "HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE, or leave data.streaming out"
        )
    commit = None if offline else _resolve_commit(section, field)
    identity = key_of("hub", section.path, section.subset, section.split, commit)
    datasets.disable_progress_bars()
    try:
        if streamed and (found := _split_files(section, commit, name, identity)):
            return found
        table = datasets.load_dataset(
            section.path,
            section.subset,
            split=section.split,
            revision=commit if streamed else section.revision,
            streaming=cache is None,
            cache_dir=None if cache is None else str(cache.folder / "hub"),
        ).with_format("arrow")
    except Exception as error:
        raise _load_error(section, field, error) from None

    def rows(start: int) -> Iterator[Record]:
        at = start
        try:
            for row in readers.rows_of(readers.with_row_numbers(table.iter(readers.BATCH)), start):
                at = row.place + 1
                yield row
        except Exception as error:
            raise _load_error(section, field, error, f" at row {at:,}") from None

    def digest() -> str:
        if cache is None:
            return identity
        return key_of(*(cache.digest(file["filename"]) for file in table.cache_files))

    def count() -> int | None:
        return _card_rows(table.info, section.split) if cache is None else len(table)

    return Source(name=name, origin=f"{name}[{{}}]", rows=rows, count=count, identity=digest)


def _card_rows(info: Any, split: str) -> int | None:
    """Read from the data set's card how many rows a split has."""
    found = (info.splits or {}).get(split)
    return None if found is None else found.num_examples or None


def _split_files(
    section: SourceSection, commit: str | None, name: str, identity: str
) -> Source | None:
    """A split whose files are all of JSON Lines or Parquet: they are read as ours are."""
    import datasets

    builder = datasets.load_dataset_builder(section.path, section.subset, revision=commit)
    data_files = builder.config.data_files or {}
    if data_files and section.split not in data_files:
        others = ", ".join(map(str, data_files))
        raise ValueError(f"there is no split {section.split!r}, but {others}")
    files = [str(file) for file in data_files.get(section.split, ())]
    kinds = {data_suffix(file) for file in files}
    lines = kinds <= set(readers.LINES) and not getattr(builder.config, "field", None)
    if not files or not (lines or (kinds == {".parquet"} and builder.name == "parquet")):
        return None
    parts = [_file_source(file, file.rpartition("/")[2], None, BLOCK) for file in files]

    def rows(start: int) -> Iterator[Record]:
        for place, (number, row) in enumerate(in_turn(parts, start), start):
            yield row._replace(place=place, where=f"{parts[number].name}:{row.place}")

    @once
    def count() -> int | None:
        if lines:
            return None
        return _card_rows(builder.info, section.split) or sum(part.count() or 0 for part in parts)

    origin = f"{name}[{{}}]"
    return Source(name=name, origin=origin, rows=rows, count=count, identity=lambda: identity)


def _load_error(section: SourceSection, field: str, error: Exception, at: str = "") -> Exception:
    """Return the error of a data set that cannot be loaded, or read on at a row."""
    from huggingface_hub import constants

    if isinstance(error, DataError):
        return error
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    remedy = f"check {field}.subset, {field}.split and {field}.revision"
    if "gated" in said:
        page = f"{constants.ENDPOINT}/datasets/{section.path}"
        remedy = f"accept its terms at {page}, and log in (hf auth login)"
    return DataError(
        f"{field}: the data set {section.path!r} (subset {section.subset or 'default'}, split "
        f"{section.split!r}, revision {section.revision or 'main'}) cannot be loaded{at}: {said}; "
        f"{remedy}{near_file(Path(section.path).absolute())}"
    )


def _resolve_commit(section: SourceSection, field: str) -> str:
    """Find a data set's commit. The library itself waits minutes for a silent network."""
    from huggingface_hub import HfApi, constants, errors

    path, file = section.path, Path(section.path).absolute()
    no_file = f"{field}.path: {path!r} is not a file (looked at {file}){near_file(file)}"
    try:
        return str(HfApi().dataset_info(path, revision=section.revision, timeout=_ANSWER_S).sha)
    except errors.RepositoryNotFoundError:
        raise DataError(
            f"{no_file} nor a data set of the hub that can be seen from here; correct it, or log "
            "in if it is private (hf auth login)"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(
            f"{field}.revision: {path!r} has no revision {section.revision!r}; give a branch, a "
            "tag or a commit"
        ) from None
    except errors.HfHubHTTPError as error:
        said = str(error).strip().partition("\n")[0]
        raise DataError(f"{field}.path: the hub refuses {path!r}: {said}") from None
    except Exception as error:  # which class it is depends on the library below the library
        raise DataAccessError(
            f"{no_file}, and the hub ({constants.ENDPOINT}) cannot be reached: {error}. If the "
            "data set was downloaded before, export HF_HUB_OFFLINE=1 to use that copy"
        ) from None
