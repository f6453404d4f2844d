"""Which rank reads which sequences in which step.

A step reads global_batch sequences in the order of `Stream`. Micro-batch `a` of rank `r` holds
those from (a * world_size + r) * micro_batch on: ranks and micro-batches divide a step, they do
not decide what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from anygauge.data.collate import MicroBatch, collate
from anygauge.data.order import Stream, packing_order
from anygauge.data.packing import pack
from anygauge.data.tokens import TokenizedRows
from anygauge.interface import DataError, RunFileError, ShapePolicy


def accumulation(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches that each rank reads per step.

    Raises:
        RunFileError: the global batch cannot be divided so; names values that can.
    """
    together = micro_batch * world_size
    count, rest = divmod(global_batch, together)
    if not rest and count:
        return count
    ranks = "rank" if world_size == 1 else "ranks"
    valid = [str(value) for value in (count * together, (count + 1) * together) if value]
    remedies = [f"train.global_batch {' or '.join(valid)}"]
    if global_batch % world_size == 0:
        share = global_batch // world_size
        divisors = [str(value) for value in range(1, micro_batch) if share % value == 0]
        remedies.append(f"train.micro_batch {', '.join(divisors[-3:])}")
    raise RunFileError(
        f"train.global_batch {global_batch} is no multiple of {together} (train.micro_batch "
        f"{micro_batch} on {world_size} {ranks}); what works: {'; or '.join(remedies)}"
    )


class _Sequences:
    """The sequences of an epoch: each a row, or a pack of rows; and how they become tensors."""

    def __init__(
        self,
        rows: TokenizedRows,
        *,
        seed: int,
        packing: bool,
        max_length: int,
        pad_id: int,
        shapes: ShapePolicy,
    ) -> None:
        lengths = rows.lengths
        if len(rows) and int(lengths.max()) > max_length:
            raise DataError(
                f"a row has {int(lengths.max())} tokens, a sequence holds {max_length}: "
                "the rows were tokenised with another maximum length"
            )
        self.rows, self.packed = rows, packing
        self.max_length, self.pad_id, self.shapes = max_length, pad_id, shapes
        self.groups: Sequence[Sequence[int]] = (
            pack(lengths.tolist(), max_length, packing_order(len(rows), seed).tolist())
            if packing
            else [(row,) for row in range(len(rows))]
        )

    def batch(self, groups: Sequence[Sequence[int]]) -> MicroBatch:
        return collate(
            self.rows,
            groups,
            packed=self.packed,
            shapes=self.shapes,
            max_length=self.max_length,
            pad_id=self.pad_id,
        )


class Batches:
    """The training batches of one rank.

    When epochs decide the end, the last step may be short: it is filled up with dummy sequences,
    so that all ranks run the same number of micro-batches. Dummies hold nothing to learn.

    Args:
        global_batch: sequences per step over all ranks.
        micro_batch: sequences per forward on one rank.
        epochs: passes over the sequences; need not be whole.
        steps: optimizer steps; wins over `epochs`, begins anew as often as needed.
        max_length: most tokens of a sequence; with packing, the capacity of a pack.
        pad_id: token number that fills up; never learned, never attended to.

    Attributes:
        steps: optimizer steps of the run, at least 1.
        accumulation: micro-batches per step on each rank.
        sequences_per_epoch: rows, or packs.

    Raises:
        RunFileError: global_batch is no multiple of micro_batch times world_size.
    """

    def __init__(
        self,
        rows: TokenizedRows,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        max_length: int,
        pad_id: int,
        world_size: int = 1,
        rank: int = 0,
        packing: bool = False,
        shapes: ShapePolicy | None = None,
        epochs: float = 1.0,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self.accumulation = accumulation(global_batch, micro_batch, world_size)
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.world_size, self.rank = world_size, rank
        self._sequences = _Sequences(
            rows,
            seed=seed,
            packing=packing,
            max_length=max_length,
            pad_id=pad_id,
            shapes=shapes or ShapePolicy(),
        )
        self.sequences_per_epoch = len(self._sequences.groups)
        if steps is not None:
            total = steps * global_batch
        else:
            # Not ceil: 0.1 * 30 is a little above 3 in binary.
            total = max(1, round(epochs * self.sequences_per_epoch))
        self.steps = -(-total // global_batch)
        self._stream = Stream(self.sequences_per_epoch, seed, total=total, shuffle=shuffle)

    def __len__(self) -> int:
        return self.steps

    def step(self, index: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step (from 0); as many on every rank.

        Raises:
            IndexError: the run has no such step.
        """
        groups = self._groups(index)
        batches = []
        for turn in range(self.accumulation):
            start = (turn * self.world_size + self.rank) * self.micro_batch
            batches.append(self._sequences.batch(groups[start : start + self.micro_batch]))
        return batches

    def supervised_tokens(self, index: int) -> int:
        """Supervised tokens of a step over all ranks; needs no communication."""
        rows = self._sequences.rows
        return sum(rows.supervised(row) for group in self._groups(index) for row in group)

    def real_tokens(self, index: int) -> int:
        """Tokens of a step over all ranks, without padding; needs no communication."""
        starts = self._sequences.rows.starts
        return sum(
            int(starts[row + 1] - starts[row]) for group in self._groups(index) for row in group
        )

    def global_origins(self, index: int) -> tuple[str, ...]:
        """Where the rows of a step came from, over all ranks, in the global order."""
        origins = self._sequences.rows.origins
        return tuple(origins[row] for group in self._groups(index) for row in group)

    def epoch(self, index: int) -> float:
        """Passes over the data that are complete after this step."""
        done = min((index + 1) * self.global_batch, len(self._stream))
        return done / self.sequences_per_epoch

    def _groups(self, index: int) -> list[Sequence[int]]:
        if not 0 <= index < self.steps:
            raise IndexError(f"step {index} is not in 0..{self.steps - 1}")
        first = index * self.global_batch
        return [
            self._sequences.groups[self._stream.item(position)]
            if position < len(self._stream)
            else ()
            for position in range(first, first + self.global_batch)
        ]


class EvaluationBatches(Sequence[MicroBatch]):
    """The evaluation micro-batches of one rank; each is laid out when it is asked for."""

    def __init__(
        self, sequences: _Sequences, *, micro_batch: int, world_size: int, rank: int
    ) -> None:
        self._sequences = sequences
        self._micro_batch, self._world_size, self._rank = micro_batch, world_size, rank

    def __len__(self) -> int:
        return -(-len(self._sequences.groups) // (self._micro_batch * self._world_size))

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        start = (index % len(self) * self._world_size + self._rank) * self._micro_batch
        groups = list(self._sequences.groups[start : start + self._micro_batch])
        groups += [()] * (self._micro_batch - len(groups))
        return self._sequences.batch(groups)


def evaluation_batches(
    rows: TokenizedRows,
    *,
    micro_batch: int,
    max_length: int,
    pad_id: int,
    world_size: int = 1,
    rank: int = 0,
    packing: bool = False,
    shapes: ShapePolicy | None = None,
) -> EvaluationBatches:
    """All rows once, in their own order, divided over ranks; every rank has as many batches.

    Missing sequences at the end are dummies, so summed loss over summed `supervised_tokens` is
    the same for every number of ranks and size of micro-batch.
    """
    sequences = _Sequences(
        rows,
        seed=0,
        packing=packing,
        max_length=max_length,
        pad_id=pad_id,
        shapes=shapes or ShapePolicy(),
    )
    return EvaluationBatches(sequences, micro_batch=micro_batch, world_size=world_size, rank=rank)
