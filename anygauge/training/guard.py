"""Stops a run whose loss is no number, and names the rows that made it so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anygauge.data import MicroBatch
from anygauge.interface import Collectives, NonFiniteLossError

MOST_ROWS = 8


def check_finite(
    index: int,
    total: float,
    sums: Sequence[float],
    batches: Sequence[MicroBatch],
    collectives: Collectives,
) -> None:
    """Return if the step's loss is finite.

    Args:
        index: the step, from 0.
        total: summed loss over all ranks, the same on every rank.
        sums: this rank's losses, one per micro-batch.

    Raises:
        NonFiniteLossError: on every rank together; the message names the rows.
    """
    if math.isfinite(total):
        return
    mine = [
        origin
        for loss, batch in zip(sums, batches, strict=True)
        if not math.isfinite(loss)
        for origin in batch.origins
    ]
    rows = [origin for rank in collectives.gather_objects(mine) for origin in rank]
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    raise NonFiniteLossError(
        f"the loss became {total} at step {index + 1}, in the micro-batch with rows "
        f"{', '.join(rows[:MOST_ROWS])}{more}. Look at these rows; or lower "
        "train.optimizer.lr, lengthen train.schedule.warmup_steps, or try precision.compute: "
        "float32. Nothing of this run was saved"
    )
