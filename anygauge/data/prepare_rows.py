"""Turns the run file's data section into rows: reads, splits, tokenizes, caches them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anygauge.config.paths import data_suffix, is_remote, names_address
from anygauge.config.schema import DataSection, SourceSection, TrainSection
from anygauge.data.batches import Batches, Layout, RowBatches, Schedule
from anygauge.data.cache import Cache, Entry, cache_folder, key_of
from anygauge.data.encode import Counts, RowEncoder
from anygauge.data.formats import detect_format, of_objective, parse_all
from anygauge.data.order import split
from anygauge.data.remote_files import describe_address, local_copy
from anygauge.data.rows import (
    TABLE_VERSION,
    Tokenize,
    TokenizedRows,
    Workers,
    chunks_of,
    open_piece,
    write_table,
)
from anygauge.data.sources import Source, first_records, open_source, row_format
from anygauge.data.streaming import PackedStream, RowStream, StreamedRows, unknown_end
from anygauge.data.template import Rendering, read_template, render_unbounded
from anygauge.interface import DataError

PEEKED_ROWS = 20
HELD_SHARE = 0.95
"""Of the rows: where `data.max_length` holds fewer, that is worth a line."""

Log = Callable[[str], None]


class PreparedRows(NamedTuple):
    """Rows to train on, and rows to evaluate on where there are any."""

    train: TokenizedRows | StreamedRows
    eval: TokenizedRows | None


def describe_rows(rows: TokenizedRows | StreamedRows) -> str:
    """What became of rows, of streamed ones so far; which were skipped first; and whether they came
    from the cache."""
    text = str(rows.report)
    if rows.bad:
        text += f"; the first that were skipped: {' | '.join(rows.bad)}"
    if isinstance(rows, TokenizedRows) and rows.built is not None:
        text += f" (from the cache of {rows.built})"
    return text


def advice(rows: TokenizedRows | StreamedRows, data: DataSection) -> str | None:
    """What to say where `data.max_length` cuts more than a few rows; of streamed ones, nothing."""
    if not isinstance(rows, TokenizedRows):
        return None
    counts = rows.report
    length = counts.length_for(HELD_SHARE)
    if length is None:
        return None
    fates = {"cut at the end": counts.truncated, "left out": counts.dropped_long}
    became = ", ".join(f"{number:,} {fate}" for fate, number in fates.items() if number)
    return (
        f"data.max_length {data.max_length} is too short for {sum(fates.values()):,} of "
        f"{counts.rows:,} rows ({became}); {length:,} would hold {HELD_SHARE:.0%} of the rows"
    )


def peek(data: DataSection, train: TrainSection | None = None, *, pairs: bool = False) -> None:
    """Read the first rows only, so that a wrong column is reported before anything is started.

    Args:
        train: also look whether epochs can decide the end of the run.
        pairs: whether the run's objective trains on them.
    """
    read_template(data.chat_template)
    for field, source in (*_fields("train", data, pairs), *_fields("eval", data, pairs)):
        records = first_records(source, PEEKED_ROWS, field, streaming=data.streaming)
        if data.on_bad_row == "raise":
            parse_all(records, detect_format(records[0], source, field), source, field)
    if train is None or train.steps is not None or data.packs or not data.streaming:
        return
    for field, section in _fields("train", data, pairs):
        opened = open_source(section, field)
        if opened.count() is None:
            raise unknown_end(opened.name)


def addresses(data: DataSection) -> list[str]:
    """The files of other machines that are copied into the cache; none where nothing is kept."""
    if data.streaming or cache_folder(data.cache, os.environ) is None:
        return []
    sources = (*data.train_sources, *data.eval_sources)
    return [source.path for source in sources if names_address(source.path)]


def copy_addresses(data: DataSection, run: str, show: Callable[[str, int, int], None]) -> None:
    """Copy these files, for all processes of a start.

    Args:
        run: see `prepare`.
        show: takes a file's name, its bytes here, and all, again and again.
    """
    with Cache(cache_folder(data.cache, os.environ), run=run) as cache:
        for address in addresses(data):
            local_copy(address, cache, partial(show, describe_address(address)))


def prepare(
    data: DataSection,
    tokenizer: Any,
    seed: int,
    *,
    log: Log = lambda text: None,
    run: str = "",
    first: int | None = None,
    rendering: Rendering = render_unbounded,
    memory: int | None = None,
    pairs: bool = False,
) -> PreparedRows:
    """Read and tokenize all rows, or take them from the cache; with streaming, open the sources.

    `eval_fraction` holds out whole records, of each source its share. Rows to evaluate on are
    tokenized before the run in any case.

    Args:
        tokenizer: a tokenizer of the transformers library.
        seed: decides which rows are held out.
        log: takes lines for the user: progress, and damage in the cache.
        run: what tells this start of a run from others; see `Cache`.
        first: prepare so many rows of each source alone, also with streaming; None: all.
        rendering: see `ChatTemplate`.
        memory: bytes for a process that tokenizes streamed rows; None: they are in this one.
        pairs: whether the run's objective trains on them.

    Raises:
        RunFileError: settings that do not go together.
        ModelError: the tokenizer cannot be used.
    """
    with Cache(cache_folder(data.cache, os.environ), log, run) as cache:
        work = _Preparer(data, tokenizer, seed, cache, log, first, rendering, pairs)
        sources = work.open_sources("train")
        part: _Part = "kept" if data.eval_fraction else "all"
        streamed = data.streaming and first is None
        train = work.stream(sources, memory) if streamed else work.rows(sources, part)
        held_out = None
        if data.eval is not None:
            held_out = work.rows(work.open_sources("eval"), "all")
        elif data.eval_fraction:
            held_out = work.rows(sources, "held out")
    return PreparedRows(train, held_out)


def training_batches(
    rows: TokenizedRows | StreamedRows, data: DataSection, train: TrainSection, layout: Layout
) -> Batches:
    """The training batches of one rank."""
    schedule = Schedule(
        seed=train.seed,
        global_batch=train.global_batch_size,
        epochs=train.epochs,
        steps=train.steps,
        weights=tuple(source.weight for source in data.train_sources),
        grouping=data.group_by_length,
        shuffle=data.shuffle,
    )
    if isinstance(rows, TokenizedRows):
        return RowBatches(rows, schedule, layout)
    if data.packs:
        packs = None if train.steps else packs_of(rows, data)
        return PackedStream(rows, schedule, layout, packs)
    return RowStream(rows, schedule, layout)


def packs_of(rows: StreamedRows, data: DataSection) -> list[int]:
    """Packs of each block of a stream, which decide how many steps an epoch has.

    All rows are tokenized once for it, by one process of a machine; the cache keeps the numbers.
    """
    with Cache(cache_folder(data.cache, os.environ)) as cache:
        key = key_of(rows.identity, data.max_length)
        entry = cache.entry(
            "packs", key, lambda folder: {"packs": rows.packs(data.max_length, data.workers)}
        )
        return list(entry.facts["packs"])


_Part = Literal["all", "kept", "held out"]
_Sources = list[tuple[Source, Tokenize]]


@dataclass(frozen=True, slots=True)
class _Preparer:
    """Opens sources, and makes rows of them; see `prepare`."""

    data: DataSection
    tokenizer: Any
    seed: int
    cache: Cache
    log: Log
    first: int | None
    rendering: Rendering
    pairs: bool

    def open_sources(self, which: Literal["train", "eval"]) -> _Sources:
        """The sources of a field, and what makes tokens of their rows."""
        data, first, found = self.data, self.first, []
        for field, section in _fields(which, data, self.pairs):
            # What is streamed leaves no copy on the disk, not even of its beginning.
            kept = None if data.streaming and is_remote(section.path) else self.cache
            limit = min(section.limit or first, first) if first else section.limit
            of_rows = row_format(section, field, kept, streaming=data.streaming)
            section = section.model_copy(update={"format": of_rows, "limit": limit})
            encoder = RowEncoder(
                section, data, self.tokenizer, field=field, rendering=self.rendering
            )
            source = open_source(section, field, kept)
            skip = data.on_bad_row == "skip"
            found.append((source, Tokenize(encoder=encoder, origin=source.origin, skip=skip)))
        return found

    def rows(self, sources: _Sources, part: _Part) -> TokenizedRows:
        """The tokenized rows of all sources, or of a part of each."""
        pieces = []
        for number, (source, work) in enumerate(sources):
            entry = self._cache_entry(source, work)
            records = entry.facts["counts"]["rows"]
            named, members = None, None
            if part != "all":
                drawn = self.data.eval_fraction, self.seed, number
                kept, held_out = split(records, *drawn)
                named, members = [part, *drawn], held_out if part == "held out" else kept
            pieces.append(open_piece(entry, source.origin, named, members))
            counts = pieces[-1][1].counts
            if not counts.sequences and part != "held out":
                raise self._nothing_left(counts, source.name, records, part)
        rows = TokenizedRows(pieces)
        if not len(rows):
            raise self._nothing_left(counts, source.name, records, part)
        return rows

    def stream(self, sources: _Sources, memory: int | None) -> StreamedRows:
        """The sources, to be read and tokenized later."""
        works = [work for _, work in sources]
        tokenizer = None if memory is None else Workers(works, memory=memory)
        identities = [
            key_of(source.identity(), work.encoder.source.limit, work.encoder.key())
            for source, work in sources
        ]
        size = self.data.shuffle_buffer
        identity = key_of("stream", size, *identities)
        return StreamedRows(sources, identity, size, tokenizer, self.rendering)

    def _cache_entry(self, source: Source, work: Tokenize) -> Entry:
        """The tokenized rows of a source, in the cache."""
        identity, section = source.identity(), work.encoder.source

        def log(rows: int) -> None:
            self.log(f"tokenizing {source.name}: {rows:,} rows so far")

        def write(folder: Path) -> dict[str, Any]:
            chunks = chunks_of(source.rows(0), work, self.data.workers, self.rendering)
            facts = write_table(folder, chunks, log)
            if source.identity() != identity:
                raise DataError(f"{source.name} changed while it was being read; start again")
            return facts

        settings = section.limit, self.data.on_bad_row, work.encoder.key()
        key = key_of(TABLE_VERSION, identity, data_suffix(section.path), *settings)
        return self.cache.entry("rows", key, write)

    def _nothing_left(self, counts: Counts, name: str, records: int, part: _Part) -> DataError:
        causes = []
        if counts.dropped_long:
            causes.append(
                f"{counts.dropped_long} too long for data.max_length {self.data.max_length} "
                "(raise it, or shorten the prompts)"
            )
        if counts.dropped_empty:
            causes.append(f"{counts.dropped_empty} with nothing to learn (is it the right column?)")
        rows = f"{records} rows of {name}"
        if part != "all":
            does = "leaves for training" if part == "kept" else "holds out for evaluation"
            fraction = f"data.eval_fraction {self.data.eval_fraction:g}"
            rows = f"{counts.rows} rows that {fraction} {does} (of {rows})"
        return DataError(f"none of the {rows} is left to use: {'; '.join(causes)}")


def _fields(
    which: Literal["train", "eval"], data: DataSection, pairs: bool
) -> Iterator[tuple[str, SourceSection]]:
    """The sources of one field, each with its place in the run file."""
    sources = data.train_sources if which == "train" else data.eval_sources
    listed = isinstance(getattr(data, which), list)
    for number, source in enumerate(sources):
        field = f"data.{which}[{number}]" if listed else f"data.{which}"
        yield field, of_objective(source, field, pairs=pairs)
