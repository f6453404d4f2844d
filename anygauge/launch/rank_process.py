"""One rank as its supervisor sees it: its process, events, log, and how it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.interface import STOPPED
from anygauge.launch.outcome import JobFailure
from anygauge.launch.rank_failure import exit_failure, reported_failure
from anygauge.launch.rank_start import start_rank
from anygauge.launch.watchdog import ProcessSample, Watchdog, sample_process
from anygauge.util.events import read_event
from anygauge.util.files import write_text
from anygauge.util.processes import END_AT_ONCE

_PIPE_SIZE = 2**20
"""At least: pipe(7) has 64 KiB."""


class RankProcess:
    """A started rank. It leads its own session, so that its helper processes can end with it.

    Attributes:
        last_alive: last time (seconds since the epoch) at which it was known to run.
        log: the file of what it prints; this start begins at `log_offset` in it, in bytes.
        result: the file that records how it ended.
        observed_exit: when its exit was noticed; None while it runs.
        code: its exit code as `subprocess` reports it, once it has exited.
        finished_at: when its ``finished`` event arrived.
        stopped: its ``stopped`` event, if it ended on request.
        failure: how it failed, unless it ended because its supervisor ended it.
        error: class and message as it reported them, if it did.
        events_closed: nothing more can be read from `pipe`.
        watchdog: how long it has been idle, and what it was doing.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        *,
        cores: tuple[int, ...] = (),
        held: Sequence[int] = (),
        idle_limit_s: float = math.inf,
    ) -> None:
        """Start the process.

        Args:
            environment: all its variables, those of `rank_numbers` among them.
            directory: of its log and its result.
            cores: logical processors that it is bound to; empty for no binding.
            held: descriptors that it inherits.
            idle_limit_s: how long it may neither work nor report.

        Raises:
            OSError: it cannot be started, or its log cannot be written.
        """
        self.rank, self.local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
        self.log = directory / "logs" / f"rank{self.rank}.log"
        self.result = directory / "ranks" / f"rank{self.rank}.json"
        self._begin(idle_limit_s)
        self.result.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.log_offset = log.seek(0, 2)
            self._process, self.pipe = start_rank(argv, environment, log, cores, held)

    def _begin(self, idle_limit_s: float) -> None:
        self.watchdog = Watchdog(idle_limit_s, time.monotonic())
        self.started = self.last_alive = time.time()
        self.code: int | None = None
        self.observed_exit: float | None = None
        self.finished_at: float | None = None
        self.stopped: Mapping[str, Any] | None = None
        self.failure: JobFailure | None = None
        self.error: Mapping[str, Any] | None = None
        self.events_closed = False
        self._pending = b""
        self._signalled: set[int] = set()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its exit has not been noticed yet."""
        return self.observed_exit is None

    @property
    def succeeded(self) -> bool:
        """Whether it finished its work and exited with 0."""
        return self.code == 0 and self.finished_at is not None and self.failure is None

    @property
    def stopped_cleanly(self) -> bool:
        """Whether it ended on request and left a checkpoint to resume from."""
        return self.code == STOPPED and self.stopped is not None and self.failure is None

    @property
    def ended_badly(self) -> bool:
        """Whether the others must end, too: it has failed, or exited with its work not done."""
        exited = self.code is not None and not (self.succeeded or self.stopped_cleanly)
        return exited or self.failure is not None

    def signal(self, signum: int) -> None:
        """Send a signal to its whole process group."""
        if not self.running:
            return
        now, sample = time.time(), self._sample()
        if sample is None or not sample.exiting:  # otherwise it dies of something else
            self.last_alive = now
            self._signalled.add(signum)
        self._signal_group(signum)

    def poll(self, now: float, wall: float, *, reads: bool) -> list[tuple[dict[str, Any], bytes]]:
        """Look at its process, and take the events that it has written since, and their lines.

        Args:
            now, wall: a moment that has just passed, monotonic and since the epoch.
            reads: take events also while it runs.
        """
        exited = self.running and self._has_exited()
        if exited:
            self.observed_exit = time.time()
        elif self.running:
            sample = self._sample()
            # Peers notice early that the kernel takes it down: connections close seconds before the
            # process is gone, if a driver has memory to clean up.
            if sample is None or not sample.exiting:
                self.last_alive = wall
            self.watchdog.poll(now, sample, excused=not reads)
        events = self._read() if reads or exited else []
        if exited:
            self._reap()
        return events

    def abandon(self) -> None:
        """Kill the group of a rank that still runs, and reap it if it exits soon."""
        if self.running:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.code = self._process.wait(timeout=5)
                self.observed_exit = time.time()
            self._close()

    def write_result(self, outcome: str, host: str) -> None:
        """Record how it ended in ``ranks/rankN.json``.

        Args:
            outcome: the state of the job.
        """
        states = {
            "ok": self.succeeded,
            "stopped": self.stopped_cleanly,
            "stuck": self.running,
            "cancelled": outcome == "cancelled",
            "failed": self.failure is not None,
        }
        record = {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "host": host,
            "pid": self.pid,
            "state": next((state for state, holds in states.items() if holds), "stopped"),
            "code": self.code,
            "signal": -self.code if self.code is not None and self.code < 0 else None,
            "started": self.started,
            "finished": self.finished_at,
            "ended": self.observed_exit,
            "failed": self.failure and self.failure.time,
            "what": self.failure and self.failure.text,
            "error": self.error,
            "log": str(self.log),
        }
        write_text(self.result, json.dumps(record, indent=2) + "\n")

    def _read(self) -> list[tuple[dict[str, Any], bytes]]:
        try:
            chunk = b"" if self.events_closed else os.read(self.pipe, _PIPE_SIZE)
        except BlockingIOError:
            return []
        self.events_closed = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        events = [(event, line + b"\n") for line in lines if (event := read_event(line))]
        for event, _ in events:
            self._take_event(event)
        return events

    def _reap(self) -> None:
        """Kill what is left of its group, reap it, and judge its exit.

        Only now: until then its id, and so its group's, stays taken, and no signal to the group can
        reach an unrelated process.
        """
        self._signal_group(signal.SIGKILL)
        self.code = self._process.wait()
        self._close()
        assert self.observed_exit is not None
        if self.ended_badly and self.failure is None and not self._ended_by_supervisor(self.code):
            self.failure = exit_failure(
                self.rank,
                self.code,
                finished=self.finished_at is not None,
                last_alive=self.last_alive,
                observed=self.observed_exit,
            )

    def _sample(self) -> ProcessSample | None:
        return sample_process(self.pid)

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _take_event(self, event: Mapping[str, Any]) -> None:
        self.watchdog.take_event(event)
        if event["event"] == "finished":
            self.finished_at = time.time()
        elif event["event"] == "stopped":
            self.stopped = event
        elif event["event"] == "failed" and self.failure is None:
            self.failure = reported_failure(self.rank, event, time.time())
            self.error = {"class": event.get("error"), "message": event.get("message")}

    def _ended_by_supervisor(self, code: int) -> bool:
        if code == -signal.SIGKILL:
            return signal.SIGKILL in self._signalled
        # 0 and 143: a rank that handles SIGTERM itself and exits cleanly.
        orderly = (0, -signal.SIGTERM, 128 + signal.SIGTERM, -END_AT_ONCE)
        return bool(self._signalled) and code in orderly

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # only a zombie is left
            os.killpg(self.pid, signum)

    def _close(self) -> None:
        os.close(self.pipe)
        self.events_closed = True
