"""Packs rows into sequences of one capacity: best fit, longest rows first.

Rows are packed once, over the whole set, and whole packs are shuffled in each epoch. This gives
the highest fill and the same number of packs in every epoch, so that a position stays one number.
What is given up: rows that share a pack stay together in all epochs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
