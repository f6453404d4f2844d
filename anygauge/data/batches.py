"""Which rank reads which sequences in which step, and how they become tensors.

A step reads global_batch sequences in the order of `Order` or `GroupedOrder`. Micro-batch `a` of
part `i` of `n` holds those from (a * n + i) * micro_batch on: parts and micro-batches divide a
step, they do not decide what is in it. Which part a rank reads is its strategy's to say.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from anygauge.data.order import Order
from anygauge.data.rows import Tokens
from anygauge.interface import RunFileError, ShapeKind, ShapePolicy, Share

if TYPE_CHECKING:
    import torch

    from anygauge.config.schema import RunFile
    from anygauge.data.streaming import BlockOrder


Work = TypeVar("Work")


def accumulation(global_batch: int, micro_batch: int, parts: int) -> int:
    """Micro-batches that each rank reads per step.

    Args:
        parts: into which a step's rows are divided: ranks, or groups of them that read the same.

    Raises:
        RunFileError: the global batch cannot be divided so; names values that can.
    """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How sequences become the tensors of one rank.

    Attributes:
        micro_batch: sequences per forward on one rank.
        max_length: most tokens of a sequence; with packing, the capacity of a pack.
        pad_id: token number that fills up; never a loss token, never attended to.
        packing: whether a sequence holds several rows.
        isolated: whether none of these attends to another.
        share: the part of each step that this rank reads.
        shapes: decides padded lengths.
    """

    micro_batch: int
    max_length: int
    pad_id: int
    share: Share = field(default_factory=lambda: Share(0, 1))
    packing: bool = False
    isolated: bool = True
    shapes: ShapePolicy = field(default_factory=ShapePolicy)

    @classmethod
    def of(cls, run: RunFile, share: Share, pad_id: int, shapes: ShapePolicy) -> Layout:
        """That of a run."""
        return cls(
            micro_batch=run.train.sequences_at_once(share.count),
            max_length=run.data.max_length,
            pad_id=pad_id,
            share=share,
            packing=run.data.packs,
            isolated=run.data.isolates,
            shapes=shapes,
        )

    @property
    def kind(self) -> bool | str:
        """What the run file calls the packing."""
        return self.packing if self.isolated else "concatenate"

    @property
    def agrees(self) -> bool:
        """Whether all ranks of a step, or of a round of evaluation, have one width.

        Where each new shape is compiled, all would wait for a rank that has a shape of its own, as
        one without rows has. A static shape is agreed on already.
        """
        return self.shapes.kind is ShapeKind.BUCKETED

    @property
    def alone(self) -> bool:
        """Whether each micro-batch may have a width of its own where ranks agree: nobody waits."""
        return not (self.share.count > 1 or self.packing or self.share.one_width)

    def step(
        self, turns: Sequence[Sequence[Sequence[Tokens]]], longest: Callable[[], int]
    ) -> list[MicroBatch]:
        """The tensors of a step's micro-batches.

        Args:
            longest: tokens of the longest sequence that any rank has in this step; with packing, in
                any step. Called where ranks agree.
        """
        own = [max(map(tokens_of, sequences)) for sequences in turns]
        widths = self.widths(own, longest)
        return [self.batch(*each) for each in zip(turns, widths, strict=True)]

    def widths(self, turns: Sequence[int], longest: Callable[[], int]) -> list[int]:
        """Padded lengths of a step's micro-batches.

        Args:
            turns: tokens of the longest sequence of each; 0 where it has only dummies.
            longest: see `step`.
        """
        if self.agrees:
            width = self._width(longest())
            if not self.alone:
                return [width] * len(turns)
            # Dummies must not have a shape of their own.
            return [self._width(own) if own else width for own in turns]
        if self.share.one_width:
            return [self._width(max(turns))] * len(turns)
        return [self._width(own) for own in turns]

    def each_width(self, longest: Iterable[int]) -> list[int]:
        """The padded lengths of some longest sequences, each once, the widest first."""
        return sorted(set(map(self._width, longest)), reverse=True)

    def dummy(self, width: int) -> MicroBatch:
        """A micro-batch without rows."""
        return self.batch([[]] * self.micro_batch, width)

    def _width(self, longest: int) -> int:
        width = self.shapes.padded_length(max(1, longest), self.max_length)
        if self.share.one_width:
            rounded = math.ceil(width / self.share.one_width) * self.share.one_width
            width = max(width, min(rounded, self.max_length))
        return width

    def batch(self, sequences: Sequence[Sequence[Tokens]], width: int | None = None) -> MicroBatch:
        """The tensors of one micro-batch; see `collate`."""
        return collate(
            sequences,
            width=width,
            isolated=self.packing and self.isolated,
            shapes=self.shapes,
            max_length=self.max_length,
            pad_id=self.pad_id,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What decides the order, in addition to the data.

    Attributes:
        global_batch: sequences per step over all ranks.
        epochs: passes over the sequences; need not be whole.
        steps: optimizer steps; wins over `epochs`, begins anew as often as needed.
        weights: times that the rows of each source are read in an epoch; empty: once all.
        grouping: whether sequences of like length share a step.
        shuffle: a new order in each epoch; otherwise the rows' own.
    """

    seed: int
    global_batch: int
    epochs: float = 1.0
    steps: int | None = None
    weights: tuple[float, ...] = ()
    grouping: bool = False
    shuffle: bool = True

    def weights_of(self, sources: int) -> tuple[float, ...]:
        """The weight of each source."""
        return self.weights or (1.0,) * sources

    def record(self, sources: int) -> list[object]:
        """What two runs must have in common to read the same rows in the same step."""
        weights = self.weights_of(sources)
        return [self.seed, self.global_batch, weights, self.grouping, self.shuffle]


class Ahead(Generic[Work]):
    """Results of numbered work, one after another in a thread, begun before they are asked for.

    Args:
        count: of the numbers, from 0.
        depth: results that are begun before they are asked for.
        behind: how many numbers a second thread that asks may be behind the first.
        name: of the thread.
    """

    def __init__(
        self,
        work: Callable[[int], Work],
        count: int,
        depth: int,
        *,
        behind: int = 0,
        name: str = "rows-ahead",
    ) -> None:
        self._work, self._count, self._depth, self._behind = work, count, depth, behind
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._begun: dict[int, Future[Work]] = {}
        self._lock = threading.Lock()

    def get(self, index: int) -> Work:
        """The result for a number; raises what the work raised."""
        wanted = range(index, min(index + self._depth + 1, self._count))
        kept = range(index - self._behind, wanted.stop + self._behind)
        with self._lock:
            for number in set(self._begun) - set(kept):
                self._begun.pop(number).cancel()
            for number in wanted:
                if number not in self._begun:
                    self._begun[number] = self._pool.submit(self._work, number)
            found = self._begun[index]
        return found.result()

    def __enter__(self) -> Ahead[Work]:
        """Its thread ends with this context."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Begin no more work. After an error nobody waits for what the thread is at: that may take
        as long as a network does, and the thread ends with it."""
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


STEPS_AHEAD = 2
"""Steps whose batches are laid out before the loop comes to them."""


class Batches(ABC):
    """The training batches of one rank.

    When epochs decide the end, the last step may be short: it is filled up with dummy sequences,
    so that all ranks run the same number of micro-batches. Dummies hold nothing to learn.

    Attributes:
        steps: optimizer steps of the run, at least 1.
        accumulation: micro-batches per step on each rank.
        sequences_per_epoch: rows or packs, each times its weight.

    Raises:
        RunFileError: global_batch is not a multiple of micro_batch times the number of parts.
    """

    steps: int
    sequences_per_epoch: float

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.resumed: dict[str, int] = {}
        self.schedule, self.layout = schedule, layout
        self.global_batch = schedule.global_batch
        self.accumulation = accumulation(
            schedule.global_batch, layout.micro_batch, layout.share.count
        )

    def __len__(self) -> int:
        return self.steps

    @abstractmethod
    def step(self, index: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step (from 0); as many on every rank.

        A thread may call it, for up to `STEPS_AHEAD` steps after the one that the rest is asked
        for.

        Raises:
            IndexError: the run has no such step.
        """

    def state(self, done: int) -> dict[str, int]:
        """What `resume` needs after `done` steps in addition to that number; for a checkpoint."""
        return {}

    def resume(self, state: Mapping[str, int]) -> None:
        """Begin where another run's `state` says, which read the same data."""
        self.resumed = dict(state)

    def widths(self, start: int) -> list[int]:
        """Padded lengths of the micro-batches from a step on, the widest first.

        Empty where ranks do not agree on them, or lengths are not known before the run.
        """
        return []

    @abstractmethod
    def num_loss_tokens(self, index: int) -> int:
        """Supervised tokens of a step over all ranks."""

    @abstractmethod
    def real_tokens(self, index: int) -> int:
        """Tokens of a step over all ranks, without padding."""

    @abstractmethod
    def global_origins(self, index: int) -> tuple[str, ...]:
        """Where the rows of a step came from, over all ranks, in the global order."""

    @abstractmethod
    def epoch(self, index: int) -> float:
        """Passes over the data that are complete after this step."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digest of the data and all that decides which rows are in which step.

        Ranks, micro-batches and the number of steps are not part of it.
        """

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.steps:
            raise IndexError(f"step {index} is not in 0..{self.steps - 1}")
        return index

    def _places(self) -> NDArray[np.int64]:
        """This rank's places in a step; int64 of shape (accumulation, micro_batch)."""
        size, share = self.layout.micro_batch, self.layout.share
        turns = (np.arange(self.accumulation) * share.count + share.index) * size
        return turns[:, None] + np.arange(size)


class OrderedBatches(Batches):
    """Batches of which each sequence is one item of an order: see `Batches`.

    Args:
        order: of the items, over the whole run.
    """

    def __init__(self, schedule: Schedule, layout: Layout, order: Order | BlockOrder) -> None:
        super().__init__(schedule, layout)
        self._order = order
        self._total = (
            max(1, order.end(schedule.epochs))
            if schedule.steps is None
            else schedule.steps * self.global_batch
        )
        self.steps = -(-self._total // self.global_batch)
        self.sequences_per_epoch = float(order.per_epoch)

    def epoch(self, index: int) -> float:
        """See `Batches`."""
        return min((index + 1) * self.global_batch, self._total) / self.sequences_per_epoch


IGNORED = -100
"""The label of positions without a loss."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """What one forward reads. Tensors are int64 of shape (sequences, length), on the host.

    Attributes:
        input_ids: token numbers; sequences are padded on the right.
        labels: the loss tokens *at their own position* (the loss shifts them);
            `IGNORED` otherwise, and on the first token of every document.
        attention_mask: 1 for tokens, 0 for padding. A dummy sequence keeps one 1, since attention
            over nothing at all is not a number.
        position_ids: from 0; packed documents and the padding behind them each begin anew.
        segment_ids: packed: the document's number in its sequence from 1, 0 for padding.
            None where nothing is packed.
        origins: where the rows came from; dummies have none.
        num_loss_tokens: labels that count.
        tokens: real tokens, without padding and dummies.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor | None
    origins: tuple[str, ...]
    num_loss_tokens: int
    tokens: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, for moving to a device; `segment_ids` only where packed."""
        named = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        if self.segment_ids is not None:
            named["segment_ids"] = self.segment_ids
        return named


def tokens_of(sequence: Sequence[Tokens]) -> int:
    """Of all the documents that a sequence holds."""
    return sum(len(document.ids) for document in sequence)


def collate(
    sequences: Sequence[Sequence[Tokens]],
    *,
    isolated: bool,
    shapes: ShapePolicy,
    max_length: int,
    pad_id: int,
    width: int | None = None,
) -> MicroBatch:
    """Lay out sequences side by side.

    Args:
        sequences: for each, the documents it holds, in order; none at all makes a dummy, from
            which there is no loss.
        isolated: whether documents are distinguished by positions and `segment_ids`.
        shapes: decides the padded length.
        max_length: most tokens of a sequence.
        width: the padded length; None: as `shapes` says.
    """
    import torch

    if width is None:
        longest = max(map(tokens_of, sequences))
        width = shapes.padded_length(max(1, longest), max_length)
    shape = (len(sequences), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(sequences), 1))
    segments = np.zeros(shape, dtype=np.int64)
    tokens = 0
    for place, sequence in enumerate(sequences):
        at = 0
        for number, document in enumerate(sequence, start=1):
            end = at + len(document.ids)
            input_ids[place, at:end] = document.ids
            labels[place, at:end] = np.where(document.loss_mask, document.ids, IGNORED)
            mask[place, at:end] = 1
            segments[place, at:end] = number
            if isolated:
                positions[place, at:] = np.arange(width - at)
            at = end
        tokens += at
        if not sequence:
            mask[place, 0] = segments[place, 0] = at = 1
        if isolated:
            positions[place, at:] = np.arange(width - at)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments) if isolated else None,
        origins=tuple(document.origin for sequence in sequences for document in sequence),
        num_loss_tokens=int((labels != IGNORED).sum()),
        tokens=tokens,
    )
