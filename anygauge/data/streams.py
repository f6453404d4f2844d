"""Rows that come over the network in their own order, and are never kept on the disk.

A stream is read on from where it is. `Blocks` cuts it into blocks of a fixed number of rows and
holds two of them, so that rows are found by number as in a file, as long as numbers come block by
block, as `BlockOrder` does. Reading from a far place seeks where the format allows it (Parquet,
by its row groups), and otherwise passes over the rows before.

JSON Lines, CSV and Parquet go through our own parsers, so that a row means the same as on the disk,
and messages name it; `datasets` finds the files of a hub's data set, and streams other kinds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from anygauge.data.lines import FilledLines
from anygauge.data.order import STREAM, permutation
from anygauge.data.records import INDEX_MARK, LINE_MARK, Record, parse_object
from anygauge.data.remote import FEW, open_remote
from anygauge.data.tables import batches_of, group_sizes, rows_of, table_mark
from anygauge.interface import DataError, RunFileError

Work = TypeVar("Work")

_FOOTERS_AT_ONCE = 16
_BATCH, _FEW_ROWS = 256, 20  # rows that are converted at once
_ENDLESS = 2**62


class Ahead(Generic[Work]):
    """Results of numbered work, one after another in a thread, begun before they are asked for.

    Args:
        count: of the numbers, from 0.
        depth: results that are begun before they are asked for.
        behind: how many numbers a second thread that asks may be behind the first.
        name: of the thread.
    """

    def __init__(
        self,
        work: Callable[[int], Work],
        count: int,
        depth: int,
        *,
        behind: int = 0,
        name: str = "rows-ahead",
    ) -> None:
        self._work, self._count, self._depth, self._behind = work, count, depth, behind
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._begun: dict[int, Future[Work]] = {}
        self._lock = threading.Lock()

    def get(self, index: int) -> Work:
        """The result for a number; raises what the work raised."""
        wanted = range(index, min(index + self._depth + 1, self._count))
        kept = range(index - self._behind, wanted.stop + self._behind)
        with self._lock:
            for number in set(self._begun) - set(kept):
                self._begun.pop(number).cancel()
            for number in wanted:
                if number not in self._begun:
                    self._begun[number] = self._pool.submit(self._work, number)
            found = self._begun[index]
        return found.result()

    def __enter__(self) -> Ahead[Work]:
        """Its thread ends with this context."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Begin no more work. After an error nobody waits for what the thread is at: that may take
        as long as a network does, and the thread ends with it."""
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


class StreamedRow(NamedTuple):
    """A row that has arrived: what is written behind the source's name, and how it is parsed."""

    place: int
    record: Callable[[], Record]


class RowStream(Protocol):
    """Rows of a source, in their own order.

    Attributes:
        name: of the source, as origins show it.
        mark: how a place is written behind the name.
        count: rows; None where that is not known before they are read. Set by `rows` at the end.
    """

    name: str
    mark: str
    count: int | None

    def rows(self, start: int, *, few: bool = False) -> Iterator[StreamedRow]:
        """The rows from a number on, to the end.

        Args:
            few: only the first of them will be asked for: fetch little at once.

        Raises:
            DataError: the source cannot be read.
        """
        ...


class LineStream:
    """JSON Lines: one file, or several one after another.

    Args:
        files: addresses; compressed ones are unpacked on the way.
        name: as origins show the source.
        mark: ``:{}`` for one file, whose lines are counted; ``[{}]`` counts rows through all.
    """

    def __init__(self, files: Sequence[str], name: str, mark: str) -> None:
        self.files, self.name, self.mark = tuple(files), name, mark
        self.count: int | None = None

    def rows(self, start: int, *, few: bool = False) -> Iterator[StreamedRow]:
        """See `RowStream`; lines that are passed over are not parsed."""
        index = 0
        for address in self.files:
            file_name = self.name if self.mark == LINE_MARK else address.rpartition("/")[2]
            with _unpacked(address, FEW if few else None) as file:
                lines = FilledLines(file, file_name, skip=max(0, start - index))
                for number, offset, line in lines:
                    at = index + lines.count - 1
                    if at >= start:
                        yield self._row(at, number, offset, line, file_name)
                index += lines.count
        self.count = index

    def _row(
        self, index: int, number: int, offset: int, line: bytes, file_name: str
    ) -> StreamedRow:
        place = number if self.mark == LINE_MARK else index

        def record() -> Record:
            origin = self.name + self.mark.format(place)
            where = origin if self.mark == LINE_MARK else f"{origin} ({file_name}:{number})"
            return Record(parse_object(line, where, offset), origin)

        return StreamedRow(place, record)


class TableStream:
    """CSV or Parquet: one file, or several one after another.

    Args:
        files: addresses.
        name: as origins show the source.
        count: rows, where a description says it; None counts those of Parquet in its footers.
    """

    def __init__(self, files: Sequence[str], name: str, count: int | None = None) -> None:
        self.files, self.name, self.mark = tuple(files), name, table_mark(name)
        self._first = 2 if self.mark == LINE_MARK else 0
        self.count = count
        self._sizes: list[list[int]] | None = None
        if count is None and self.mark == INDEX_MARK:
            self.count = sum(map(sum, self._groups()))

    def rows(self, start: int, *, few: bool = False) -> Iterator[StreamedRow]:
        """See `RowStream`; of Parquet, whole row groups before `start` are not read."""
        index = 0
        for number, address in enumerate(self.files):
            groups = None
            if start and self.mark == INDEX_MARK:
                sizes = self._groups()[number]
                passed = sum(index + end <= start for end in accumulate(sizes))
                index += sum(sizes[:passed])
                if passed == len(sizes):
                    continue
                groups = range(passed, len(sizes))
            opened = partial(self._open, address)
            size = _FEW_ROWS if few else _BATCH
            batches = batches_of(opened, self._file_name(address), groups, size)
            with closing(batches):
                for batch in batches:
                    if index + batch.num_rows > start:
                        skipped = max(0, start - index)
                        for at, values in enumerate(rows_of(batch.slice(skipped)), index + skipped):
                            yield StreamedRow(at + self._first, partial(self._record, values, at))
                    index += batch.num_rows
        self.count = index

    def _record(self, values: dict[str, Any], index: int) -> Record:
        return Record(values, self.name + self.mark.format(index + self._first))

    def _groups(self) -> list[list[int]]:
        """Rows of the row groups of each file; the footers are read once, several at a time."""
        if self._sizes is None:

            def sizes(address: str) -> list[int]:
                return group_sizes(partial(self._open, address), self._file_name(address))

            with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
                self._sizes = list(pool.map(sizes, self.files))
        return self._sizes

    def _open(self, address: str) -> BinaryIO:
        # Of Parquet, exactly the columns' parts are read; a buffer would fetch what lies between.
        return open_remote(address, 0 if self.mark == INDEX_MARK else None)

    def _file_name(self, address: str) -> str:
        if len(self.files) == 1 and "://" in self.name:
            return self.name
        return f"{self.name} {address.rpartition('/')[2]}"


class Blocks:
    """A stream as a reader whose rows are asked for block by block; see `Reader`.

    Two blocks are held: the one that is read from, and the next, which a thread reads meanwhile.

    Args:
        size: rows of a block.
        limit: the first rows alone.

    Attributes:
        length: rows; None as long as that is not known.
    """

    def __init__(self, stream: RowStream, size: int, limit: int | None = None) -> None:
        self.name, self.mark, self.size = stream.name, stream.mark, size
        self._stream, self._limit, self._expected = stream, limit, stream.count
        self.length = limit if stream.count is None else min(stream.count, limit or stream.count)
        self._ahead = Ahead(self._read, _ENDLESS, depth=1)
        self._lock = threading.Lock()
        self._rows: Iterator[StreamedRow] = iter(())
        self._next = -1
        self._full = 0  # blocks from the first on that are known to be full
        if self.length == 0:
            raise self._empty()

    def __len__(self) -> int:
        return _ENDLESS if self.length is None else self.length

    def rows_in(self, number: int) -> int:
        """Rows of a block, which is read if nothing else tells: less than `size` at the end."""
        if self.length is not None:
            return max(0, min(self.size, self.length - number * self.size))
        return self.size if number < self._full else len(self._block(number))

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Reader`."""
        if self.mark == INDEX_MARK:
            return indices
        return np.array([row.place for row in self._find(indices)], dtype=np.int64)

    def records(self, indices: NDArray[np.int64]) -> list[Record]:
        """See `Reader`."""
        return [row.record() for row in self._find(indices)]

    def _find(self, indices: NDArray[np.int64]) -> list[StreamedRow]:
        numbers = indices // self.size
        blocks = {number: self._block(number) for number in np.unique(numbers).tolist()}
        return [
            blocks[number][index - number * self.size]
            for number, index in zip(numbers.tolist(), indices.tolist(), strict=True)
        ]

    def _block(self, number: int) -> list[StreamedRow]:
        with self._lock:
            return self._ahead.get(number)

    def _read(self, number: int) -> list[StreamedRow]:
        start = number * self.size
        room = self.size
        if self._limit is not None:
            room = max(0, min(room, self._limit - start))
        if number != self._next:
            self._rows = self._stream.rows(start)
        self._next = -1  # should reading fail, it cannot be resumed where it was
        block = list(islice(self._rows, room))
        self._next = number + 1
        if len(block) == self.size:
            self._full = max(self._full, number + 1)
        if len(block) < room:
            self._end()
        return block

    def _end(self) -> None:
        """The stream has ended: hold its rows against what was expected of it."""
        found = self._stream.count
        assert found is not None
        wanted = self.length if self.length is not None else self._expected
        if not found:
            raise self._empty()
        if wanted is not None and found < wanted:
            whose = (
                f"its limit is {wanted:,}"
                if self._limit == wanted and self._expected is None
                else f"its description promises {wanted:,}"
            )
            raise DataError(
                f"{self.name} ends after {found:,} rows, but {whose}; set limit to {found} or less"
            )
        self.length = found if self._limit is None else min(found, self._limit)

    def _empty(self) -> DataError:
        return DataError(f"{self.name} is empty; at least one row is needed")


class BlockOrder:
    """The rows of a stream over a whole run: shuffled within blocks, which stay in their order.

    Position p of an epoch lies in block p // size, and is one of its rows by a permutation of seed,
    epoch and block number. So what a step reads depends on nothing else, and rows are asked for
    block by block. Where the number of rows is not known, the first epoch lasts until it shows.
    """

    def __init__(self, rows: Blocks, seed: int, *, shuffle: bool = True) -> None:
        self._rows, self.seed, self.shuffle = rows, seed, shuffle

    @property
    def per_epoch(self) -> float:
        """Rows of an epoch; infinity as long as that is not known."""
        return math.inf if self._rows.length is None else self._rows.length

    def end(self, epochs: float | Fraction) -> int:
        """Rows of so many epochs from the start of the run.

        Raises:
            RunFileError: the number of rows is not known.
        """
        if self._rows.length is None:
            raise RunFileError(
                f"train.epochs: anygauge does not know how many rows {self._rows.name} has before "
                "it reaches the end, so epochs cannot decide when the run ends; set train.steps, "
                "or the source's `limit` to a number of rows that it has"
            )
        count = Fraction(repr(epochs)) if isinstance(epochs, float) else Fraction(epochs)
        return round(self._rows.length * count)

    def sample(self, count: int) -> NDArray[np.int64]:
        """Items to measure by: the first of the order."""
        return self.items(np.arange(count))

    def items(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at global positions, in any order; int64 of the same shape (n,)."""
        length, size = self._rows.length, self._rows.size
        so_far = int(positions.max(initial=0)) + 1 if length is None else length
        epochs, inside = np.divmod(positions, so_far)
        items = np.empty(len(positions), dtype=np.int64)
        blocks = inside // size
        for epoch, number in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            count = self._rows.rows_in(number)
            if length is None and self._rows.length is not None:
                return self.items(positions)
            here = (epochs == epoch) & (blocks == number)
            places = inside[here] - number * size
            if self.shuffle:
                places = _of_block(count, self.seed, epoch, number)[places]
            items[here] = number * size + places
        return items


@lru_cache(maxsize=4)
def _of_block(count: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    return permutation(count, seed, epoch, STREAM, number)


def first_of(stream: RowStream, count: int) -> list[Record]:
    """The first records of a stream, at least one; reads little more.

    Raises:
        DataError: unreadable, malformed or empty.
    """
    rows = stream.rows(0, few=True)
    try:
        records = [row.record() for row in islice(rows, count)]
    finally:
        closed = getattr(rows, "close", None)
        if closed is not None:
            closed()
    if not records:
        raise DataError(f"{stream.name} is empty; at least one row is needed")
    return records


def _unpacked(address: str, block: int | None) -> BinaryIO:
    import fsspec

    file = open_remote(address, block)
    kind = fsspec.utils.infer_compression(address.partition("?")[0])
    if kind is None:
        return file
    try:
        unpacked: BinaryIO = fsspec.compression.compr[kind](file, mode="rb")
    except (ImportError, KeyError) as error:
        raise DataError(f"{address}: {kind} cannot be unpacked here: {error}") from None
    return unpacked
