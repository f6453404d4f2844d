"""Rows that are read and tokenised during the run, in their own order; a thread works ahead.

A stream is cut into blocks of `data.shuffle_buffer` rows, and each is shuffled by seed, epoch and
its number. So what a step reads depends on nothing else; every rank reads the whole stream and
tokenises its own rows. Reading from a far place passes over the rows before, which are not parsed.

With packing, the rows of a block are packed together and dealt to its steps, as evenly as may be:
no row is left out and no step is empty, but the packs of a block's last steps may be fewer. Every
rank tokenises all rows of a block, since who packs must know all lengths.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.batches import (
    STEPS_AHEAD,
    Ahead,
    Batches,
    Layout,
    MicroBatch,
    OrderedBatches,
    Schedule,
    tokens_of,
)
from anygauge.data.cache import key_of
from anygauge.data.encode import Counts
from anygauge.data.order import BLOCKS, STREAM, permutation
from anygauge.data.readers import RawRow
from anygauge.data.row_batches import pack
from anygauge.data.rows import (
    NAMED_BAD,
    Tokenise,
    Tokeniser,
    Tokens,
    chunks_of,
    documents_of,
)
from anygauge.data.sources import Source
from anygauge.data.template import Rendering
from anygauge.interface import DataError, RunFileError

SumOnRanks = Callable[[list[float]], list[float]]
GatherTexts = Callable[[str], Sequence[str]]

_ENDLESS = 2**62
_KEPT_STEPS = 4
_BEHIND = 2 * STEPS_AHEAD + 2
"""Steps that are asked for after later ones: batches are laid out ahead, metrics come late."""
_COUNTED = tuple(one.name for one in fields(Counts) if one.type == "int")


def unknown_end(name: str) -> RunFileError:
    """Epochs cannot decide the end of a run on a stream of this name."""
    return RunFileError(
        f"train.epochs: anygauge does not know how many rows {name} has before it reaches the end, "
        "so epochs cannot decide when the run ends; set train.steps, or the source's `limit` to a "
        "number of rows that it has"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSource:
    """One source, and how its rows become tokens.

    Attributes:
        identity: digest of its content and of the encoder's settings.
    """

    source: Source
    work: Tokenise
    identity: str


class StreamedRows:
    """The rows of sources, one after another, in blocks.

    Two blocks are held: the one that is read from, and the next, which a thread reads meanwhile.

    Args:
        size: rows of a block.
        tokeniser: turns raw rows into chunks, in this process or another.

    Attributes:
        length: rows; None as long as that is not known.
        counts: what became of the rows that were read so far, over all ranks.
        bad: what is wrong with the first rows that this rank has skipped.
    """

    def __init__(self, sources: Sequence[StreamedSource], size: int, tokeniser: Tokeniser) -> None:
        self.sources, self.size, self._tokeniser = tuple(sources), size, tokeniser
        lengths = [each.source.count() for each in sources]
        self.length = None if None in lengths else sum(filter(None, lengths))
        self.counts = Counts()
        self.bad: list[str] = []
        self._ahead = Ahead(self._read, _ENDLESS, depth=1)
        self._lock = threading.Lock()
        self._rows: Iterator[tuple[int, RawRow]] = iter(())
        self._next = -1
        self._full = 0  # blocks from the first on that are known to be full
        self._found = 0  # rows, once the end was reached

    @property
    def name(self) -> str:
        """Of the sources, for messages."""
        return ", ".join(each.source.name for each in self.sources)

    @property
    def report(self) -> str:
        """What became of the rows so far, in words."""
        if self.counts.rows:
            return f"streamed {self.counts}"
        count = "rows" if self.length is None else f"{self.length} rows"
        return (
            f"{count} of {self.name}, read and tokenised while training, shuffled in blocks of "
            f"{self.size}"
        )

    def rows_in(self, number: int) -> int:
        """Rows of a block, which is read if nothing else tells: less than `size` at the end."""
        if self.length is not None:
            return max(0, min(self.size, self.length - number * self.size))
        return self.size if number < self._full else len(self.block(number))

    def block(self, number: int) -> list[tuple[int, RawRow]]:
        """The rows of a block, each with the number of its source."""
        with self._lock:
            return self._ahead.get(number)

    def find(self, numbers: NDArray[np.int64]) -> list[tuple[int, RawRow]]:
        """The rows of these numbers, from 0 through all sources."""
        found = []
        for number in numbers.tolist():
            block, inside = divmod(number, self.size)
            found.append(self.block(block)[inside])
        return found

    def encode(self, rows: Sequence[tuple[int, RawRow]]) -> tuple[list[list[Tokens]], Counts]:
        """What each row became: no sequence, one, or for a long text several.

        Raises:
            DataError: a row cannot be used; names it.
        """
        documents: list[list[Tokens]] = [[] for _ in rows]
        counts = Counts()
        for number, streamed in enumerate(self.sources):
            places = [place for place, (source, _) in enumerate(rows) if source == number]
            if places:
                chunk = self._tokeniser(number, tuple(rows[place][1] for place in places))
                found, count = documents_of(chunk, streamed.source.origin)
                counts += count
                fresh = [text for text in chunk.bad if text not in self.bad]
                self.bad += fresh[: NAMED_BAD - len(self.bad)]
                for place, each in zip(places, found, strict=True):
                    documents[place] = each
        return documents, counts

    def packs(self, capacity: int, workers: int | None, rendering: Rendering) -> list[int]:
        """Packs of each block of an epoch; reads and tokenises all rows once.

        Raises:
            DataError: a row cannot be used.
        """
        blocks, lengths, first = [], [], 0
        for streamed in self.sources:
            for chunk in chunks_of(streamed.source.rows(), streamed.work, workers, rendering):
                records = chunk.batch.column("record").to_numpy() + first
                blocks.append(records // self.size)
                lengths.append(np.diff(chunk.batch.column("ids").offsets.to_numpy()))
                first += chunk.records
        of_block, of_row = np.concatenate(blocks), np.concatenate(lengths).astype(np.int64)
        found = []
        for number in range(-(-first // self.size)):
            rows = of_row[(of_block == number) & (of_row > 0)]
            found.append(len(pack(rows, capacity, np.arange(len(rows)))))
        self.length = first
        return found

    def fingerprint(self) -> str:
        """Hexadecimal digest of what the sources hold and how it becomes tokens."""
        return key_of("stream", self.size, *(each.identity for each in self.sources))

    def _read(self, number: int) -> list[tuple[int, RawRow]]:
        if self.length is not None and number * self.size >= self.length:
            return []
        if number != self._next:
            self._rows = self._from(number * self.size)
        self._next = -1  # should reading fail, it cannot be resumed where it was
        block = list(islice(self._rows, self.size))
        self._next = number + 1
        if len(block) == self.size:
            self._full = max(self._full, number + 1)
            return block
        if self.length is not None and self._found < self.length:
            raise DataError(
                f"{self.name} ends after {self._found:,} rows, but its description promises "
                f"{self.length:,}; set limit to {self._found} or less"
            )
        self.length = self._found
        return block

    def _from(self, start: int) -> Iterator[tuple[int, RawRow]]:
        """The rows from a number on; at their end it is known how many there are."""
        at = 0
        for number, streamed in enumerate(self.sources):
            known = streamed.source.count()
            skipped = 0 if known is None else min(known, max(0, start - at))
            at += skipped
            if skipped == known:
                continue
            for row in streamed.source.rows(skipped):
                if at >= start:
                    yield number, row
                at += 1
        self._found = at


class BlockOrder:
    """The rows of a stream over a whole run: shuffled within blocks, which stay in their order.

    Position p of an epoch lies in block p // size, and is one of its rows by a permutation of seed,
    epoch and block number. Where the number of rows is not known, the first epoch lasts until it
    shows.
    """

    def __init__(self, rows: StreamedRows, seed: int, *, shuffle: bool = True) -> None:
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
            raise unknown_end(self._rows.name)
        count = Fraction(repr(epochs)) if isinstance(epochs, float) else Fraction(epochs)
        return round(self._rows.length * count)

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


def first_parts(
    documents: Sequence[Sequence[Tokens]], counts: Counts
) -> tuple[list[list[Tokens]], Counts]:
    """Only the first sequence of each row; rows that lose the others count as truncated."""
    kept = [list(parts[:1]) for parts in documents]
    lost = sum(len(parts) > 1 for parts in documents)
    counts = replace(
        counts,
        sequences=sum(map(len, kept)),
        truncated=counts.truncated + lost,
        tokens=sum(map(tokens_of, kept)),
        num_loss_tokens=sum(int(each.loss_mask.sum()) for parts in kept for each in parts),
    )
    return kept, counts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """This rank's sequences of a step, and what became of their rows.

    Attributes:
        longest: tokens of the longest sequence; of all ranks', where they agree on a width.
        error: why a row cannot be used.
    """

    sequences: list[list[Tokens]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    longest: int = 0
    error: DataError | None = None


class StreamedBatches(OrderedBatches):
    """Training batches without packing; see `Batches`.

    `num_loss_tokens` and `real_tokens` of a step must be called on every rank, for the same steps
    in the same order: the first of them sums over ranks.

    Args:
        sum_on_ranks: sums each number over all parts of a step, each part once.
        gather_texts: a text of each rank.
    """

    def __init__(
        self,
        rows: StreamedRows,
        schedule: Schedule,
        layout: Layout,
        sum_on_ranks: SumOnRanks,
        gather_texts: GatherTexts,
    ) -> None:
        order = BlockOrder(rows, schedule.seed, shuffle=schedule.shuffle)
        super().__init__(schedule, layout, order)
        self._rows, self._sum, self._gather = rows, sum_on_ranks, gather_texts
        self._ahead = Ahead(self._read, self.steps, depth=2, behind=STEPS_AHEAD)
        self._counts: OrderedDict[int, Counts] = OrderedDict()

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`."""
        step = self._ahead.get(self._checked(index))
        size = self.layout.micro_batch
        starts = range(0, len(step.sequences), size)
        turns = [step.sequences[at : at + size] for at in starts]
        return self.layout.step(turns, lambda: step.longest)

    def num_loss_tokens(self, index: int) -> int:
        """See `Batches`.

        Raises:
            DataError: a row cannot be used, here or on another rank.
        """
        return self._sums(index).num_loss_tokens

    def real_tokens(self, index: int) -> int:
        """See `Batches`; raises what `num_loss_tokens` does."""
        return self._sums(index).tokens

    def global_origins(self, index: int) -> tuple[str, ...]:
        """See `Batches`; here also rows of which nothing was left."""
        numbers = self._numbers(self._checked(index), np.arange(self.global_batch))
        origins = [each.source.origin for each in self._rows.sources]
        return tuple(origins[at].format(row.place) for at, row in self._rows.find(numbers))

    def fingerprint(self) -> str:
        """See `Batches`."""
        settings = [self.schedule.record(1), False, self.layout.max_length]
        return key_of(self._rows.fingerprint(), *settings)

    def _numbers(self, index: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows at places of a step, without those beyond the end of the run."""
        positions = index * self.global_batch + places
        return self._order.items(positions[positions < self._total])

    def _encoded(self, rows: Sequence[tuple[int, RawRow]]) -> tuple[list[list[Tokens]], Counts]:
        return first_parts(*self._rows.encode(rows))

    def _read(self, index: int) -> _Step:
        places = self._places().ravel()
        every = np.arange(self.global_batch) if self.layout.agrees else places
        try:
            # At once, since a block that was left behind is read again from the beginning.
            found = self._rows.find(self._numbers(index, every))
            rows = dict(zip(every.tolist(), found, strict=False))
            own = [rows.pop(place) for place in places.tolist() if place in rows]
            mine, counts = self._encoded(own)
            theirs, _ = self._encoded(list(rows.values()))
        except DataError as error:  # the other ranks must hear of it
            return _Step(error=error)
        # Positions beyond the end of the run are the last ones of the last step.
        mine += [[] for _ in range(len(places) - len(mine))]
        longest = max(map(tokens_of, [*mine, *theirs]))
        return _Step(sequences=mine, counts=counts, longest=longest)

    def _sums(self, index: int) -> Counts:
        """The counts of a step over all ranks."""
        self._checked(index)
        if index not in self._counts:
            mine = self._ahead.get(index)
            values = [float(getattr(mine.counts, name)) for name in _COUNTED]
            *sums, failed = self._sum([*values, float(mine.error is not None)])
            if failed:
                texts = self._gather("" if mine.error is None else str(mine.error))
                raise DataError(next(filter(None, texts)))
            counted: dict[str, Any] = dict(zip(_COUNTED, map(round, sums), strict=True))
            counts = Counts(**counted)
            self._rows.counts += counts
            self._counts[index] = counts
            if len(self._counts) > _KEPT_STEPS:
                self._counts.popitem(last=False)
        return self._counts[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """The sequences of each step of a block, over all ranks; and what became of its rows.

    Attributes:
        first: the first step.
        epoch, number: which block it is.
    """

    first: int
    epoch: int
    number: int
    steps: list[list[list[Tokens]]]
    counts: Counts

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.first + len(self.steps)


class PackedStream(Batches):
    """Training batches with packing; see `Batches`. Ranks need not speak with each other.

    Args:
        packs: of each block of an epoch; None where `schedule` has the number of steps.
    """

    def __init__(
        self,
        rows: StreamedRows,
        schedule: Schedule,
        layout: Layout,
        packs: Sequence[int] | None,
    ) -> None:
        super().__init__(schedule, layout)
        self._rows = rows
        per_epoch = math.nan
        if packs is not None:
            per_epoch = sum(-(-each // self.global_batch) for each in packs)
            self.sequences_per_epoch = float(sum(packs))
        self.steps = schedule.steps or max(1, round(per_epoch * schedule.epochs))
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="packs-ahead")
        self._blocks: list[_Block] = []
        self._counted = (-1, -1)
        self._steps_of_epoch = per_epoch

    def state(self, done: int) -> dict[str, int]:
        """See `Batches`: the block of the last step, since the next may not be readable."""
        if not done:
            return {}
        block = self._block(done - 1)
        return {"first_step": block.first, "epoch": block.epoch, "block": block.number}

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`.

        Raises:
            DataError: a row cannot be used.
        """
        sequences = self._sequences(index)
        turns = [[sequences[at] for at in turn] for turn in self._places()]
        # Later packs are not known yet, and one that is full is as long as may be.
        return self.layout.step(turns, lambda: self.layout.max_length)

    def num_loss_tokens(self, index: int) -> int:
        """See `Batches`; raises what `step` does."""
        block = self._block(index)
        if (block.epoch, block.number) > self._counted:
            self._counted = block.epoch, block.number
            self._rows.counts += block.counts
        documents = [each for sequence in self._sequences(index) for each in sequence]
        return sum(int(each.loss_mask.sum()) for each in documents)

    def real_tokens(self, index: int) -> int:
        """See `Batches`."""
        return sum(map(tokens_of, self._sequences(index)))

    def global_origins(self, index: int) -> tuple[str, ...]:
        """See `Batches`."""
        return tuple(each.origin for sequence in self._sequences(index) for each in sequence)

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        if not math.isnan(self._steps_of_epoch):
            return (index + 1) / self._steps_of_epoch
        block = self._block(index)
        length = self._rows.length or (block.number + 2) * self._rows.size
        done = (index + 1 - block.first) / len(block.steps)
        size = self._rows.rows_in(block.number)
        return block.epoch + (block.number * self._rows.size + done * size) / length

    def fingerprint(self) -> str:
        """See `Batches`."""
        settings = [self.schedule.record(1), self.layout.kind, self.layout.max_length]
        return key_of(self._rows.fingerprint(), *settings)

    def _sequences(self, index: int) -> list[list[Tokens]]:
        block = self._block(index)
        return block.steps[index - block.first]

    def _block(self, index: int) -> _Block:
        """The block of a step; blocks are read one after another, and the last ones are held."""
        self._checked(index)
        with self._lock:
            if not self._blocks or index < self._blocks[0].first:
                begin = self.resumed
                if index < begin.get("first_step", 0):
                    begin = {}
                names = ("first_step", "epoch", "block")
                self._blocks = [self._read(*(begin.get(name, 0) for name in names))]
                self._following = self._ahead.submit(self._after, self._blocks[-1])
            while index >= self._blocks[-1].end:
                held = [one for one in self._blocks if one.end > index - _BEHIND]
                self._blocks = [*held, self._following.result()]
                self._following = self._ahead.submit(self._after, self._blocks[-1])
            return next(one for one in self._blocks if one.first <= index < one.end)

    def _after(self, last: _Block) -> _Block:
        """The block after another."""
        epoch, number = last.epoch, last.number + 1
        if not self._rows.rows_in(number):
            if not last.end:
                raise DataError(
                    f"none of the rows of {self._rows.name} holds anything to learn; see "
                    "data.max_length and the columns of data.train"
                )
            epoch, number = epoch + 1, 0
        return self._read(last.end, epoch, number)

    def _read(self, first: int, epoch: int, number: int) -> _Block:
        found = self._rows.block(number)
        if self.schedule.shuffle:
            shuffled = _of_block(len(found), self.schedule.seed, epoch, number)
            found = [found[at] for at in shuffled.tolist()]
        documents, counts = self._rows.encode(found)
        flat = [each for parts in documents for each in parts]
        lengths = np.array([len(each.ids) for each in flat], dtype=np.int64)
        packs = pack(lengths, self.layout.max_length, np.arange(len(flat)))
        dealt = permutation(len(packs), self.schedule.seed, epoch, BLOCKS, number)
        steps: list[list[list[Tokens]]] = [[] for _ in range(-(-len(packs) // self.global_batch))]
        for place, index in enumerate(dealt.tolist()):
            steps[place % len(steps)].append([flat[row] for row in packs.group(index).tolist()])
        for step in steps:
            step += [[] for _ in range(self.global_batch - len(step))]
        return _Block(first=first, epoch=epoch, number=number, steps=steps, counts=counts)
