"""Whether a rank still moves, and what it is in: judged from outside, whatever it waits for.

A rank moves while it reports or uses the processor. Long work of its own (loading, saving) is
reported again and again by a thread of the rank, so that only a process that is stopped is still
there; in a step each micro-batch is reported, and one that waits for its peers reports nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_S = 3.0
"""A shorter silence says nothing: ranks report once a second."""

_BUSY = 0.1  # of one processor; what waits in a library's threads needs far less
_LONGEST_WINDOW_S = 10.0
_FROZEN_S = 2.0
_STOPPED = "Tt"  # proc(5): by a signal, by a debugger


@dataclass(frozen=True, slots=True)
class Look:
    """What the kernel shows of a process: processor time in seconds, and its state's letter."""

    cpu_s: float
    state: str


def look_at(pid: int) -> Look | None:
    """A look at a process; None where it is gone, or where the kernel shows nothing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # proc(5): the name, field 2, may hold spaces and brackets; the state is field 3, and 14 to 17
    # are the times of the process and of its children that have ended.
    fields = stat.rpartition(b")")[2].split()
    return Look(sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), fields[0].decode())


class Movement:
    """What one rank does, as far as its agent can tell. Times are monotonic.

    Args:
        limit_s: how long a silence counts.
    """

    def __init__(
        self,
        pid: int,
        limit_s: float,
        *,
        look: Callable[[int], Look | None] = look_at,
        now: float | None = None,
    ) -> None:
        self.limit_s = max(LEAST_S, limit_s)
        self._pid = pid
        self._look = look
        self._window_s = min(_LONGEST_WINDOW_S, self.limit_s / 5)
        self._moved = self._turned = time.monotonic() if now is None else now
        self._window: tuple[float, float] | None = None  # since when, and processor time then
        self._doing = ""

    def reported(self, event: Mapping[str, Any], now: float | None = None) -> None:
        """It has sent an event."""
        self._moved = time.monotonic() if now is None else now
        if event.get("event") == "progress":
            self._doing = str(event.get("doing", ""))

    def turn(self, now: float, *, excused: bool = False) -> None:
        """Look at it; call it often, at least once a second.

        Args:
            excused: it may be still because its reports are not read.
        """
        gap, self._turned = now - self._turned, now
        if gap > _FROZEN_S:  # the agent itself was stopped: the rank may have been so, too
            self._moved = min(now, self._moved + gap)
            self._window = None
        if excused:
            self._moved = now
            return
        if self._window is not None and now - self._window[0] < self._window_s:
            return
        seen = self._look(self._pid)
        if seen is None:
            self._moved = now  # nothing is known of it; its end is noticed elsewhere
            return
        before, self._window = self._window, (now, seen.cpu_s)
        worked = before is not None and seen.cpu_s - before[1] >= _BUSY * (now - before[0])
        # One that has never said what it is in is not judged by its silence.
        if worked or (not self._doing and seen.state not in _STOPPED):
            self._moved = now

    def still_s(self, now: float) -> float:
        """Seconds since it moved last."""
        return now - self._moved

    def suspicious(self, now: float) -> bool:
        """Whether it is stopped, or has been still for a good part of what it may."""
        return self._state() in _STOPPED or self.still_s(now) > self.limit_s / 2

    def describe(self, now: float) -> str:
        """What it is in, in words."""
        doing = self._doing or "starting"
        state = self._state()
        if state in _STOPPED:
            return f"{doing}; stopped (state {state} in /proc)"
        still = self.still_s(now)
        return f"{doing}; still for {still:.0f} s" if still > self.limit_s / 2 else doing

    def _state(self) -> str:
        seen = self._look(self._pid)
        return "?" if seen is None else seen.state
