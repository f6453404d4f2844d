"""The batches of rows that were tokenised before the run: packs, training, evaluation, padding.

Rows are packed best fit, longest first, once over the whole set, and whole packs are shuffled in
each epoch. This gives the highest fill and the same number of packs in every epoch, so that a
position stays one number. What is given up: rows that share a pack stay together in all epochs.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from anygauge.data.batches import STEPS_AHEAD, Layout, MicroBatch, OrderedBatches, Schedule
from anygauge.data.cache import key_of
from anygauge.data.order import DUMMY, GroupedOrder, Order, packing_order
from anygauge.data.rows import TokenizedRows, Tokens
from anygauge.interface import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Sequences as stretches of one list of row numbers.

    Attributes:
        rows: of all groups, one after another; int64 of shape (rows,).
        starts: where each group begins, and the end of the last; int64 of shape (groups + 1,).
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def group(self, index: int) -> NDArray[np.int64]:
        """The rows of one group; int64 of shape (n,)."""
        return self.rows[self.starts[index] : self.starts[index + 1]]

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each group, the sum of a value of its rows; int64 of shape (groups,)."""
        ends = np.concatenate([[0], np.cumsum(values[self.rows])])
        return ends[self.starts[1:]] - ends[self.starts[:-1]]

    @staticmethod
    def of(groups: Sequence[Sequence[int]]) -> Groups:
        """From a list of lists."""
        starts = np.zeros(len(groups) + 1, dtype=np.int64)
        np.cumsum([len(group) for group in groups], out=starts[1:])
        rows = np.fromiter((row for group in groups for row in group), np.int64, int(starts[-1]))
        return Groups(rows, starts)

    @staticmethod
    def joined(parts: Sequence[Groups]) -> Groups:
        """Groups one after another."""
        before = np.cumsum([0, *(len(part.rows) for part in parts)])
        starts = [part.starts[:-1] + at for part, at in zip(parts, before[:-1], strict=True)]
        return Groups(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([*starts, before[-1:]]).astype(np.int64),
        )


def pack(lengths: NDArray[np.int64], capacity: int, order: NDArray[np.int64]) -> Groups:
    """Groups of row numbers: each row in exactly one, none above the capacity in tokens.

    Takes O(n log n) and is a function of its arguments alone.

    Args:
        lengths: tokens of each row, each from 1 to the capacity; int64 of shape (rows,).
        capacity: most tokens in a pack.
        order: the row numbers to pack, each once; breaks ties between rows of equal length.

    Raises:
        DataError: a row is longer than the capacity.
    """
    packs: list[list[int]] = []
    # Open packs by the room they have left; `rooms` holds the keys in rising order.
    open_packs: dict[int, list[int]] = {}
    rooms: list[int] = []
    ranked = order[np.argsort(-lengths[order], kind="stable")]
    for row, length in zip(ranked.tolist(), lengths[ranked].tolist(), strict=True):
        if length > capacity:
            raise DataError(f"row {row} has {length} tokens, a pack holds {capacity}")
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, number = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[at]
            number = open_packs[room].pop()
            if not open_packs[room]:
                del open_packs[room]
                rooms.pop(at)
        packs[number].append(row)
        left = room - length
        if left:
            if left not in open_packs:
                open_packs[left] = []
                bisect.insort(rooms, left)
            open_packs[left].append(number)
    return Groups.of(packs)


class _Sequences:
    """What an epoch is made of: each a row or a pack of rows; and how they become tensors.

    Only rows of the same weight share a pack, so that every row is read as often as its weight
    says.

    Attributes:
        sizes: sequences of each weight, one after another.
        weights: of the sequences of each size.
        tokens: of each sequence; int64 of shape (sequences,).
        num_loss_tokens: loss tokens of each; int64 of shape (sequences,).
    """

    def __init__(
        self, rows: TokenizedRows, weights: Sequence[float], layout: Layout, seed: int
    ) -> None:
        longest = int(rows.lengths.max(initial=0))
        if longest > layout.max_length:
            raise DataError(
                f"a row has {longest} tokens, a sequence holds {layout.max_length}: "
                "the rows were tokenised with another maximum length"
            )
        self.rows, self.layout = rows, layout
        self._packs: Groups | None = None
        if layout.packing:
            self.weights = list(dict.fromkeys(weights))
            packs = self._packed(weights, seed)
            self.sizes = [len(part) for part in packs]
            self._packs = Groups.joined(packs)
            self.tokens = self._packs.sums(rows.lengths)
            self.num_loss_tokens = self._packs.sums(rows.loss_token_counts)
        else:
            self.weights, self.sizes = list(weights), rows.sizes
            self.tokens, self.num_loss_tokens = rows.lengths, rows.loss_token_counts

    def __len__(self) -> int:
        return len(self.tokens)

    def _packed(self, weights: Sequence[float], seed: int) -> list[Groups]:
        of_row = np.repeat(np.asarray(weights), self.rows.sizes)
        packs = []
        for number, weight in enumerate(self.weights):
            members = np.flatnonzero(of_row == weight)
            order = members[packing_order(len(members), seed, number)]
            packs.append(pack(self.rows.lengths, self.layout.max_length, order))
        return packs

    def members(self, sequence: int) -> list[int]:
        """The rows of a sequence."""
        return [sequence] if self._packs is None else self._packs.group(sequence).tolist()

    def documents(self, sequences: Sequence[int]) -> list[list[Tokens]]:
        """What sequences hold; `DUMMY` stands for one that holds nothing."""
        return [
            [] if each == DUMMY else [self.rows.tokens(row) for row in self.members(each)]
            for each in sequences
        ]

    def longest(self, sequences: NDArray[np.int64]) -> int:
        """Tokens of the longest of some, int64 of shape (n,); of packs, of the longest of all.

        Packs are as full as they can be: nearly all have one width, and then all may.
        """
        of = self.tokens if self.layout.packing else self.tokens[sequences[sequences != DUMMY]]
        return int(of.max(initial=1))


_KEPT_STEPS = 2 * STEPS_AHEAD + 2
"""Those that were laid out ahead, and those whose metrics are still to come."""

_STEPS_AT_ONCE = 1024
"""Steps whose lengths are looked at together: numpy takes as long for one as for some."""


class RowBatches(OrderedBatches):
    """Training batches of rows that are there; see `Batches`."""

    def __init__(self, rows: TokenizedRows, schedule: Schedule, layout: Layout) -> None:
        weights = schedule.weights_of(len(rows.pieces))
        self._sequences = sequences = _Sequences(rows, weights, layout, schedule.seed)
        order = Order(sequences.sizes, sequences.weights, schedule.seed, shuffle=schedule.shuffle)
        super().__init__(schedule, layout, order)
        self._grouped: GroupedOrder | None = None
        if schedule.grouping:
            # A run that ends with an epoch reads no row of the next one.
            stop = None if schedule.steps else max(1, self._order.end(math.ceil(schedule.epochs)))
            self._grouped = GroupedOrder(order, self._sequences.tokens, self.global_batch, stop)
        self._recent: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`."""
        items = self._items(index)[self._places()]
        documents = [self._sequences.documents(turn.tolist()) for turn in items]
        return self.layout.step(documents, lambda: self.longest(index))

    def longest(self, index: int) -> int:
        """Tokens of the longest sequence of a step over all ranks; with packing, of all steps."""
        return self._sequences.longest(self._items(index))

    def widths(self, start: int) -> list[int]:
        """See `Batches`; looks at the lengths of all rows that are left."""
        if not self.layout.agrees:
            return []
        if self.layout.packing:
            return self.layout.each_width([int(self._sequences.tokens.max(initial=1))])
        together = self.layout.micro_batch if self.layout.alone else self.global_batch
        longest: set[int] = set()
        for first in range(start, self.steps, _STEPS_AT_ONCE):
            with self._lock:
                items = self._find(first, min(first + _STEPS_AT_ONCE, self.steps))
            tokens = np.where(items == DUMMY, 0, self._sequences.tokens[items])
            longest |= set(tokens.reshape(-1, together).max(axis=1).tolist())
        return self.layout.each_width(longest - {0})

    def num_loss_tokens(self, index: int) -> int:
        """See `Batches`; needs no communication."""
        return int(self._sequences.num_loss_tokens[self._real(index)].sum())

    def real_tokens(self, index: int) -> int:
        """See `Batches`; needs no communication."""
        return int(self._sequences.tokens[self._real(index)].sum())

    def sequence_tokens(self, index: int) -> NDArray[np.int64]:
        """Tokens of each sequence of a step, 0 for a dummy; int64 of shape (global_batch,)."""
        items = self._items(index)
        return np.where(items == DUMMY, 0, self._sequences.tokens[items])

    def global_origins(self, index: int) -> tuple[str, ...]:
        """See `Batches`."""
        return tuple(
            self._sequences.rows.origin(row)
            for item in self._real(index).tolist()
            for row in self._sequences.members(item)
        )

    def fingerprint(self) -> str:
        """See `Batches`."""
        rows = self._sequences.rows
        return key_of(
            "rows",
            rows.fingerprint(),
            self.schedule.record(len(rows.pieces)),
            self.layout.kind,
            self.layout.max_length,
        )

    def _real(self, index: int) -> NDArray[np.int64]:
        items = self._items(index)
        return items[items != DUMMY]

    def _items(self, index: int) -> NDArray[np.int64]:
        """The sequences of a step over all ranks; int64 of shape (global_batch,)."""
        self._checked(index)
        with self._lock:
            if index not in self._recent:
                self._recent[index] = self._find(index, index + 1)[0]
                if len(self._recent) > _KEPT_STEPS:
                    self._recent.popitem(last=False)
            return self._recent[index]

    def _find(self, first: int, end: int) -> NDArray[np.int64]:
        """The sequences of some steps over all ranks; int64 of shape (steps, global_batch)."""
        if self._grouped is not None:
            return np.stack([self._grouped.step(index) for index in range(first, end)])
        positions = np.arange(first * self.global_batch, end * self.global_batch)
        real = positions < self._total
        items = np.full(len(positions), DUMMY, dtype=np.int64)
        items[real] = self._order.items(positions[real])
        return items.reshape(-1, self.global_batch)


class EvaluationBatches(Sequence[MicroBatch]):
    """The evaluation micro-batches of one rank; each is laid out when it is asked for.

    All rows once, in their own order, divided over ranks; every rank has as many batches. Missing
    sequences at the end are dummies, so summed loss over summed `num_loss_tokens` is the same
    for every number of ranks and size of micro-batch.
    """

    def __init__(self, rows: TokenizedRows, layout: Layout) -> None:
        self._sequences = _Sequences(rows, (1.0,) * len(rows.pieces), layout, seed=0)
        self._layout = layout

    def __len__(self) -> int:
        return -(-len(self._sequences) // (self._layout.micro_batch * self._layout.share.count))

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        size, share = self._layout.micro_batch, self._layout.share
        first = index % len(self) * share.count * size
        of_all = np.arange(first, first + share.count * size)
        of_all[of_all >= len(self._sequences)] = DUMMY
        mine = of_all[share.index * size : (share.index + 1) * size]
        documents = self._sequences.documents(mine.tolist())
        if not self._layout.agrees:
            return self._layout.batch(documents)
        (batch,) = self._layout.step([documents], lambda: self._sequences.longest(of_all))
        return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """One epoch in one layout.

    Attributes:
        sequences: rows, or packs of them, over the epoch.
        steps: optimizer steps of the epoch.
        tokens: real tokens of the epoch.
        positions: tokens with padding: what the model computes over.
        fill: share of the packs' room that holds tokens; None where nothing is packed.
    """

    sequences: int
    steps: int
    tokens: int
    positions: int
    fill: float | None

    @property
    def share(self) -> float:
        """Share of the positions that is padding, from 0 to 1."""
        return 1 - self.tokens / self.positions


def measure(rows: TokenizedRows, schedule: Schedule, layout: Layout) -> Padding:
    """Lay out one epoch without making a tensor.

    Raises:
        RunFileError: global_batch is not a multiple of micro_batch times the number of ranks.
    """
    batches = RowBatches(rows, replace(schedule, epochs=1.0, steps=None), layout)
    tokens = positions = sequences = 0
    for index in range(batches.steps):
        lengths = batches.sequence_tokens(index).reshape(-1, layout.micro_batch)
        longest = lengths.max(axis=1).tolist()
        if layout.agrees:
            widths = layout.widths(longest, functools.partial(batches.longest, index))
        else:
            widths = [layout.shapes.padded_length(max(1, n), layout.max_length) for n in longest]
        tokens += int(lengths.sum())
        positions += sum(widths) * layout.micro_batch
        sequences += int(np.count_nonzero(lengths))
    return Padding(
        sequences=sequences,
        steps=batches.steps,
        tokens=tokens,
        positions=positions,
        fill=tokens / (sequences * layout.max_length) if layout.packing else None,
    )
