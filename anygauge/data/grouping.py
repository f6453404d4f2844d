"""Sequences of like length in one step, so that little is padding.

The shuffled positions of an epoch are cut into blocks of `BLOCK_STEPS` steps; a block is sorted by
length and cut into steps, whose order is shuffled again. So a step's rows are random but for their
length, and any step is found without the others: still a function of seed and position alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anygauge.data.order import GROUPS, Order, Shuffle

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
        self._at = -1
        self._block: NDArray[np.int64] = np.empty((0, global_batch), dtype=np.int64)
        self._longest = 0
        self._longest = self._find_longest()

    def step(self, index: int) -> NDArray[np.int64]:
        """The items of a step, `DUMMY` for none; int64 of shape (global_batch,)."""
        if index == 0:
            index = self._longest
        elif index == self._longest:
            index = 0
        first, start, end = self._bounds(index)
        if start != self._at:
            self._block, self._at = self._sorted(first, start, end), start
        return self._block[index - start]

    def _bounds(self, index: int) -> tuple[int, int, int]:
        """First step of the epoch in which a step begins, and the steps of its block."""
        epoch = self._order.epoch(index * self._batch)
        first = -(-self._order.end(epoch) // self._batch)
        last = -(-self._order.end(epoch + 1) // self._batch)
        start = first + (index - first) // BLOCK_STEPS * BLOCK_STEPS
        return first, start, min(start + BLOCK_STEPS, last)

    def _sorted(self, first: int, start: int, end: int) -> NDArray[np.int64]:
        items, lengths = self._members(start, end)
        ranked = items[np.argsort(-lengths, kind="stable")].reshape(-1, self._batch)
        shuffle = Shuffle(end - start, self._order.seed, first, GROUPS, start)
        return ranked[shuffle.at(np.arange(end - start))] if self._order.shuffle else ranked

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
        best, found, start = -1, 0, 0
        last = -(-self._order.end(1) // self._batch)
        while start < last:
            first, _, end = self._bounds(start)
            _, lengths = self._members(start, end)
            if int(lengths.max()) > best:
                best = int(lengths.max())
                block = self._sorted(first, start, end)
                real = np.where(block == DUMMY, 0, self._lengths[block])
                found = start + int(real.max(axis=1).argmax())
            start = end
        return found
