"""TensorBoard: event files under ``<run directory>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge.interface import RunStatus, TrackerContext


class TensorBoard:
    """Scalars by step, the run file as text."""

    def __init__(self, context: TrackerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = context.resumed_from_step
        self._last = resumed or 0
        self._writer = SummaryWriter(
            log_dir=str(context.run_directory / "tensorboard"),
            # What was logged beyond the checkpoint is logged again.
            purge_step=None if resumed is None else resumed + 1,
        )
        if resumed is None:
            self._writer.add_text("parameters", _table(context.parameters), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._last = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self._writer.add_text("summary", _table({"status": status, **summary}), self._last)
        self._writer.close()


def _table(values: Mapping[str, Any]) -> str:
    """Markdown, which TensorBoard shows as a table."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])
