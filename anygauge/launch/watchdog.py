"""How long a rank has been idle, and what it was doing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORTEST_LIMIT_S = 3.0
"""Ranks report once a second, so a shorter silence means nothing."""

_BUSY = 0.1  # of one processor; threads of libraries that only wait use far less
_LONGEST_WINDOW_S = 10.0
_FROZEN_S = 2.0
_STOPPED_STATES = "Tt"  # proc(5): stopped by a signal, stopped by a debugger
_PF_EXITING = 0x4  # <linux/sched.h>


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What the kernel shows of a process: processor time, the letter of its state, its exit."""

    cpu_s: float
    state: str
    exiting: bool = False


def sample_process(pid: int) -> ProcessSample | None:
    """Look at a process; None where it is gone, or where the kernel shows nothing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # proc(5): the name, field 2, may hold spaces and brackets. State is field 3, flags field 9, and
    # 14 to 17 are the times of the process and of its children that have exited.
    fields = stat.rpartition(b")")[2].split()
    cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return ProcessSample(cpu_s, fields[0].decode(), bool(int(fields[6]) & _PF_EXITING))


class Watchdog:
    """How long one rank has been idle, and what it was doing.

    A rank is active while it reports or uses the processor. During long work of its own (loading,
    saving) a thread of the rank reports again and again. During a step each micro-batch is
    reported, and a rank that waits for its peers reports nothing.

    Attributes:
        limit_s: how long it may be idle.
        idle_s: how long it has been idle.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = max(SHORTEST_LIMIT_S, limit_s)
        self.idle_s = 0.0
        self._window_s = min(_LONGEST_WINDOW_S, self.limit_s / 5)
        self._window: tuple[float, float] | None = None  # its begin, and processor time then
        self._polled_at = now
        self._state = "?"
        self._doing = ""

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Take an event of the rank as a sign of activity."""
        self.idle_s = 0.0
        if event["event"] == "progress":
            self._doing = str(event.get("doing", ""))
        elif event["event"] == "finished":
            self._doing = "ending"

    def poll(self, now: float, sample: ProcessSample | None, *, excused: bool = False) -> None:
        """Judge by how its process looks. Call it at least once a second.

        Args:
            now: monotonic.
            sample: None: there is nothing to judge by.
            excused: the rank may be idle because its reports are not read.
        """
        gap, self._polled_at = now - self._polled_at, now
        if gap <= _FROZEN_S:
            self.idle_s += gap
        else:  # the supervisor itself was stopped, and perhaps the rank with it
            self._window = None
        self._state = "?" if sample is None else sample.state
        if sample is None or excused:
            self.idle_s = 0.0
            return
        if self._window is not None and now - self._window[0] < self._window_s:
            return
        before, self._window = self._window, (now, sample.cpu_s)
        worked = before is not None and sample.cpu_s - before[1] >= _BUSY * (now - before[0])
        # A rank that never reports what it does is not judged by its silence.
        if worked or (not self._doing and not self._is_stopped):
            self.idle_s = 0.0

    @property
    def is_suspicious(self) -> bool:
        """Whether it is stopped, or has been idle for more than half of its limit."""
        return self._is_stopped or self.idle_s > self.limit_s / 2

    def describe(self) -> str:
        """What it was doing, in words."""
        doing = self._doing or "starting"
        if self._is_stopped:
            return f"{doing}; stopped (state {self._state} in /proc)"
        return f"{doing}; idle for {self.idle_s:.0f} s" if self.is_suspicious else doing

    @property
    def _is_stopped(self) -> bool:
        return self._state in _STOPPED_STATES
