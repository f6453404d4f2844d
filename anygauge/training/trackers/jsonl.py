"""Metrics as JSON lines in a file of the user's choice, for whatever ships logs elsewhere."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, RunStatus, TrackerContext


class JsonLines:
    """Appends ``{"time", "run", "step", name: value, ...}``, one object a line, each written whole.

    The last line of a run has ``status`` and ``summary``. inf and nan become null.
    """

    def __init__(self, context: TrackerContext) -> None:
        path = context.run_directory / Path(context.options["path"]).expanduser()
        self._run = context.run_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line, so that a reader sees whole objects.
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise AnygaugeError(
                f"tracker_options.jsonl.path: cannot append to {path}: {error.strerror}; give the "
                "path of a file that can be written"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._write({"step": step, **metrics})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        finite = {name: _finite(value) for name, value in summary.items()}
        self._write({"status": status, "summary": finite})
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        record = {"time": time.time(), "run": self._run, **values}
        line = json.dumps({name: _finite(value) for name, value in record.items()})
        self._file.write(line + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
