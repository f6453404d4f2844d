"""Rows that are read and tokenised during the run; a thread works ahead.

The order is that of prepared rows: a permutation of all records, found by position, so that a run
resumes at any step without reading what came before. Of a remote source, the order is that of
`BlockOrder`: rows are shuffled within blocks of the stream; each rank reads the whole stream, and
parses and tokenises its own rows.

Without packing, a step is global_batch records and each rank tokenises its own; a record of which
nothing is left makes a dummy, a long text loses all but its first part (it counts as truncated).
Token counts of a step are summed over ranks, once a step. Where ranks must agree on a width, each
tokenises the records of all: a thread does it, and a thread must not communicate.

With packing, steps are filled in blocks: a fixed number of records, found from the lengths of a
first sample, is packed into the sequences of the block's steps. Every rank tokenises all records of
a block, since who packs must know all lengths; it costs host time and no communication, and packs
do not depend on ranks. The number of records leaves room for two standard deviations of their
length, so that few are left out; those are counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from anygauge.data.batches import (
    STEPS_AHEAD,
    Batches,
    Layout,
    MicroBatch,
    OrderedBatches,
    Schedule,
    tokens_of,
)
from anygauge.data.cache import key_of
from anygauge.data.encode import Counts, RowEncoder
from anygauge.data.order import BLOCKS, Order, Split, permutation
from anygauge.data.records import Reader
from anygauge.data.row_batches import pack
from anygauge.data.rows import Tokens
from anygauge.data.streams import Ahead, BlockOrder, Blocks
from anygauge.interface import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSource:
    """One source. `identity` is a digest of its content and of the encoder's settings."""

    reader: Reader | Blocks
    encoder: RowEncoder
    split: Split
    identity: str


class StreamedRows:
    """The records of all training sources, numbered from 0 through all of them.

    Attributes:
        sizes: records of each source.
        counts: what became of the records that were read so far, over all ranks.
        left_out: rows that found no room in the packs of their step.
    """

    def __init__(self, sources: Sequence[StreamedSource]) -> None:
        self._sources = tuple(sources)
        self.sizes = [source.split.kept_count for source in sources]
        self._ends = np.cumsum(self.sizes)
        self.counts = Counts()
        self.left_out = 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def blocks(self) -> Blocks | None:
        """The reader of a remote source, which is then the only one."""
        reader = self._sources[0].reader
        return reader if isinstance(reader, Blocks) else None

    @property
    def report(self) -> str:
        """What became of the records so far, in words."""
        if not self.counts.rows:
            blocks = self.blocks
            if blocks is None:
                return f"{len(self)} rows, tokenised while training"
            count = "rows" if blocks.length is None else f"{blocks.length} rows"
            return (
                f"{count} of {blocks.name}, read and tokenised while training, shuffled in blocks "
                f"of {blocks.size}"
            )
        left_out = f"; {self.left_out} left out of full packs" if self.left_out else ""
        return f"streamed {self.counts}{left_out}"

    def encode(self, numbers: NDArray[np.int64]) -> tuple[list[list[Tokens]], Counts]:
        """What each record became: no sequence, one, or for a long text several.

        Raises:
            DataError: a record cannot be read or used; names it.
        """
        documents: list[list[Tokens]] = [[] for _ in numbers]
        counts = Counts()
        for places, source, indices in self._by_source(numbers):
            records = source.reader.records(indices)
            encoded, count = source.encoder.encode(records)
            counts += count
            for each in encoded:
                part = f" (part {each.part})" if each.part else ""
                origin = records[each.record].origin + part
                documents[places[each.record]].append(Tokens(each.ids, each.loss_mask, origin))
        return documents, counts

    def origins(self, numbers: NDArray[np.int64]) -> tuple[str, ...]:
        """Where records stand; reads none of them."""
        origins = [""] * len(numbers)
        for places, source, indices in self._by_source(numbers):
            mark = source.reader.name.replace("{", "{{").replace("}", "}}") + source.reader.mark
            shown = source.reader.places(indices).tolist()
            for place, number in zip(places.tolist(), shown, strict=True):
                origins[place] = mark.format(number)
        return tuple(origins)

    def fingerprint(self) -> str:
        """Hexadecimal digest of what the sources hold and how it becomes tokens."""
        return key_of("stream", *(source.identity for source in self._sources))

    def _by_source(
        self, numbers: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], StreamedSource, NDArray[np.int64]]]:
        """For each source that is asked: places in `numbers`, the source, its own records."""
        which = np.searchsorted(self._ends, numbers, side="right")
        found = []
        for index in np.unique(which).tolist():
            places = np.flatnonzero(which == index)
            inside = numbers[places] - (self._ends[index] - self.sizes[index])
            source = self._sources[index]
            found.append((places, source, source.split.kept(inside)))
        return found


def first_parts(
    documents: Sequence[Sequence[Tokens]], counts: Counts
) -> tuple[list[list[Tokens]], Counts]:
    """Only the first sequence of each record; records that lose the others count as truncated."""
    kept = [list(parts[:1]) for parts in documents]
    lost = sum(len(parts) > 1 for parts in documents)
    counts = replace(
        counts,
        sequences=sum(map(len, kept)),
        truncated=counts.truncated + lost,
        tokens=sum(len(each.ids) for parts in kept for each in parts),
        num_loss_tokens=sum(int(each.loss_mask.sum()) for parts in kept for each in parts),
    )
    return kept, counts


SumOnRanks = Callable[[list[float]], list[float]]
Work = TypeVar("Work")

_SAMPLE = 512
_BLOCK_SEQUENCES = 256
_FILL = 0.98
_KEPT_STEPS = 4
_COUNTED = tuple(field.name for field in fields(Counts) if field.type == "int")


@dataclass(frozen=True, slots=True)
class _Step:
    """This rank's sequences of a step, and what became of their rows.

    Attributes:
        longest: tokens of the longest sequence; of all ranks', where they agree on a width.
    """

    sequences: list[list[Tokens]]
    counts: Counts
    longest: int


class StreamedBatches(OrderedBatches):
    """Training batches without packing; see `Batches`.

    `num_loss_tokens` and `real_tokens` of a step must be called on every rank, for the same steps
    in the same order: the first of them sums over ranks.

    Args:
        sum_on_ranks: sums each number over all parts of a step, each part once.
    """

    def __init__(
        self, rows: StreamedRows, schedule: Schedule, layout: Layout, sum_on_ranks: SumOnRanks
    ) -> None:
        super().__init__(schedule, layout, _order(rows, schedule))
        self._rows, self._sum = rows, sum_on_ranks
        self._ahead = Ahead(self._read, self.steps, depth=2, behind=STEPS_AHEAD)
        self._counts: OrderedDict[int, Counts] = OrderedDict()

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`.

        Raises:
            DataError: a row cannot be used.
        """
        step = self._ahead.get(self._checked(index))
        size = self.layout.micro_batch
        starts = range(0, len(step.sequences), size)
        turns = [step.sequences[at : at + size] for at in starts]
        return self.layout.step(turns, lambda: step.longest)

    def num_loss_tokens(self, index: int) -> int:
        """See `Batches`.

        Raises:
            DataError: a row cannot be used, or no row of the step holds anything to learn.
        """
        return self._sums(index).num_loss_tokens

    def real_tokens(self, index: int) -> int:
        """See `Batches`; raises what `num_loss_tokens` does."""
        return self._sums(index).tokens

    def global_origins(self, index: int) -> tuple[str, ...]:
        """See `Batches`; here also rows of which nothing was left."""
        self._checked(index)
        return self._rows.origins(self._numbers(index, np.arange(self.global_batch)))

    def fingerprint(self) -> str:
        """See `Batches`."""
        return key_of(
            self._rows.fingerprint(),
            self.schedule.record(len(self._rows.sizes)),
            False,
            self.layout.max_length,
        )

    def _numbers(self, index: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records at places of a step, without those beyond the end of the run."""
        positions = index * self.global_batch + places
        return self._order.items(positions[positions < self._total])

    def _read(self, index: int) -> _Step:
        places = self._places().ravel()
        numbers = self._numbers(index, places)
        sequences, counts = first_parts(*self._rows.encode(numbers))
        # Positions beyond the end of the run are the last ones of the last step.
        sequences += [[] for _ in range(len(places) - len(numbers))]
        return _Step(sequences, counts, self._longest(index, places, sequences))

    def _longest(
        self, index: int, places: NDArray[np.int64], mine: Sequence[Sequence[Tokens]]
    ) -> int:
        theirs: list[list[Tokens]] = []
        if self.layout.agrees:
            others = np.setdiff1d(np.arange(self.global_batch), places)
            theirs, _ = first_parts(*self._rows.encode(self._numbers(index, others)))
        return max(map(tokens_of, [*mine, *theirs]))

    def _sums(self, index: int) -> Counts:
        """The counts of a step over all ranks."""
        self._checked(index)
        if index not in self._counts:
            mine = self._ahead.get(index).counts
            sums = self._sum([float(getattr(mine, name)) for name in _COUNTED])
            counted: dict[str, Any] = dict(zip(_COUNTED, map(round, sums), strict=True))
            counts = Counts(**counted)
            if not counts.num_loss_tokens:
                raise _nothing_to_learn(index, self.global_origins(index))
            self._rows.counts += counts
            self._counts[index] = counts
            if len(self._counts) > _KEPT_STEPS:
                self._counts.popitem(last=False)
        return self._counts[index]


@dataclass(frozen=True, slots=True)
class _Block:
    """The sequences of each step of a block, over all ranks; and what became of its records."""

    steps: list[list[list[Tokens]]]
    counts: Counts
    left_out: int


class PackedStream(Batches):
    """Training batches with packing; see `Batches`. Ranks need not speak with each other."""

    def __init__(self, rows: StreamedRows, schedule: Schedule, layout: Layout) -> None:
        super().__init__(schedule, layout)
        self._rows = rows
        self._order = _order(rows, schedule)
        self._block_steps = -(-_BLOCK_SEQUENCES // self.global_batch)
        self._records = self._records_per_block()
        per_step = self._records / self._block_steps
        self._total = None
        if schedule.steps is None:
            self._total = max(1, self._order.end(schedule.epochs))
        self.steps = schedule.steps or math.ceil((self._total or 1) / per_step)
        self.sequences_per_epoch = float(self._order.per_epoch) / per_step * self.global_batch
        blocks = -(-self.steps // self._block_steps)
        self._ahead = Ahead(self._read, blocks, depth=1, behind=STEPS_AHEAD)
        self._counted = -1

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`.

        Raises:
            DataError: a row cannot be used, or no row of the step holds anything to learn.
        """
        sequences = self._sequences(index)
        turns = [[sequences[at] for at in turn] for turn in self._places()]
        # Later packs are not known yet, and one that is full is as long as may be.
        return self.layout.step(turns, lambda: self.layout.max_length)

    def num_loss_tokens(self, index: int) -> int:
        """See `Batches`."""
        sequences = self._sequences(index)
        self._count(index // self._block_steps)
        return sum(int(each.loss_mask.sum()) for sequence in sequences for each in sequence)

    def real_tokens(self, index: int) -> int:
        """See `Batches`."""
        return sum(len(each.ids) for sequence in self._sequences(index) for each in sequence)

    def global_origins(self, index: int) -> tuple[str, ...]:
        """See `Batches`."""
        return tuple(each.origin for sequence in self._sequences(index) for each in sequence)

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        done = (index + 1) * self._records / self._block_steps
        return (done if self._total is None else min(done, self._total)) / float(
            self._order.per_epoch
        )

    def fingerprint(self) -> str:
        """See `Batches`."""
        return key_of(
            self._rows.fingerprint(),
            self.schedule.record(len(self._rows.sizes)),
            self._records,
            self.layout.max_length,
        )

    def _records_per_block(self) -> int:
        """Records whose tokens, with two standard deviations, fill the sequences of a block."""
        numbers = self._order.sample(_SAMPLE)
        documents, _ = self._rows.encode(numbers)
        lengths = [sum(len(each.ids) for each in parts) for parts in documents]
        mean, deviation = float(np.mean(lengths)), float(np.std(lengths))
        if not mean:
            raise DataError(
                f"none of {len(numbers)} rows, drawn from all, holds anything to learn; "
                "see data.max_length and the columns of data.train"
            )
        room = _FILL * self._block_steps * self.global_batch * self.layout.max_length
        root = (math.sqrt(deviation**2 + mean * room) - deviation) / mean
        return max(1, int(root**2))

    def _read(self, number: int) -> _Block:
        first = number * self._records
        positions = np.arange(first, first + self._records)
        if self._total is not None:
            positions = positions[positions < self._total]
        steps = min(self._block_steps, self.steps - number * self._block_steps)
        # Of the last block only the records that its steps are there for.
        positions = positions[: math.ceil(self._records * steps / self._block_steps)]
        documents, counts = self._rows.encode(self._order.items(positions))
        flat = [each for parts in documents for each in parts]
        lengths = np.array([len(each.ids) for each in flat], dtype=np.int64)
        packs = pack(lengths, self.layout.max_length, np.arange(len(flat)))
        # What cannot be placed is the emptiest packs.
        ranked = np.argsort(-packs.sums(lengths), kind="stable")
        kept = ranked[: steps * self.global_batch]
        kept = kept[permutation(len(kept), self.schedule.seed, number, BLOCKS)]
        sequences: list[list[list[Tokens]]] = [[] for _ in range(steps)]
        for place, index in enumerate(kept.tolist()):
            documents_of = [flat[row] for row in packs.group(index).tolist()]
            sequences[place % steps].append(documents_of)
        for step in sequences:
            step += [[] for _ in range(self.global_batch - len(step))]
        left_out = sum(len(packs.group(index)) for index in ranked[len(kept) :].tolist())
        return _Block(sequences, counts, left_out)

    def _sequences(self, index: int) -> list[list[Tokens]]:
        number, place = divmod(self._checked(index), self._block_steps)
        block = self._ahead.get(number)
        if not any(block.steps[place]):
            raise _nothing_to_learn(index, ())
        return block.steps[place]

    def _count(self, number: int) -> None:
        """Count what became of a block's rows, once; not of one that was read ahead alone."""
        if number > self._counted:
            block = self._ahead.get(number)
            self._counted = number
            self._rows.counts += block.counts
            self._rows.left_out += block.left_out


def _order(rows: StreamedRows, schedule: Schedule) -> Order | BlockOrder:
    if rows.blocks is not None:
        return BlockOrder(rows.blocks, schedule.seed, shuffle=schedule.shuffle)
    weights = schedule.weights_of(len(rows.sizes))
    return Order(rows.sizes, weights, schedule.seed, shuffle=schedule.shuffle)


def _nothing_to_learn(index: int, origins: tuple[str, ...]) -> DataError:
    rows = f" ({', '.join(origins[:4])}, ...)" if origins else ""
    return DataError(
        f"step {index + 1}: none of its rows{rows} holds anything to learn within "
        "data.max_length; raise it or train.global_batch_size, or leave such rows out"
    )
