"""The order of the items: a pure function of seed and global position, never of ranks.

Since nothing else enters, a position in a run is one number, and a run resumes on any number of
ranks. Keys come straight from the bit generator, whose stream numpy promises never to change;
the stream of `Generator.permutation` may change with numpy's version.

`GroupedOrder` puts sequences of like length in one step, so that little is padding: the shuffled
positions of an epoch are cut into blocks of `BLOCK_STEPS` steps; a block is sorted by length and
cut into steps, whose order is shuffled again. A step's rows are random but for their length, and
any step is found without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from anygauge.interface import DataError

# SeedSequence pads with zeros, so a purpose must not be 0 to differ from none.
SPLIT = 1
PACKING = 2
PASS = 3
GROUPS = 4
BLOCKS = 5
STREAM = 6


def permutation(n: int, *entropy: int) -> NDArray[np.int64]:
    """A permutation of range(n), shape (n,): the order of n random keys.

    Args:
        entropy: what it is a function of, in addition to n: seed, epoch, purpose, ...
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def packing_order(n: int, seed: int, group: int = 0) -> NDArray[np.int64]:
    """The permutation of range(n), shape (n,), in which packing takes rows of equal length."""
    purpose = (seed, 0, PACKING, group) if group else (seed, 0, PACKING)
    return permutation(n, *purpose)


class Split:
    """Which records of a source are held out; both parts are in the records' own order.

    Args:
        n: records of the source.
        fraction: share to hold out, from 0 to below 1; above 0 it takes at least one record.
        seed: decides which.
        source: number of the source among the training sources.

    Attributes:
        held_out: int64 of shape (held out,), rising.
        kept: the others, likewise.

    Raises:
        DataError: too few records for both parts.
    """

    def __init__(self, n: int, fraction: float, seed: int, source: int = 0) -> None:
        if fraction and n < 2:
            raise DataError(
                f"data.eval_fraction: {fraction} cannot be held out of {n} row(s), since training "
                "and evaluation need at least one each; give more rows, or a file in data.eval"
            )
        count = min(n - 1, max(1, round(n * fraction))) if fraction else 0
        purpose = (seed, 0, SPLIT, source) if source else (seed, 0, SPLIT)
        drawn = permutation(n, *purpose)[:count] if count else np.empty(0, dtype=np.int64)
        self.held_out: NDArray[np.int64] = np.sort(drawn)
        self.kept: NDArray[np.int64] = np.setdiff1d(np.arange(n), self.held_out, True)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of an epoch's list: a pass over a source, or part of one."""

    start: int
    source: int
    part_of: int | None  # the number of the pass
    place: int


class Order:
    """The items of all sources over a whole run, one epoch after another.

    A source is read in passes. Of weight 1, each epoch is one pass; of weight 0.5, two epochs make
    one, each having another half; of weight 2.5, an epoch is two passes and a half. So after
    enough epochs every item was read exactly weight times as often as there were epochs.

    Args:
        sizes: items of each source; their numbers follow one another.
        weights: times that the items of each source are read in an epoch.
        shuffle: a new permutation each epoch; otherwise source after source, in their own order.

    Raises:
        DataError: there is no item.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True
    ) -> None:
        if not sum(sizes):
            raise DataError("there is no row to put in order")
        self.sizes = [int(size) for size in sizes]
        # repr: a weight of 0.1 means a tenth, not the binary number next to it.
        self.weights = [Fraction(repr(float(weight))) for weight in weights]
        self.seed, self.shuffle = seed, shuffle
        self.per_epoch: Fraction = sum(
            (size * weight for size, weight in zip(self.sizes, self.weights, strict=True)),
            Fraction(0),
        )
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        # A step may begin in one epoch and end in the next.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._pass = lru_cache(maxsize=2 * len(self.sizes) + 2)(self._make_pass)

    def end(self, epochs: float | Fraction) -> int:
        """Items of so many epochs from the start of the run; need not be whole epochs."""
        count = Fraction(repr(epochs)) if isinstance(epochs, float) else Fraction(epochs)
        return sum(self._read(source, count) for source in range(len(self.sizes)))

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that a position belongs to."""
        epoch = int(position / self.per_epoch)
        while position >= self.end(epoch + 1):
            epoch += 1
        while position < self.end(epoch):
            epoch -= 1
        return epoch

    def items(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at global positions, in any order; int64 of the same shape (n,)."""
        items = np.empty(len(positions), dtype=np.int64)
        todo = np.arange(len(positions))
        while len(todo):
            epoch = self.epoch(int(positions[todo].min()))
            here = positions[todo] < self.end(epoch + 1)
            at = todo[here]
            items[at] = self._of_epoch(epoch, positions[at] - self.end(epoch))
            todo = todo[~here]
        return items

    def _read(self, source: int, epochs: Fraction) -> int:
        """Items of one source that are read in the first epochs."""
        return round(self.sizes[source] * self.weights[source] * epochs)

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        segments, shuffled = self._epoch(epoch)
        if shuffled is not None:
            places = shuffled[places]
        starts = np.array([segment.start for segment in segments])
        which = np.searchsorted(starts, places, side="right") - 1
        items = np.empty(len(places), dtype=np.int64)
        for number in np.unique(which):
            segment, here = segments[number], which == number
            inside = places[here] - segment.start + segment.place
            if segment.part_of is not None and self.shuffle:
                inside = self._pass(segment.source, segment.part_of)[inside]
            items[here] = self._offsets[segment.source] + inside
        return items

    def _make_epoch(self, epoch: int) -> tuple[list[_Segment], NDArray[np.int64] | None]:
        """What an epoch reads, and how that is shuffled."""
        segments: list[_Segment] = []
        length = 0
        for source, size in enumerate(self.sizes):
            at, end = (self._read(source, Fraction(count)) for count in (epoch, epoch + 1))
            while at < end:
                number, place = divmod(at, size)
                count = min(end - at, size - place)
                segments.append(_Segment(length, source, None if count == size else number, place))
                at += count
                length += count
        return segments, permutation(length, self.seed, epoch) if self.shuffle else None

    def _make_pass(self, source: int, number: int) -> NDArray[np.int64]:
        return permutation(self.sizes[source], self.seed, number, PASS, source)


BLOCK_STEPS = 50
DUMMY = -1


class GroupedOrder:
    """Which sequences stand in which step.

    Within a step, longer sequences come first: micro-batches, and the ranks that work on theirs at
    the same time, hold neighbours. The step with the longest sequence is the first of the run, so
    that a lack of memory shows at once.

    Args:
        order: the order before grouping.
        lengths: tokens of each item; int64 of shape (items,).
        stop: positions from here on are dummies; None where the run has no such end.
    """

    def __init__(
        self, order: Order, lengths: NDArray[np.int64], global_batch: int, stop: int | None
    ) -> None:
        self._order, self._lengths, self._batch, self._stop = order, lengths, global_batch, stop
        self._sorted = lru_cache(maxsize=2)(self._sort)
        self._longest = 0
        self._longest = self._find_longest()

    def step(self, index: int) -> NDArray[np.int64]:
        """The items of a step, `DUMMY` for none; int64 of shape (global_batch,)."""
        if index == 0:
            index = self._longest
        elif index == self._longest:
            index = 0
        first, start, end = self._bounds(index)
        return self._sorted(first, start, end)[index - start]

    def _bounds(self, index: int) -> tuple[int, int, int]:
        """First step of the epoch in which a step begins, and the steps of its block."""
        epoch = self._order.epoch(index * self._batch)
        first = -(-self._order.end(epoch) // self._batch)
        last = -(-self._order.end(epoch + 1) // self._batch)
        start = first + (index - first) // BLOCK_STEPS * BLOCK_STEPS
        return first, start, min(start + BLOCK_STEPS, last)

    def _sort(self, first: int, start: int, end: int) -> NDArray[np.int64]:
        items, lengths = self._members(start, end)
        ranked = items[np.argsort(-lengths, kind="stable")].reshape(-1, self._batch)
        if not self._order.shuffle:
            return ranked
        return ranked[permutation(end - start, self._order.seed, first, GROUPS, start)]

    def _members(self, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start * self._batch, end * self._batch)
        items = self._order.items(positions)
        lengths = self._lengths[items]
        if self._stop is not None:
            items[positions >= self._stop] = DUMMY
            lengths[positions >= self._stop] = 0
        return items, lengths

    def _find_longest(self) -> int:
        """The step of the first epoch that holds the longest sequence."""
        blocks = [
            self._bounds(at) for at in range(0, -(-self._order.end(1) // self._batch), BLOCK_STEPS)
        ]
        first, start, end = max(blocks, key=lambda block: self._members(*block[1:])[1].max())
        # The first row of a step is its longest.
        return start + int(self._lengths[self._sorted(first, start, end)[:, 0]].argmax())
