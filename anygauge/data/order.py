"""The order of the items: a pure function of seed and global position, never of ranks.

Since nothing else enters, a position in a run is one number, and a run resumes on any number of
ranks. Keys come straight from the bit generator, whose stream numpy promises never to change;
the stream of `Generator.permutation` may change with numpy's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anygauge.interface import DataError

Item = TypeVar("Item")

# SeedSequence pads with zeros, so a purpose must not be 0 to differ from none.
_SPLIT = 1
_PACKING = 2


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(n), int64 of shape (n,): the same on every machine.

    Args:
        seed: at least 0.
        epoch: at least 0; each has its own permutation.
    """
    return _shuffled(n, seed, epoch)


def packing_order(n: int, seed: int) -> NDArray[np.int64]:
    """The permutation of range(n), shape (n,), in which packing takes rows of equal length."""
    return _shuffled(n, seed, 0, _PACKING)


def split(rows: Sequence[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(kept, held out): a random share of the rows, both parts in the rows' own order.

    Args:
        fraction: share to hold out, from 0 to below 1; above 0 it takes at least one row.

    Raises:
        DataError: too few rows for both parts.
    """
    if not fraction:
        return list(rows), []
    n = len(rows)
    if n < 2:
        raise DataError(
            f"data.eval_fraction {fraction} cannot be taken of {n} row(s): both parts need one; "
            "give more rows, or a file in data.eval"
        )
    count = min(n - 1, max(1, round(n * fraction)))
    held_out = set(_shuffled(n, seed, 0, _SPLIT)[:count].tolist())
    return (
        [row for index, row in enumerate(rows) if index not in held_out],
        [row for index, row in enumerate(rows) if index in held_out],
    )


def _shuffled(n: int, *entropy: int) -> NDArray[np.int64]:
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)


class Stream:
    """The items of a whole run, one epoch after another.

    Args:
        n: items per epoch, at least 1.
        total: items of the run; epochs may end in the middle.
        shuffle: a new permutation each epoch; otherwise 0 to n - 1 each time.
    """

    def __init__(self, n: int, seed: int, *, total: int, shuffle: bool = True) -> None:
        if n < 1:
            raise DataError("there is no row to put in order")
        self.n, self.seed, self.total, self.shuffle = n, seed, total, shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.total

    def item(self, position: int) -> int:
        """Which item stands at a global position.

        Raises:
            IndexError: the run has no such position.
        """
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} is not in 0..{self.total - 1}")
        epoch, place = divmod(position, self.n)
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._order, self._epoch = permutation(self.n, self.seed, epoch), epoch
        return int(self._order[place])
