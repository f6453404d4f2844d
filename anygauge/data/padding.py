"""How much of a run's batches is padding, for each way of laying rows out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from anygauge.data.batches import Layout, Schedule
from anygauge.data.row_batches import RowBatches
from anygauge.data.rows import TokenizedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """One epoch in one layout.

    Attributes:
        sequences: rows, or packs of them, over the epoch.
        steps: optimizer steps of the epoch.
        tokens: real tokens of the epoch.
        positions: tokens with padding: what the model computes over.
        fill: share of the packs' room that holds tokens; None where nothing is packed.
    """

    sequences: int
    steps: int
    tokens: int
    positions: int
    fill: float | None

    @property
    def share(self) -> float:
        """Share of the positions that is padding, from 0 to 1."""
        return 1 - self.tokens / self.positions


def measure(rows: TokenizedRows, schedule: Schedule, layout: Layout) -> Padding:
    """Lay out one epoch without making a tensor.

    Raises:
        RunFileError: global_batch is not a multiple of micro_batch times the number of ranks.
    """
    batches = RowBatches(rows, replace(schedule, epochs=1.0, steps=None), layout)
    tokens = positions = sequences = 0
    for index in range(batches.steps):
        lengths = batches.sequence_tokens(index).reshape(-1, layout.micro_batch)
        longest = np.maximum(lengths.max(axis=1), 1).tolist()
        widths = [layout.shapes.padded_length(width, layout.max_length) for width in longest]
        tokens += int(lengths.sum())
        positions += sum(widths) * layout.micro_batch
        sequences += int(np.count_nonzero(lengths))
    return Padding(
        sequences=sequences,
        steps=batches.steps,
        tokens=tokens,
        positions=positions,
        fill=tokens / (sequences * layout.max_length) if layout.packing else None,
    )
