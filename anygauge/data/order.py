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

import math
from collections.abc import Callable, Sequence
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

DUMMY = -1
"""Stands for no item."""


def permutation(n: int, *entropy: int) -> NDArray[np.int64]:
    """A permutation of range(n), shape (n,): the order of n random keys; a function of n and
    `entropy` (seed, epoch, purpose, ...)."""
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def packing_order(n: int, seed: int, group: int = 0) -> NDArray[np.int64]:
    """The permutation of range(n), shape (n,), in which packing takes rows of equal length."""
    purpose = (seed, 0, PACKING, group) if group else (seed, 0, PACKING)
    return permutation(n, *purpose)


def split(
    n: int, fraction: float, seed: int, source: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which records of a source are kept, and which held out, by seed and the source's number;
    int64, each rising, neither empty."""
    if n < 2:
        raise DataError(
            f"data.eval_fraction: {fraction} cannot be held out of {n} row(s), since training "
            "and evaluation need at least one each; give more rows, or a file in data.eval"
        )
    purpose = (seed, 0, SPLIT, source) if source else (seed, 0, SPLIT)
    order, count = permutation(n, *purpose), min(n - 1, max(1, round(n * fraction)))
    return np.sort(order[count:]), np.sort(order[:count])


class Order:
    """The items of all sources over a whole run, one epoch after another.

    A source is read in passes. Of weight 1, each epoch is one pass; of weight 0.5, two epochs make
    one, each having another half; of weight 2.5, an epoch is two passes and a half. So after
    enough epochs every item was read exactly weight times as often as there were epochs.

    Args:
        sizes: items of each source, at least one in all; their numbers follow one another.
        weights: times that the items of each source are read in an epoch.
        shuffle: a new permutation each epoch; otherwise source after source, in their own order.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True
    ) -> None:
        self.sizes = [int(size) for size in sizes]
        # repr: a weight of 0.1 means a tenth, not the binary number next to it.
        self.weights = [Fraction(repr(float(weight))) for weight in weights]
        self.seed, self.shuffle = seed, shuffle
        read = [size * weight for size, weight in zip(self.sizes, self.weights, strict=True)]
        self.per_epoch: Fraction = sum(read, Fraction(0))
        # A step may begin in one epoch and end in the next.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._pass = lru_cache(maxsize=2 * len(self.sizes) + 2)(self._make_pass)

    def end(self, epochs: float) -> int:
        """Items of so many epochs from the start of the run; need not be whole epochs."""
        count = Fraction(repr(epochs))
        return sum(self._items_read(source, count) for source in range(len(self.sizes)))

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that a position belongs to."""
        epoch = int(position / self.per_epoch)
        while position >= self.end(epoch + 1):
            epoch += 1
        while position < self.end(epoch):
            epoch -= 1
        return epoch

    def items(self, positions: NDArray[np.int64], stop: float = math.inf) -> NDArray[np.int64]:
        """The items at global positions, in any order, `DUMMY` from `stop` on; int64 of the same
        shape (n,)."""
        items = np.full(len(positions), DUMMY, dtype=np.int64)
        todo = np.flatnonzero(positions < stop)
        while len(todo):
            epoch = self.epoch(int(positions[todo].min()))
            here = positions[todo] < self.end(epoch + 1)
            at = todo[here]
            items[at] = self._epoch(epoch)[positions[at] - self.end(epoch)]
            todo = todo[~here]
        return items

    def _items_read(self, source: int, epochs: Fraction) -> int:
        """Items of one source that are read in the first epochs."""
        return round(self.sizes[source] * self.weights[source] * epochs)

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        """The items of an epoch in order: passes over the sources, and parts of passes."""
        length = self.end(epoch + 1) - self.end(epoch)
        places = permutation(length, self.seed, epoch) if self.shuffle else slice(None)
        items = np.empty(length, dtype=np.int64)
        first = done = 0
        for source, size in enumerate(self.sizes):
            at, end = (self._items_read(source, Fraction(count)) for count in (epoch, epoch + 1))
            while at < end:
                number, place = divmod(at, size)
                count = min(end - at, size - place)
                # A whole pass is shuffled with the epoch alone.
                in_order = count == size or not self.shuffle
                members = np.arange(size) if in_order else self._pass(source, number)
                np.add(members[place : place + count], first, out=items[done : done + count])
                at += count
                done += count
            first += size
        return items[places]

    def _make_pass(self, source: int, number: int) -> NDArray[np.int64]:
        return permutation(self.sizes[source], self.seed, number, PASS, source)


BLOCK_STEPS = 50


class GroupedOrder:
    """Which sequences stand in which step.

    Within a step, longer sequences come first: micro-batches, and the ranks that work on theirs at
    the same time, hold neighbours. The step with the longest sequence is the first of the run, so
    that a lack of memory shows at once.

    Args:
        order: the order before grouping.
        lengths: tokens of items, 0 for `DUMMY`.
        stop: positions from here on are dummies.
    """

    def __init__(
        self,
        order: Order,
        lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        global_batch: int,
        stop: float,
    ) -> None:
        self._order, self._lengths, self._batch, self._stop = order, lengths, global_batch, stop
        self._sorted = lru_cache(maxsize=2)(self._sort)
        # Of few rows of little weight, the first epoch may have none.
        steps = -(-max(1, order.end(1)) // global_batch)
        blocks = [self._bounds(index) for index in range(0, steps, BLOCK_STEPS)]
        first, start, end = max(blocks, key=lambda one: lengths(self._members(*one[1:])).max())
        # The first row of a step is its longest.
        self._longest = start + int(lengths(self._sorted(first, start, end)[:, 0]).argmax())

    def step(self, index: int) -> NDArray[np.int64]:
        """The items of a step, `DUMMY` for none; int64 of shape (global_batch,)."""
        if index in (0, self._longest):
            index = self._longest - index  # they change places
        first, start, end = self._bounds(index)
        return self._sorted(first, start, end)[index - start]

    def _bounds(self, index: int) -> tuple[int, int, int]:
        """First step of the epoch in which a step begins, and the steps of its block."""
        epoch = self._order.epoch(index * self._batch)
        first = -(-self._order.end(epoch) // self._batch)
        last = -(-self._order.end(epoch + 1) // self._batch)
        start = first + (index - first) // BLOCK_STEPS * BLOCK_STEPS
        return first, start, min(start + BLOCK_STEPS, last)

    def _members(self, start: int, end: int) -> NDArray[np.int64]:
        """The items of some steps before they are grouped."""
        return self._order.items(np.arange(start * self._batch, end * self._batch), self._stop)

    def _sort(self, first: int, start: int, end: int) -> NDArray[np.int64]:
        items = self._members(start, end)
        longest_first = np.argsort(-self._lengths(items), kind="stable")
        ranked = items[longest_first].reshape(-1, self._batch)
        if not self._order.shuffle:
            return ranked
        return ranked[permutation(end - start, self._order.seed, first, GROUPS, start)]
