"""Which rank reads which sequences in which step, and how they become tensors.

A step reads global_batch sequences in the order of `Order` or `GroupedOrder`. Micro-batch `a` of
part `i` of `n` holds those from (a * n + i) * micro_batch on: parts and micro-batches divide a
step, they do not decide what is in it. Which part a rank reads is its strategy's to say.

Rows are packed best fit, longest first, once over the whole set, and whole packs are shuffled in
each epoch. This gives the highest fill and the same number of packs in every epoch, so that a
position stays one number. What is given up: rows that share a pack stay together in all epochs.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import key_of
from anygauge.data.order import DUMMY, GroupedOrder, Order, packing_order
from anygauge.data.rows import TokenizedRows, Tokens
from anygauge.interface import RunFileError, ShapeKind, ShapePolicy, Share

if TYPE_CHECKING:
    import torch

    from anygauge.config.schema import RunFile


Work = TypeVar("Work")
IGNORE_INDEX = -100
"""The label of positions without a loss."""


def accumulation(global_batch: int, micro_batch: int, parts: int) -> int:
    """Micro-batches that each rank reads per step, if its rows can be divided into these parts:
    ranks, or groups of them that read the same. The error names values that can."""
    together = micro_batch * parts
    count, rest = divmod(global_batch, together)
    if not rest and count:
        return count
    ranks = "rank" if parts == 1 else "ranks"
    valid = [str(value) for value in (count * together, (count + 1) * together) if value]
    remedies = [f"train.global_batch_size {' or '.join(valid)}"]
    if global_batch % parts == 0:
        share = global_batch // parts
        divisors = [str(value) for value in range(1, micro_batch) if share % value == 0]
        remedies.append(f"train.micro_batch_size {', '.join(divisors[-3:])}")
    raise RunFileError(
        f"train.global_batch_size {global_batch} is not a multiple of {together} "
        f"(train.micro_batch_size {micro_batch} on {parts} {ranks}); what works: "
        f"{'; or '.join(remedies)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """What one forward reads. Tensors are int64 of shape (sequences, length), on the host.

    Attributes:
        input_ids: sequences are padded on the right.
        shift_labels: the token that each position is to predict; `IGNORE_INDEX`: there is no loss.
        attention_mask: 1 for tokens, 0 for padding.
        position_ids: from 0; packed documents and the padding behind them each begin anew.
        segment_ids: packed: the document's number in its sequence from 1, 0 for padding.
            None where nothing is packed.
        loss_rows: of the labels of the positions that this rank computes, one after another, those
            that have a loss; int64 of shape (n,). None where the number of rows must be the same in
            each batch.
        loss_counts: how many of these rows each sequence has.
        has_padding: whether the mask has a zero.
        origins: where the rows came from; dummies have none.
        num_loss_tokens: labels that count.
        tokens: real tokens, without padding and dummies.
    """

    input_ids: torch.Tensor
    shift_labels: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor | None = None
    loss_rows: torch.Tensor | None = None
    loss_counts: tuple[int, ...] = ()
    has_padding: bool
    origins: tuple[str, ...]
    num_loss_tokens: int
    tokens: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Map names to tensors, to move them to a device; `segment_ids` only where packed."""
        names = ("input_ids", "shift_labels", "attention_mask", "position_ids", "segment_ids")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How sequences become the tensors of one rank.

    Attributes:
        micro_batch: sequences per forward on one rank; of pairs, so many pairs.
        max_length: most tokens of a sequence; with packing, the capacity of a pack.
        pad_id: token number that fills up; never a loss token, never attended to.
        packing: whether a sequence holds several rows, of which none attends to another; or
            ``concatenate``: these do.
        pairs: whether a sequence holds two answers to one prompt; each gets a row of its own.
        pin: puts a tensor where the device copies from without waiting; a thread may call it.
    """

    micro_batch: int
    max_length: int
    pad_id: int
    share: Share = field(default_factory=lambda: Share(0, 1))
    packing: bool | str = False
    pairs: bool = False
    shapes: ShapePolicy = field(default_factory=ShapePolicy)
    pin: Callable[[Any], Any] = lambda tensor: tensor

    @classmethod
    def of(
        cls, run: RunFile, share: Share, pad_id: int, shapes: ShapePolicy, **more: Any
    ) -> Layout:
        """Return the layout of a run."""
        return cls(
            micro_batch=run.train.sequences_at_once(share.count),
            max_length=run.data.max_length,
            pad_id=pad_id,
            share=share,
            packing=run.data.isolates or run.data.packing,
            pairs=run.objective_spec.pairs,
            shapes=shapes,
            **more,
        )

    @property
    def has_one_width(self) -> bool:
        """Whether all ranks of a step, or of a round of evaluation, have one width: where shapes
        are compiled, all would wait for a rank with one of its own. A static one is agreed on."""
        return self.shapes.kind is ShapeKind.BUCKETED

    @property
    def may_vary_width(self) -> bool:
        """Whether a micro-batch with rows may have a width of its own all the same: none waits."""
        return not (self.share.count > 1 or self.packing or self.share.one_width)

    def step(self, turns: Sequence[Sequence[Sequence[Tokens]]], longest: int) -> list[MicroBatch]:
        """The tensors of a step's micro-batches."""
        length_of = longest_of if self.pairs else tokens_of
        own = [max(map(length_of, sequences)) for sequences in turns]
        widths = self.widths(own, longest)
        return [self.batch(*each) for each in zip(turns, widths, strict=True)]

    def widths(self, turns: Sequence[int], longest: int) -> list[int]:
        """Padded lengths of a step's micro-batches.

        Args:
            turns: tokens of the longest sequence of each; 0 where it has only dummies.
            longest: tokens of the longest sequence that any rank has in this step.
        """
        if self.has_one_width:
            # Packs are as full as they can be: nearly all have one width, and then all may.
            longest = self.max_length if self.packing else longest
            # Dummies must not have a shape of their own.
            return [self.width(own if own and self.may_vary_width else longest) for own in turns]
        return [self.width(max(turns) if self.share.one_width else own) for own in turns]

    def width(self, longest: int) -> int:
        """The padded length where the longest sequence has so many tokens."""
        width = self.shapes.padded_length(max(1, longest), self.max_length)
        multiple = self.share.one_width or 1
        return min(math.ceil(width / multiple) * multiple, self.max_length)

    def dummy(self, width: int) -> MicroBatch:
        """A micro-batch without rows."""
        return self.batch([[]] * self.micro_batch, width)

    def batch(self, sequences: Sequence[Sequence[Tokens]], width: int) -> MicroBatch:
        """The tensors of one micro-batch, from the documents of each sequence, in order."""
        import torch

        # A dummy keeps one token, since attention over nothing at all is not a number.
        dummy = [Tokens(np.array([self.pad_id]), np.array([False]), "")]
        if self.pairs:
            sequences = [[each] for pair in sequences for each in pair or 2 * dummy]
        isolated = self.packing is True
        shape = (len(sequences), width)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        positions = np.tile(np.arange(width, dtype=np.int64), (len(sequences), 1))
        segments = np.zeros(shape, dtype=np.int64)
        for place, sequence in enumerate(sequences):
            at = 0
            for number, document in enumerate(sequence or dummy, start=1):
                end = at + len(document.ids)
                input_ids[place, at:end] = document.ids
                labels[place, at:end] = np.where(document.loss_mask, document.ids, IGNORE_INDEX)
                mask[place, at:end] = 1
                segments[place, at:end] = number
                if isolated:
                    positions[place, end:] = np.arange(width - end)
                at = end
        # What is added for a multiple is no token: it has no loss, and nobody attends to it.
        more = -width % self.share.multiple
        shifted = np.pad(labels[:, 1:], ((0, 0), (0, 1 + more)), constant_values=IGNORE_INDEX)
        own = shifted[:, self.share.positions(width + more)]

        def tensor(array: NDArray[np.int64]) -> torch.Tensor:
            filled = np.pad(array, ((0, 0), (0, more))) if array.shape == shape and more else array
            return cast("torch.Tensor", self.pin(torch.from_numpy(filled)))

        dynamic = self.shapes.kind is ShapeKind.DYNAMIC
        return MicroBatch(
            input_ids=tensor(input_ids),
            shift_labels=tensor(shifted),
            attention_mask=tensor(mask),
            position_ids=tensor(positions),
            segment_ids=tensor(segments) if isolated else None,
            loss_rows=tensor(np.flatnonzero(own != IGNORE_INDEX)) if dynamic else None,
            loss_counts=tuple((own != IGNORE_INDEX).sum(axis=1).tolist()),
            has_padding=bool(more) or not mask.all(),
            origins=tuple(document.origin for sequence in sequences for document in sequence),
            num_loss_tokens=int((labels != IGNORE_INDEX).sum()),
            tokens=sum(map(tokens_of, sequences)),
        )


def tokens_of(sequence: Sequence[Tokens]) -> int:
    """Count the tokens of all the documents that a sequence holds."""
    return sum(len(document.ids) for document in sequence)


def longest_of(sequence: Sequence[Tokens]) -> int:
    """Count the tokens of the longest document that a sequence holds."""
    return max((len(document.ids) for document in sequence), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What decides the order, in addition to the data.

    Attributes:
        global_batch: sequences per step over all ranks.
        epochs: need not be whole.
        steps: optimizer steps; wins over `epochs`, begins anew as often as needed.
        weights: times that the rows of each source are read in an epoch.
        grouping: whether sequences of like length share a step.
        shuffle: a new order in each epoch; otherwise the rows' own.
    """

    seed: int
    global_batch: int
    epochs: float = 1.0
    steps: int | None = None
    weights: tuple[float, ...] = (1.0,)
    grouping: bool = False
    shuffle: bool = True

    def record(self) -> list[object]:
        """What two runs must have in common to read the same rows in the same step."""
        return [self.seed, self.global_batch, self.weights, self.grouping, self.shuffle]


class Prefetcher(Generic[Work]):
    """Results of numbered work, one after another in a thread.

    Args:
        count: of the numbers, from 0.
        depth: results that are begun before they are asked for; earlier ones are not held.
    """

    def __init__(self, work: Callable[[int], Work], count: int, depth: int, name: str) -> None:
        self._work, self._count, self._depth = work, count, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._begun: dict[int, Future[Work]] = {}

    def get(self, index: int) -> Work:
        """The result for a number, or what the work raised. For one thread alone."""
        wanted = range(index, min(index + self._depth + 1, self._count))
        for number in self._begun.keys() - set(wanted):
            self._begun.pop(number).cancel()
        for number in wanted:
            if number not in self._begun:
                self._begun[number] = self._pool.submit(self._work, number)
        return self._begun[index].result()

    def __enter__(self) -> Prefetcher[Work]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error nobody waits for what the thread is at: that may take as long as a network
        # does, and the thread ends with it.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


STEPS_AHEAD = 2
"""Steps whose batches are laid out before the loop comes to them."""
KEPT_STEPS = 2 * STEPS_AHEAD + 2
"""Those that were laid out ahead, and those whose metrics are still to come."""


class Batches(ABC):
    """The training batches of one rank.

    When epochs decide the end, the last step may be short: it is filled up with dummy sequences,
    so that all ranks run the same number of micro-batches. Dummies hold nothing to learn.

    Attributes:
        steps: optimizer steps of the run, at least 1.
    """

    steps: int
    _identity: tuple[str, ...]
    """Of the data."""

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.schedule, self.layout = schedule, layout
        self.global_batch = schedule.global_batch
        self._resumed: Mapping[str, int] = {}
        turns = accumulation(self.global_batch, layout.micro_batch, layout.share.count)
        parts = np.arange(self.global_batch).reshape(turns, layout.share.count, -1)
        # This rank's places in a step; int64 of shape (accumulation, micro_batch).
        self._places: NDArray[np.int64] = parts[:, layout.share.index]

    @abstractmethod
    def step(self, index: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step (from 0); as many on every rank.

        A thread may call it, for up to `STEPS_AHEAD` steps after the one that the rest is asked
        for. IndexError: the run has no such step.
        """

    def state(self, done: int) -> dict[str, int]:
        """What `resume` needs after `done` steps in addition to that number; for a checkpoint."""
        return {}

    def resume(self, state: Mapping[str, int]) -> None:
        """Begin where another run's `state` says, which read the same data."""
        self._resumed = state

    def widths(self, start: int) -> list[int]:
        """Padded lengths of the micro-batches from a step on, the widest first; none where ranks
        do not agree on them, or lengths are not known before the run."""
        return []

    @abstractmethod
    def normalizer(self, index: int) -> int:
        """Loss tokens of a step over all ranks; of pairs, how many there are."""

    @abstractmethod
    def real_tokens(self, index: int) -> int:
        """Tokens of a step over all ranks, without padding."""

    @abstractmethod
    def epoch(self, index: int) -> float:
        """Passes over the data that are complete after this step."""

    def fingerprint(self) -> str:
        """Hexadecimal digest of the data and all that decides which rows are in which step: not
        ranks, micro-batches or the number of steps."""
        settings = [self.schedule.record(), self.layout.packing, self.layout.max_length]
        return key_of(*self._identity, *settings)

    def _check_index(self, index: int) -> int:
        if not 0 <= index < self.steps:
            raise IndexError(f"step {index} is not in 0..{self.steps - 1}")
        return index


def pack(lengths: NDArray[np.int64], capacity: int, order: NDArray[np.int64]) -> list[list[int]]:
    """Packs of row numbers: each row in exactly one, none above the capacity in tokens.

    Takes O(n log n) and is a function of its arguments alone.

    Args:
        lengths: tokens of each row, each from 1 to the capacity; int64 of shape (rows,).
        order: the row numbers to pack, each once; breaks ties between rows of equal length.
    """
    packs: list[list[int]] = []
    # Packs by the room they have left; `rooms` holds the keys in rising order.
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []
    ranked = order[np.argsort(-lengths[order], kind="stable")]
    for row, length in zip(ranked.tolist(), lengths[ranked].tolist(), strict=True):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, number = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        packs[number].append(row)
        left = room - length
        if not by_room[left]:
            bisect.insort(rooms, left)
        by_room[left].append(number)
    return packs


class _Sequences:
    """What an epoch is made of: each a row, a pack of rows or a pair, which have one weight.

    Attributes:
        sizes: sequences of each of the `weights`, one after another.
        tokens: of each sequence; int64 of shape (sequences,).
        widest: of each, the tokens that stand in one row; likewise.
        normalizers: of each, its loss tokens; 1 for a pair; likewise.
    """

    def __init__(
        self, rows: TokenizedRows, weights: Sequence[float], layout: Layout, seed: int
    ) -> None:
        self.rows, self._joined = rows, bool(layout.packing) or layout.pairs
        self.weights, self.sizes = list(weights), rows.sizes
        self.tokens = self.widest = rows.lengths
        self.normalizers = rows.column("num_loss_tokens").astype(np.int64)
        if layout.pairs:
            self.sizes = [size // 2 for size in rows.sizes]
            self._members = np.arange(len(rows))
            self._starts = np.arange(0, len(rows) + 1, 2)
            answers = rows.lengths.reshape(-1, 2)
            self.tokens, self.widest = answers.sum(axis=1), answers.max(axis=1)
            self.normalizers = np.ones(len(answers), np.int64)
        elif layout.packing:
            self.weights = list(dict.fromkeys(weights))
            of_row = np.repeat(np.asarray(weights), rows.sizes)
            packs = []
            for number, weight in enumerate(self.weights):
                members = np.flatnonzero(of_row == weight)
                order = members[packing_order(len(members), seed, number)]
                packs.append(pack(rows.lengths, layout.max_length, order))
            self.sizes = list(map(len, packs))
            # The packs as stretches of one list: of a million, a list each would be large.
            self._starts = np.cumsum([0, *map(len, chain(*packs))])
            self._members = np.fromiter(chain.from_iterable(chain(*packs)), np.int64)
            self.tokens, self.normalizers = (
                np.add.reduceat(counts[self._members], self._starts[:-1])
                for counts in (self.tokens, self.normalizers)
            )
            self.widest = self.tokens

    def documents(self, sequences: NDArray[np.int64]) -> list[list[Tokens]]:
        """Return the documents of sequences; `DUMMY` stands for one that holds nothing."""
        found: list[list[Tokens]] = []
        for each in sequences.tolist():
            members = [] if each == DUMMY else [each]
            if members and self._joined:
                members = self._members[self._starts[each] : self._starts[each + 1]].tolist()
            found.append([self.rows.tokens(row) for row in members])
        return found

    def lengths(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each that stand in one row, 0 for `DUMMY`; int64 of the same shape."""
        return np.where(sequences == DUMMY, 0, self.widest[sequences])


_STEPS_AT_ONCE = 1024
"""Steps whose lengths are looked at together: numpy takes as long for one as for some."""


class RowBatches(Batches):
    """Training batches of rows that are there; see `Batches`."""

    def __init__(self, rows: TokenizedRows, schedule: Schedule, layout: Layout) -> None:
        super().__init__(schedule, layout)
        sequences = _Sequences(rows, schedule.weights, layout, schedule.seed)
        order = Order(sequences.sizes, sequences.weights, schedule.seed, shuffle=schedule.shuffle)
        self.sequences, self._order = sequences, order
        self._identity = ("rows", rows.fingerprint())
        if schedule.steps:
            self._total, stop = schedule.steps * self.global_batch, math.inf
        else:
            self._total = max(1, order.end(schedule.epochs))
            # A run that ends with an epoch reads no row of the next one.
            stop = max(1, order.end(math.ceil(schedule.epochs)))
        self.steps = -(-self._total // self.global_batch)
        self._grouped: GroupedOrder | None = None
        if schedule.grouping:
            self._grouped = GroupedOrder(order, sequences.lengths, self.global_batch, stop)
        # The sequences of a step over all ranks; int64 of shape (global_batch,).
        self.items = lru_cache(KEPT_STEPS)(lambda index: self._find(self._check_index(index))[0])

    def step(self, index: int) -> list[MicroBatch]:
        """See `Batches`."""
        items = self.items(index)
        turns = [self.sequences.documents(turn) for turn in items[self._places]]
        return self.layout.step(turns, int(self.sequences.lengths(items).max()))

    def widths(self, start: int) -> list[int]:
        """See `Batches`; looks at the lengths of all rows that are left."""
        if not self.layout.has_one_width:
            return []
        if self.layout.packing:
            return [self.layout.width(self.layout.max_length)]
        together = self.layout.micro_batch if self.layout.may_vary_width else self.global_batch
        longest: set[int] = set()
        for first in range(start, self.steps, _STEPS_AT_ONCE):
            tokens = self.sequences.lengths(self._find(first, _STEPS_AT_ONCE))
            longest |= set(tokens.reshape(-1, together).max(axis=1).tolist())
        return sorted(set(map(self.layout.width, longest - {0})), reverse=True)

    def normalizer(self, index: int) -> int:
        """See `Batches`."""
        items = self.items(index)
        return int(self.sequences.normalizers[items].sum(where=items != DUMMY))

    def real_tokens(self, index: int) -> int:
        """See `Batches`."""
        items = self.items(index)
        return int(self.sequences.tokens[items].sum(where=items != DUMMY))

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        return min((index + 1) * self.global_batch, self._total) / float(self._order.per_epoch)

    def _find(self, first: int, count: int = 1) -> NDArray[np.int64]:
        """Return the `items` of several steps; int64 of shape (steps, global_batch)."""
        steps = range(first, min(first + count, self.steps))
        if self._grouped is not None:
            return np.stack(list(map(self._grouped.step, steps)))
        positions = np.arange(steps.start * self.global_batch, steps.stop * self.global_batch)
        return self._order.items(positions, self._total).reshape(-1, self.global_batch)


class EvaluationBatches:
    """The evaluation micro-batches of one rank; it lays each out when the loop reads it.

    All rows once, in their own order, divided over ranks; every rank has as many batches. Missing
    sequences at the end are dummies, so summed loss over `normalizer` is the same for every number
    of ranks and size of micro-batch.

    Attributes:
        normalizer: loss tokens over all ranks; of pairs, how many there are.
    """

    def __init__(self, rows: TokenizedRows, layout: Layout) -> None:
        self._sequences = _Sequences(rows, (1.0,) * len(rows.pieces), layout, seed=0)
        self._layout = layout
        self.normalizer = int(self._sequences.normalizers.sum())
        count, together = len(self._sequences.tokens), layout.share.count * layout.micro_batch
        items = np.pad(np.arange(count), (0, -count % together), constant_values=DUMMY)
        self._items = items.reshape(-1, layout.share.count, layout.micro_batch)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[MicroBatch]:
        for items in self._items:
            documents = self._sequences.documents(items[self._layout.share.index])
            yield from self._layout.step([documents], int(self._sequences.lengths(items).max()))


class Padding(NamedTuple):
    """What a schedule reads, in one layout: rows, or packs of them, and tokens with padding."""

    sequences: int
    steps: int
    positions: int
    share: float
    """Of the positions that is padding, from 0 to 1."""
    fill: float | None
    """Share of the packs' room that holds tokens; None where nothing is packed."""


def measure_padding(rows: TokenizedRows, schedule: Schedule, layout: Layout) -> Padding:
    """Lay out what the schedule reads, without making a tensor."""
    batches = RowBatches(rows, schedule, layout)
    tokens = positions = sequences = 0
    for index in range(batches.steps):
        items = batches.items(index)
        lengths = batches.sequences.lengths(items).reshape(-1, layout.micro_batch)
        widths = layout.widths(lengths.max(axis=1).tolist(), int(lengths.max()))
        tokens += batches.real_tokens(index)
        positions += sum(widths) * layout.micro_batch * (1 + layout.pairs)
        sequences += int(np.count_nonzero(lengths))
    fill = tokens / (sequences * layout.max_length) if layout.packing else None
    return Padding(sequences, batches.steps, positions, 1 - tokens / positions, fill)
