"""Packs rows into sequences of one capacity: best fit, longest rows first.

Rows are packed once, over the whole set, and whole packs are shuffled in each epoch. This gives
the highest fill and the same number of packs in every epoch, so that a position stays one number.
What is given up: rows that share a pack stay together in all epochs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from anygauge.interface import DataError


def pack(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Groups of row numbers: each row in exactly one, none above the capacity in tokens.

    Takes O(n log n) and is a function of its arguments alone.

    Args:
        lengths: tokens of each row, each from 1 to the capacity.
        capacity: most tokens in a pack.
        order: a permutation of the row numbers; breaks ties between rows of equal length.

    Raises:
        DataError: a row is longer than the capacity.
    """
    packs: list[list[int]] = []
    # Open packs by the room they have left; `rooms` holds the keys in rising order.
    open_packs: dict[int, list[int]] = {}
    rooms: list[int] = []
    for row in sorted((int(row) for row in order), key=lambda row: -int(lengths[row])):
        length = int(lengths[row])
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
    return packs


def fill(lengths: Sequence[int], capacity: int, packs: Sequence[Sequence[int]]) -> float:
    """Share of the packs' room that holds tokens, from 0 to 1."""
    used = sum(int(lengths[row]) for group in packs for row in group)
    return used / (capacity * len(packs)) if packs else 0.0
