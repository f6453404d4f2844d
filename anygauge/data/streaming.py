"""Rows that are read and tokenized during the run, in their own order; threads work ahead.

A stream is cut into blocks of `data.shuffle_buffer` rows, and each is shuffled by seed, epoch and
its number. So what a step reads depends on nothing else. Every rank reads the whole stream and
tokenizes all rows of a step, so that it knows the step's counts, and meets a bad row, without a
word from the others. Reading from a far place passes over the rows before, which are not parsed.

With packing, the rows of a block are packed together and dealt to its steps, as evenly as may be:
no row is left out and no step is empty, but the packs of a block's last steps may be fewer.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from anygauge.data.batches import (
    KEPT_STEPS,
    Batches,
    Layout,
    MicroBatch,
    Prefetcher,
    Schedule,
    pack,
    tokens_of,
)
from anygauge.data.encode import Counts
from anygauge.data.order import BLOCKS, STREAM, permutation
from anygauge.data.readers import Record
from anygauge.data.rows import (
    NAMED_BAD,
    Tokenize,
    Tokens,
    Workers,
    bad_of,
    chunks_of,
    documents_of,
    records_of,
    to_numpy,
)
from anygauge.data.sources import Source, in_turn
from anygauge.data.template import Rendering, render_unbounded
from anygauge.interface import DataError, RunFileError

_ENDLESS = 2**62


def unknown_end(name: str) -> RunFileError:
    """Epochs cannot decide the end of a run on a stream of this name."""
    return RunFileError(
        f"train.epochs: anygauge does not know how many rows {name} has before it reaches the end, "
        "so epochs cannot decide when the run ends; set train.steps, or the source's `limit` to a "
        "number of rows that it has"
    )


class StreamedRows:
    """The rows of sources, one after another, in blocks of `size`.

    Two blocks are held: the one that is read from, and the next, which a thread reads meanwhile.

    Args:
        tokenizer: another process that turns rows into tokens; None: this one does.

    Attributes:
        identity: digest of what the sources hold and how it becomes tokens.
        length: rows; None as long as that is not known.
        counts: what became of the rows of the steps so far.
        bad: what is wrong with the first rows that were skipped.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Source, Tokenize]],
        identity: str,
        size: int,
        tokenizer: Workers | None = None,
        rendering: Rendering = render_unbounded,
    ) -> None:
        self.identity, self.size = identity, size
        self._sources, self._tokenizer, self._rendering = sources, tokenizer, rendering
        self.name = ", ".join(source.name for source, _ in sources)
        lengths = [source.count() for source, _ in sources]
        self.length = None if None in lengths else sum(filter(None, lengths))
        self.counts = Counts()
        self.bad: list[str] = []
        self._ahead = Prefetcher(self._read, _ENDLESS, depth=1, name="rows-ahead")
        self._rows: Iterator[tuple[int, Record]] = iter(())
        self._next = -1

    @property
    def report(self) -> str:
        """Describe what became of the rows so far."""
        if self.counts.rows:
            return f"streamed {self.counts}"
        count = "rows" if self.length is None else f"{self.length} rows"
        return (
            f"{count} of {self.name}, read and tokenized while training, shuffled in blocks of "
            f"{self.size}"
        )

    def block(self, number: int) -> list[tuple[int, Record]]:
        """The rows of a block, each with the number of its source; fewer than `size` at the end."""
        return self._ahead.get(number)

    def locate(self, position: int) -> tuple[int, int, int]:
        """Epoch, block and place in it of a row by its position in the run."""
        number, place = divmod(position, self.size)
        if self.length is None and place < len(self.block(number)):
            return 0, number, place
        assert self.length is not None, "a block that is not full is the last"
        epoch, inside = divmod(position, self.length)
        return epoch, *divmod(inside, self.size)

    def encode(
        self, rows: Sequence[tuple[int, Record]], *, whole: bool = True
    ) -> tuple[list[list[Tokens]], Counts]:
        """What each row became: no sequence, one, or of a long text several; if not `whole`, the
        first, and it counts as truncated."""
        documents: list[list[Tokens]] = [[] for _ in rows]
        counts = Counts()
        for number, (_, work) in enumerate(self._sources):
            places = [place for place, (source, _) in enumerate(rows) if source == number]
            if not places:
                continue
            given = tuple(rows[place][1] for place in places)
            chunk = self._tokenizer(number, given) if self._tokenizer else work(given)
            found, count = documents_of(chunk, work.origin, whole=whole)
            counts += count
            fresh = [text for text in bad_of(chunk) if text not in self.bad]
            self.bad += fresh[: NAMED_BAD - len(self.bad)]
            for place, each in zip(places, found, strict=True):
                documents[place] = each
        return documents, counts

    def packs(self, capacity: int, workers: int | None) -> list[int]:
        """Packs of each block of an epoch; reads and tokenizes all rows once."""
        blocks, lengths, first = [], [], 0
        for source, work in self._sources:
            for chunk in chunks_of(source.rows(0), work, workers, self._rendering):
                blocks.append((to_numpy(chunk["record"]) + first) // self.size)
                lengths.append(np.diff(to_numpy(chunk["ids"].offsets)))
                first += records_of(chunk)
        of_block, of_row = np.concatenate(blocks), np.concatenate(lengths).astype(np.int64)
        found = []
        for number in range(-(-first // self.size)):
            rows = of_row[(of_block == number) & (of_row > 0)]
            found.append(len(pack(rows, capacity, np.arange(len(rows)))))
        self.length = first
        return found

    def _read(self, number: int) -> list[tuple[int, Record]]:
        if self.length is not None and number * self.size >= self.length:
            return []
        if number != self._next:
            self._rows = self._rows_from(number * self.size)
        self._next = -1  # should reading fail, it cannot be resumed where it was
        block = list(islice(self._rows, self.size))
        self._next = number + 1
        return block

    def _rows_from(self, start: int) -> Iterator[tuple[int, Record]]:
        """The rows from a number on; at their end it is known how many there are."""
        at = yield from in_turn([source for source, _ in self._sources], start)
        if self.length is not None and at < self.length:
            raise DataError(
                f"{self.name} ends after {at:,} rows, but its description promises "
                f"{self.length:,}; set limit to {at} or less"
            )
        self.length = at


@lru_cache(maxsize=4)
def _of_block(count: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    return permutation(count, seed, epoch, STREAM, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Steps whose rows are tokenized together: those of a block with packing, else one step."""

    first: int
    steps: list[list[list[Tokens]]]
    """Of each, the sequences over all ranks: documents, none for a dummy."""
    counts: Counts
    epoch: int = 0
    block: int = 0

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.first + len(self.steps)


class StreamedBatches(Batches):
    """Training batches of a stream; see `Batches`.

    `step`, `normalizer` and `real_tokens` raise a `DataError` where a row cannot be used.
    """

    def __init__(self, rows: StreamedRows, schedule: Schedule, layout: Layout, steps: int) -> None:
        super().__init__(schedule, layout)
        self._rows, self.steps, self._identity = rows, steps, (rows.identity,)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens-ahead")
        self._lock = threading.Lock()
        self._read: Iterator[_Part]
        self._parts: list[_Part] = []
        self._following: Future[_Part]
        self._counted = -1

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`."""
        sequences = self._sequences(index)
        turns = [[sequences[at] for at in turn] for turn in self._places]
        return self.layout.step(turns, max(map(tokens_of, sequences)))

    def normalizer(self, index: int) -> int:
        """See `Batches`."""
        part = self._part(index)
        if part.first > self._counted:
            self._counted = part.first
            self._rows.counts += part.counts
        documents = [each for sequence in self._sequences(index) for each in sequence]
        return sum(int(each.loss_mask.sum()) for each in documents)

    def real_tokens(self, index: int) -> int:
        """See `Batches`."""
        return sum(map(tokens_of, self._sequences(index)))

    @abstractmethod
    def _parts_from(self, index: int) -> Iterator[_Part]:
        """Parts, one after another, that come to that of a step."""

    def _epochs_read(self, read: float) -> float:
        """Epochs in so many rows; until the end was seen, as if it lay as far as is read ahead."""
        return read / (self._rows.length or read + 2 * self._rows.size)

    def _shuffled_row(self, epoch: int, number: int, place: int) -> tuple[int, Record]:
        """The row at a place of a block, as it is shuffled in an epoch."""
        block = self._rows.block(number)
        if self.schedule.shuffle:
            place = _of_block(len(block), self.schedule.seed, epoch, number)[place]
        return block[place]

    def _sequences(self, index: int) -> list[list[Tokens]]:
        part = self._part(index)
        return part.steps[index - part.first]

    def _part(self, index: int) -> _Part:
        """The part of a step; a thread reads one after another, and the last ones are held."""
        self._check_index(index)
        # Not under the lock: another thread may be waiting for a later one.
        for part in self._parts:
            if part.first <= index < part.end:
                return part
        with self._lock:
            if not self._parts or index < self._parts[0].first:
                self._parts, self._read = [], self._parts_from(index)
                self._following = self._thread.submit(next, self._read)
            while not self._parts or index >= self._parts[-1].end:
                held = [part for part in self._parts if part.end > index - KEPT_STEPS]
                self._parts = [*held, self._following.result()]
                if self._parts[-1].end < self.steps:
                    self._following = self._thread.submit(next, self._read)
        return self._part(index)


class RowStream(StreamedBatches):
    """Training batches without packing: each row is a sequence, and keeps its place where nothing
    is left of it."""

    def __init__(self, rows: StreamedRows, schedule: Schedule, layout: Layout) -> None:
        if schedule.steps:
            self._total = schedule.steps * schedule.global_batch
        elif rows.length is None:
            raise unknown_end(rows.name)
        else:
            self._total = max(1, round(rows.length * Fraction(repr(float(schedule.epochs)))))
        super().__init__(rows, schedule, layout, -(-self._total // schedule.global_batch))

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        return self._epochs_read(min((index + 1) * self.global_batch, self._total))

    def _parts_from(self, index: int) -> Iterator[_Part]:
        for step in range(index, self.steps):
            end = min((step + 1) * self.global_batch, self._total)
            positions = range(step * self.global_batch, end)
            rows = [self._shuffled_row(*self._rows.locate(position)) for position in positions]
            documents, counts = self._rows.encode(rows, whole=False)
            documents += [[] for _ in range(self.global_batch - len(documents))]
            yield _Part(first=step, steps=[documents], counts=counts)


class PackedStream(StreamedBatches):
    """Training batches with packing.

    Args:
        packs: of each block of an epoch; None where `schedule` has the number of steps.
    """

    def __init__(
        self, rows: StreamedRows, schedule: Schedule, layout: Layout, packs: Sequence[int] | None
    ) -> None:
        of_blocks = [math.ceil(each / schedule.global_batch) for each in packs or ()]
        self._steps_per_epoch = sum(of_blocks)
        steps = schedule.steps or max(1, round(self._steps_per_epoch * schedule.epochs))
        super().__init__(rows, schedule, layout, steps)

    def state(self, done: int) -> dict[str, int]:
        """See `Batches`: the block of the last step, since the next may not be readable."""
        if not done:
            return {}
        part = self._part(done - 1)
        return {"first_step": part.first, "epoch": part.epoch, "block": part.block}

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        if self._steps_per_epoch:
            return (index + 1) / self._steps_per_epoch
        part = self._part(index)
        done = (index + 1 - part.first) / len(part.steps) * part.counts.rows
        return part.epoch + self._epochs_read(part.block * self._rows.size + done)

    def _parts_from(self, index: int) -> Iterator[_Part]:
        begin = self._resumed if index >= self._resumed.get("first_step", 0) else {}
        first, epoch, number = (begin.get(name, 0) for name in ("first_step", "epoch", "block"))
        while True:
            places = range(len(self._rows.block(number)))
            if places:
                rows = [self._shuffled_row(epoch, number, place) for place in places]
                documents, counts = self._rows.encode(rows)
                steps = self._deal([one for row in documents for one in row], epoch, number)
                yield _Part(first=first, steps=steps, counts=counts, epoch=epoch, block=number)
                first, number = first + len(steps), number + 1
            elif first:
                epoch, number = epoch + 1, 0
            else:
                raise DataError(
                    f"none of the rows of {self._rows.name} holds anything to learn; see "
                    "data.max_length and the columns of data.train"
                )

    def _deal(self, documents: list[Tokens], epoch: int, number: int) -> list[list[list[Tokens]]]:
        """The steps of a block: of each, its packs."""
        lengths = np.array([len(each.ids) for each in documents], dtype=np.int64)
        packs = pack(lengths, self.layout.max_length, np.arange(len(documents)))
        order = permutation(len(packs), self.schedule.seed, epoch, BLOCKS, number).tolist()
        steps = []
        for step in range(count := -(-len(packs) // self.global_batch)):
            held = [[documents[row] for row in packs[at]] for at in order[step::count]]
            steps.append(held + [[]] * (self.global_batch - len(held)))
        return steps
