"""Rows to tokens, here or by workers, into an Arrow table on the disk that all readers map.

The table of a source has a row for each sequence, and one for each record that became none, so that
what became of the records of a part, such as those held out, can be counted from it. A record that
cannot be used raises a `DataError` with its place, as does a worker that was ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anygauge.data.cache import Entry, key_of
from anygauge.data.encode import BAD, CUT, EMPTY, LONG, WHOLE, Counts, RowEncoder, Tokens
from anygauge.data.readers import Record
from anygauge.data.template import Rendering, render_unbounded
from anygauge.interface import AnygaugeError, DataAccessError, DataError
from anygauge.util import errors
from anygauge.util.processes import tie_to_parent

CHUNK = 1024
"""Rows that are tokenized at once."""
FEW_ROWS = 10_000
"""As many are tokenized here before workers are started, which takes seconds."""
MOST_WORKERS = 16
START_S = 300.0
"""Until a worker has begun: it imports the model library, perhaps from a slow disk."""
SILENCE_S = 60.0
"""For one rendering of a chat template, which takes milliseconds."""
SHARE_OF_MEMORY = 0.75
"""Of a machine, for rows."""
SPAWN = multiprocessing.get_context("spawn")

TABLE = "rows.arrow"
TABLE_VERSION = 3
"""Of the table and the facts beside it: part of an entry's key."""
NAMED_BAD = 5
"""Bad rows that are named where they are skipped."""
_PROGRESS_S = 30.0
_LENGTH_STEP = 64
"""Lengths of long rows are counted in steps of so many tokens."""
_BAD = b"bad"


def batch_of(
    encoded: Sequence[Tokens], places: Sequence[int], bad: Sequence[str] = ()
) -> pa.RecordBatch:
    """Make a table of neighbouring records, each in at least one row; see `bad_of`, `records_of`.

    Args:
        places: line or index of each record.
        bad: what is wrong with those that cannot be used.
    """
    columns = {
        "num_loss_tokens": (np.int32, [each.loss_mask.sum() for each in encoded]),
        "record": (np.int64, [each.record for each in encoded]),
        "place": (np.int64, [places[each.record] for each in encoded]),
        "part": (np.int32, [each.part for each in encoded]),
        "fate": (np.int8, [each.fate for each in encoded]),
        "length": (np.int32, [each.length for each in encoded]),
    }
    ends = _to_arrow(np.cumsum([0, *(len(each.ids) for each in encoded)], dtype=np.int32))
    ids = np.concatenate([each.ids for each in encoded])
    # As bytes: Arrow's own bools are bits, which numpy cannot map.
    loss_mask = np.concatenate([each.loss_mask for each in encoded]).view(np.int8)
    return pa.RecordBatch.from_pydict(
        {
            "ids": pa.ListArray.from_arrays(ends, _to_arrow(ids)),
            "loss_mask": pa.ListArray.from_arrays(ends, _to_arrow(loss_mask)),
            **{name: _to_arrow(np.array(of, dtype)) for name, (dtype, of) in columns.items()},
        },
        metadata={_BAD: json.dumps(list(bad))},
    )


def bad_of(batch: pa.RecordBatch) -> list[str]:
    """List what is wrong with the records of a batch that cannot be used."""
    return list(json.loads(batch.schema.metadata[_BAD]))


def records_of(batch: pa.RecordBatch) -> int:
    """How many records became a batch."""
    return int(to_numpy(batch["record"])[-1]) + 1


# What Arrow itself has for these two imports pandas: for much of a second, and for 50 MiB.
def _to_arrow(values: NDArray[Any]) -> Any:
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_numpy(values: Any) -> NDArray[Any]:
    """Return the values of an Arrow array without nulls; not copied."""
    return np.from_dlpack(values)


def _column_array(table: Any, name: str) -> NDArray[Any]:
    return np.concatenate([to_numpy(chunk) for chunk in table[name].chunks])


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Turns chunks of rows into tokens; `origin`: of a row, ``data.jsonl:{}``; `skip`: bad ones."""

    encoder: RowEncoder
    origin: str
    skip: bool = False

    def __call__(self, rows: tuple[Record, ...]) -> pa.RecordBatch:
        """What the rows became."""
        bad: list[str] = []
        try:
            encoded = self.encoder.encode([row.parse(self.origin) for row in rows])
        except DataError:
            if not self.skip:
                raise
            encoded = []
            for number, row in enumerate(rows):
                try:
                    one = self.encoder.encode([row.parse(self.origin)])
                    encoded += [replace(each, record=number) for each in one]
                except DataError as error:
                    encoded.append(Tokens(record=number, fate=BAD))
                    bad.append(str(error))
        return batch_of(encoded, [row.place for row in rows], bad)


def share_of_memory(parts: int) -> int:
    """Bytes that one of so many processes of this machine may take for rows."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(installed * SHARE_OF_MEMORY / parts)


def usable_cores() -> int:
    """Processor cores that this process may use, by affinity and by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def chunks_of(
    rows: Iterator[Record], work: Tokenize, workers: int | None, rendering: Rendering
) -> Iterator[pa.RecordBatch]:
    """Yield what rows became, chunk by chunk, in the rows' order.

    Args:
        workers: processes; None: as many as cores, once there are many rows.
        rendering: gets what is being rendered; of several workers, what has begun first.
    """
    chunks: Iterator[tuple[Record, ...]] = iter(lambda: tuple(islice(rows, CHUNK)), ())
    if workers is None:
        yield from map(work, islice(chunks, -(-FEW_ROWS // CHUNK)))
        workers = min(usable_cores(), MOST_WORKERS)
    if workers == 1:
        yield from map(work, chunks)
        return
    memory, _ = resource.getrlimit(resource.RLIMIT_DATA)
    share = None if memory == resource.RLIM_INFINITY else memory // workers
    begun: deque[Future[pa.RecordBatch]] = deque()
    with Workers([work], workers, share, rendering) as pool:
        for chunk in chunks:
            begun.append(pool.submit(0, chunk))
            if len(begun) > 2 * workers:
                yield pool.result(begun.popleft())
        while begun:
            yield pool.result(begun.popleft())


class Workers:
    """Processes that tokenize rows of several sources; the first row starts them.

    Args:
        memory: bytes that each process may have; None: without a limit of its own.
        rendering: gets what has begun first of all that is rendered, so that one that hangs shows.
    """

    def __init__(
        self,
        works: Sequence[Tokenize],
        count: int = 1,
        memory: int | None = None,
        rendering: Rendering = render_unbounded,
    ) -> None:
        self._memory, self._rendering = memory, rendering
        self._messages = SPAWN.SimpleQueue()
        self._at_work: dict[int, tuple[str, str]] = {}
        self._oldest, self._seen = ("", ""), 0
        self._thread = threading.Thread(target=self._listen, name="renderings", daemon=True)
        self._thread.start()
        without_torch = sys.modules.get("torch", works) is None
        begin = os.getpid(), without_torch, memory, self._messages, pickle.dumps(works)
        self._pool = ProcessPoolExecutor(count, SPAWN, _begin, begin)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._messages.put(None)
        self._thread.join()

    def submit(self, source: int, rows: tuple[Record, ...]) -> Future[pa.RecordBatch]:
        """Begin with rows of a source."""
        with _not_ended():
            return self._pool.submit(_tokenize_rows, source, rows)

    def result(
        self, future: Future[pa.RecordBatch], timeout_s: float | None = None
    ) -> pa.RecordBatch:
        """Return what rows became."""
        with _not_ended():
            return future.result(timeout_s)

    def __call__(self, source: int, rows: tuple[Record, ...]) -> pa.RecordBatch:
        """What rows of a source became, each within limits of time and memory; for one worker."""
        future = self.submit(source, rows)
        limit = f"{SILENCE_S:.0f} s"
        while True:
            seen = self._seen
            try:
                return self.result(future, SILENCE_S if seen else START_S)
            except MemoryError:
                limit = f"{(self._memory or 0) / 2**30:.1f} GiB"
            except TimeoutError:
                if self._seen != seen:
                    continue
                for worker in list(self._at_work):  # it would keep this process from ending
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
            template, row = self._oldest
            raise DataError(
                f"{template or 'the tokenizer'} took more than {limit} for {row or 'a row'}. "
                "Correct the template or the row, or give another data.chat_template"
            )

    def _listen(self) -> None:
        while (message := self._messages.get()) is not None:
            worker, template, row = message
            self._at_work.pop(worker, None)
            self._at_work[worker] = template, row
            self._seen += 1
            oldest = next((each for each in self._at_work.values() if each[1]), ("", ""))
            if oldest != self._oldest:
                self._oldest = oldest
                self._rendering(*oldest)


@contextlib.contextmanager
def _not_ended() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise DataAccessError(
            "a process that tokenizes rows was ended from outside; there may be too little memory. "
            f"Set data.workers below {min(usable_cores(), MOST_WORKERS)}"
        ) from None


_TOKENIZERS: list[Tokenize] = []
"""In a worker: what it does with rows of each source."""


def _begin(parent: int, without_torch: bool, memory: int | None, queue: Any, works: bytes) -> None:
    """Make this process a worker."""
    tie_to_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    _TOKENIZERS.extend(pickle.loads(works))
    for work in _TOKENIZERS:
        work.encoder.watch(lambda template, row: queue.put((os.getpid(), template, row)))
    queue.put((os.getpid(), "", ""))


def _tokenize_rows(source: int, rows: tuple[Record, ...]) -> pa.RecordBatch:
    try:
        return _TOKENIZERS[source](rows)
    except AnygaugeError as error:  # some cannot be sent as they are
        raise getattr(errors, type(error).__name__, DataError)(str(error)) from None


def write_table(
    folder: Path, chunks: Iterator[pa.RecordBatch], log: Callable[[int], None]
) -> dict[str, Any]:
    """Write what the records of a source became, chunk by chunk; returns facts for the entry.

    Args:
        log: gets the number of rows so far, from time to time.
    """
    counts, bad, digest = Counts(), list[str](), hashlib.sha256()
    logged = time.monotonic()
    first = next(chunks)
    schema = first.schema.remove_metadata()
    with pa.ipc.new_file(str(folder / TABLE), schema) as writer:
        for chunk in chain([first], chunks):
            at = schema.get_field_index("record")
            numbered = _to_arrow(to_numpy(chunk.column(at)) + counts.rows)
            batch = chunk.set_column(at, "record", numbered)
            writer.write_batch(batch.replace_schema_metadata())
            for name in ("ids", "loss_mask"):
                digest.update(to_numpy(chunk.column(name).offsets).data)
                digest.update(to_numpy(chunk.column(name).values).data)
            counts += _read_counts(pa.Table.from_batches([chunk]))
            bad += bad_of(chunk)[: NAMED_BAD - len(bad)]
            if time.monotonic() - logged > _PROGRESS_S:
                logged = time.monotonic()
                log(counts.rows)
    return {"fingerprint": digest.hexdigest(), "counts": counts.record(), "bad": bad}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Which sequences of a source's table, see `batch_of`, there are: all, or a part.

    Attributes:
        inside: which of its rows are of the part; bool of shape (rows,).
    """

    inside: NDArray[np.bool_]
    origin: str
    counts: Counts
    fingerprint: str = ""
    bad: Sequence[str] = ()
    built: str | None = None


def open_piece(
    entry: Entry, origin: str, part: Any = None, members: NDArray[np.int64] | None = None
) -> tuple[pa.Table, Piece]:
    """The sequences that an entry holds, or of a part, which JSON tells from others, the `members`:
    numbers of records; int64, rising."""
    table = pa.ipc.open_file(pa.memory_map(str(entry.folder / TABLE))).read_all()
    facts = entry.facts
    if members is None:
        inside = np.ones(len(table), dtype=np.bool_)
        counts = Counts(**{**facts["counts"], "beyond": Counter(dict(facts["counts"]["beyond"]))})
    else:
        inside = np.isin(_column_array(table, "record"), members)
        counts = _read_counts(table, inside)
    return table, Piece(
        inside=inside,
        origin=origin,
        counts=counts,
        fingerprint=key_of(facts["fingerprint"], part),
        bad=facts["bad"] if counts.skipped else (),
        built=entry.built,
    )


def documents_of(
    batch: pa.RecordBatch, origin: str, *, whole: bool = True
) -> tuple[list[list[Tokens]], Counts]:
    """What each record of a batch became: no sequence, one, or several; and their counts. If not
    `whole`, a text in several parts keeps its first, and counts as truncated."""
    table = pa.Table.from_batches([batch])
    parts = _column_array(table, "part")
    inside = parts <= (parts.max() if whole else 1)
    counts = _read_counts(table, inside)
    if not whole:
        counts = replace(counts, truncated=counts.truncated + int((parts == 1).sum()))
    rows = TokenizedRows([(table, Piece(inside=inside, origin=origin, counts=counts))])
    documents: list[list[Tokens]] = [[] for _ in range(records_of(batch))]
    for index, record in enumerate(rows.column("record").tolist()):
        documents[record].append(rows.tokens(index))
    return documents, rows.report


def _read_counts(table: Any, inside: NDArray[np.bool_] | slice = slice(None)) -> Counts:
    names = ("fate", "part", "length", "num_loss_tokens")
    fates, parts, whole, loss_tokens = (_column_array(table, name)[inside] for name in names)
    became = np.bincount(fates[parts <= 1], minlength=BAD + 1).tolist()
    beyond = whole[np.isin(fates, (CUT, LONG)) & (parts <= 1)]
    lengths = _token_counts(table)[inside]
    return Counts(
        rows=sum(became),
        used=became[WHOLE] + became[CUT],
        sequences=int(np.count_nonzero(lengths)),
        dropped_empty=became[EMPTY],
        dropped_long=became[LONG],
        skipped=became[BAD],
        truncated=became[CUT],
        tokens=int(lengths.sum()),
        num_loss_tokens=int(loss_tokens.sum()),
        beyond=Counter((-(-beyond // _LENGTH_STEP) * _LENGTH_STEP).tolist()),
    )


def _token_counts(table: Any) -> NDArray[np.int64]:
    offsets = [to_numpy(chunk.offsets) for chunk in table["ids"].chunks]
    return np.concatenate([np.diff(each) for each in offsets]).astype(np.int64)


class TokenizedRows:
    """The sequences of several sources, numbered from 0 through all of them.

    Nothing but what an entry says of itself is read before it is asked for.

    Attributes:
        sizes: sequences of each source.
        report: what became of the rows of all sources.
        bad: what is wrong with the first of the rows that were skipped.
        built: when, where all of them came from the cache.
    """

    def __init__(self, sources: Sequence[tuple[pa.Table, Piece]]) -> None:
        self.pieces = pieces = [piece for _, piece in sources]
        self._sources = sources
        self.sizes = [piece.counts.sequences for piece in pieces]
        self.report = sum((piece.counts for piece in pieces), Counts())
        self.bad = [text for piece in pieces for text in piece.bad][:NAMED_BAD]
        built = [piece.built for piece in pieces if piece.built is not None]
        self.built = min(built) if len(built) == len(pieces) else None
        self._ends = np.cumsum(self.sizes)
        table = pa.concat_tables([table for table, _ in sources])
        # Held: a column looks through all its chunks when it is asked for its first value.
        self._columns = dict(zip(table.column_names, table.columns, strict=True))

    def __len__(self) -> int:
        return sum(self.sizes)

    def by_source(self) -> list[TokenizedRows]:
        """The sequences of each source by themselves; there may be none."""
        return [TokenizedRows([source]) for source in self._sources]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """The rows of the table that are sequences; int64 of shape (n,)."""
        inside = np.concatenate([piece.inside for piece in self.pieces])
        return np.flatnonzero(inside & (_token_counts(self._columns) > 0))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence; int64 of shape (n,)."""
        return _token_counts(self._columns)[self._rows]

    def column(self, name: str) -> NDArray[Any]:
        """Return a number of each sequence; shape (n,)."""
        return _column_array(self._columns, name)[self._rows]

    def tokens(self, index: int) -> Tokens:
        """One sequence; its arrays are not copied."""
        row = int(self._rows[index])
        ids, mask = (to_numpy(self._columns[name][row].values) for name in ("ids", "loss_mask"))
        place, part = (self._columns[name][row].as_py() for name in ("place", "part"))
        piece = self.pieces[int(np.searchsorted(self._ends, index, side="right"))]
        origin = piece.origin.format(place) + (f" (part {part})" if part else "")
        return Tokens(ids, mask.view(np.bool_), origin)

    def fingerprint(self) -> str:
        """Hexadecimal digest of all tokens and their loss masks."""
        return key_of(*(piece.fingerprint for piece in self.pieces))
