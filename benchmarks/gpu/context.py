"""What every part is given: the device, a folder, its time, and how large its work is."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One part's task.

    Attributes:
        device: torch's name of the device type, which is also anygauge's name of the backend.
        folder: for what the part writes.
        seconds: that it may take; at the end of them it is ended.
        gpus: cards of each machine that it may use.
        hostfile: of several machines; empty for this one alone.
        nodes: machines.
        tiny: sizes at which a host is done in seconds, to try the parts.
        full: all that the part knows to do, not the most important alone.
        machine: as `anygauge plan --machine` takes it: what trains there is only predicted. Empty:
            it is measured here, beside its prediction.
        card: name of the cards here, as the driver gives it; empty for the host.
    """

    device: str
    folder: str
    seconds: float
    gpus: int = 1
    hostfile: str = ""
    nodes: int = 1
    tiny: bool = False
    full: bool = False
    machine: str = ""
    card: str = ""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Context:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Clock:
    """Time that a part has left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 where time is over."""
        return max(0.0, self._end - time.monotonic())
