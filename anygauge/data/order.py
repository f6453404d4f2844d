"""The order of the items: a pure function of seed and global position, never of ranks.

Since nothing else enters, a position in a run is one number, and a run resumes on any number of
ranks. Keys come straight from the bit generator, whose stream numpy promises never to change;
the stream of `Generator.permutation` may change with numpy's version.

Up to `ARRAY_LIMIT` items a permutation is an array, sorted by random keys. Beyond, it is a Feistel
network over the next power of four, walked until it lands below n: a bijection that is worked out
for one position alone, so that the order of a billion rows takes no memory and no time to make.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from anygauge.interface import DataError

ARRAY_LIMIT = 2**20
"""From so many items on, no array is made; part of the order, so it must not change."""

# SeedSequence pads with zeros, so a purpose must not be 0 to differ from none.
SPLIT = 1
PACKING = 2
PASS = 3
GROUPS = 4
BLOCKS = 5

_ROUNDS = 8
_KEPT_EPOCHS = 4


class Shuffle:
    """A permutation of range(n), asked for by position.

    Args:
        n: items.
        entropy: what the permutation is a function of, besides n: seed, epoch, purpose, ...
    """

    def __init__(self, n: int, *entropy: int) -> None:
        self.n = n
        bits = np.random.PCG64(np.random.SeedSequence(entropy))
        self._order: NDArray[np.int64] | None = None
        if n < ARRAY_LIMIT:
            keys = bits.random_raw(n)
            self._order = np.argsort(keys, kind="stable").astype(np.int64)
        else:
            self._half = -(-(n - 1).bit_length() // 2)
            self._keys = bits.random_raw(_ROUNDS)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at positions from 0 to n - 1; int64 of the same shape."""
        if self._order is not None:
            return self._order[positions]
        items = self._network(positions.astype(np.uint64))
        beyond = np.flatnonzero(items >= self.n)
        while len(beyond):
            items[beyond] = self._network(items[beyond])
            beyond = beyond[items[beyond] >= self.n]
        return items.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014): every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def packing_order(n: int, seed: int, group: int = 0) -> NDArray[np.int64]:
    """The permutation of range(n), shape (n,), in which packing takes rows of equal length."""
    purpose = (seed, 0, PACKING, group) if group else (seed, 0, PACKING)
    return Shuffle(n, *purpose).at(np.arange(n))


class Split:
    """Which records of a source are held out; both parts are in the records' own order.

    Args:
        n: records of the source.
        fraction: share to hold out, from 0 to below 1; above 0 it takes at least one record.
        seed: decides which.
        source: number of the source among the training sources.

    Attributes:
        held_out: int64 of shape (held out,), rising.

    Raises:
        DataError: too few records for both parts.
    """

    def __init__(self, n: int, fraction: float, seed: int, source: int = 0) -> None:
        if fraction and n < 2:
            raise DataError(
                f"data.eval_fraction {fraction} cannot be taken of {n} row(s): both parts need "
                "one; give more rows, or a file in data.eval"
            )
        count = min(n - 1, max(1, round(n * fraction))) if fraction else 0
        purpose = (seed, 0, SPLIT, source) if source else (seed, 0, SPLIT)
        places = np.arange(count)
        held_out = Shuffle(n, *purpose).at(places) if count else places
        self.n = n
        self.held_out: NDArray[np.int64] = np.sort(held_out)
        # How many kept records stand before each that is held out.
        self._kept_before = self.held_out - places

    @property
    def kept_count(self) -> int:
        """Records that are not held out."""
        return self.n - len(self.held_out)

    def kept(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records that kept ones, numbered from 0, are; int64 of the same shape."""
        return numbers + np.searchsorted(self._kept_before, numbers, side="right")


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of an epoch's list: whole passes over a source, or part of one pass."""

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
        self._epochs: OrderedDict[int, tuple[list[_Segment], Shuffle | None]] = OrderedDict()
        self._passes: OrderedDict[tuple[int, int], Shuffle] = OrderedDict()

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
        if epoch not in self._epochs:
            segments, length = self._segments(epoch)
            whole = Shuffle(length, self.seed, epoch) if self.shuffle else None
            self._epochs[epoch] = segments, whole
            if len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        segments, shuffle = self._epochs[epoch]
        if shuffle is not None:
            places = shuffle.at(places)
        starts = np.array([segment.start for segment in segments])
        which = np.searchsorted(starts, places, side="right") - 1
        items = np.empty(len(places), dtype=np.int64)
        for number in np.unique(which):
            segment, here = segments[number], which == number
            inside = places[here] - segment.start
            if segment.part_of is None:
                inside %= self.sizes[segment.source]
            else:
                inside += segment.place
                if self.shuffle:
                    inside = self._pass(segment.source, segment.part_of).at(inside)
            items[here] = self._offsets[segment.source] + inside
        return items

    def _segments(self, epoch: int) -> tuple[list[_Segment], int]:
        """What an epoch reads before it is shuffled, and how many items that is."""
        segments: list[_Segment] = []
        length = 0
        for source, size in enumerate(self.sizes):
            at, end = (self._read(source, Fraction(count)) for count in (epoch, epoch + 1))
            while at < end:
                number, place = divmod(at, size)
                if place or end - at < size:
                    count = min(end - at, size - place)
                    segments.append(_Segment(length, source, number, place))
                else:
                    count = (end - at) // size * size
                    segments.append(_Segment(length, source, None, 0))
                at += count
                length += count
        return segments, length

    def _pass(self, source: int, number: int) -> Shuffle:
        key = source, number
        if key not in self._passes:
            self._passes[key] = Shuffle(self.sizes[source], self.seed, number, PASS, source)
            if len(self._passes) > 2 * len(self.sizes) + 2:
                self._passes.popitem(last=False)
        return self._passes[key]
