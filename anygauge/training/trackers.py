"""The trackers that come with anygauge: TensorBoard. Each is a plugin like anyone else's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from anygauge.interface import API_VERSION, TrackerSpec, hookimpl


def _tensorboard_missing() -> str | None:
    if importlib.util.find_spec("tensorboard") is None:
        return "the package tensorboard is not installed; pip install tensorboard"
    return None


@hookimpl
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:
    """Announce the trackers of this module."""
    return [
        TrackerSpec(
            name="tensorboard",
            factory="anygauge.training.trackers:TensorBoard",
            api_version=API_VERSION,
            missing=_tensorboard_missing,
        )
    ]


class TensorBoard:
    """Writes event files under ``<run directory>/tensorboard``."""

    def __init__(self, run_directory: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(Path(run_directory) / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()
