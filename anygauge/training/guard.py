"""Stops a run whose loss is not a number, and names the rows that made it so."""

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
    norm: float,
    batches: Sequence[MicroBatch],
    collectives: Collectives,
    *,
    skipped: bool,
) -> None:
    """Return if the step's loss and gradient are finite.

    Args:
        index: the step, from 0.
        total: summed loss over all ranks, the same on every rank.
        sums: this rank's losses, one per micro-batch; several ranks may have parts of one.
        norm: of the gradient, the same on every rank.
        skipped: loss scaling left the update out: the norm may be anything, and the next step
            tries again with a smaller scale.

    Raises:
        NonFiniteLossError: on every rank together; the message names the rows.
    """
    finite_loss = math.isfinite(total)
    if finite_loss and (skipped or math.isfinite(norm)):
        return
    what = f"the gradient's norm became {norm}" if finite_loss else f"the loss became {total}"
    mine = [
        origin
        for loss, batch in zip(sums, batches, strict=True)
        if finite_loss or not math.isfinite(loss)
        for origin in batch.origins
    ]
    every = (origin for rank in collectives.gather_objects(mine) for origin in rank)
    rows = list(dict.fromkeys(every))
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    raise NonFiniteLossError(
        f"{what} at step {index + 1}, with rows {', '.join(rows[:MOST_ROWS])}{more}. Look at these "
        "rows; or lower train.optimizer.lr, lengthen train.schedule.warmup_steps, or try "
        "precision.param_dtype: float32. No adapter or model was saved; earlier checkpoints are "
        "kept"
    )
