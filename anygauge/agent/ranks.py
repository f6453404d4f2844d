"""One rank as its agent holds it: a process group, a pipe of events, a log, and its outcome."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.agent.affinity import bound
from anygauge.agent.failures import Failure, from_event, from_exit
from anygauge.agent.progress import Movement
from anygauge.interface import STOPPED
from anygauge.util.events import EVENTS_FD, read_event
from anygauge.util.files import write_text
from anygauge.util.processes import END_AT_ONCE, parent_environment
from anygauge.util.rendezvous import STORE_FD
from anygauge.util.start import settled

_PF_EXITING = 0x4  # <linux/sched.h>
_CHUNKS = 16
_LONGEST_LINE = 16 * 1024 * 1024


class Rank:
    """A started rank. It leads its own session, so that its helper processes can end with it.

    Attributes:
        seen_alive: last time (seconds since the epoch) at which it was known to run.
        observed_exit: when its end was noticed, or None while it runs.
        code: its exit code as `subprocess` reports it, once it ended.
        finished_at: time of its ``finished`` event.
        stopped: its ``stopped`` event, if it ended at its request.
        failure: how it failed, if it did so on its own account.
        silent: it has closed its pipe of events.
        movement: whether it moves, and what it is in.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        cores: tuple[int, ...] = (),
        listener: int | None = None,
        still_limit_s: float = math.inf,
    ) -> None:
        """Start the process.

        Args:
            directory: where its log and its result belong, until they are put in place.
            cores: logical processors that it is bound to; empty for no binding.
            listener: descriptor that it inherits: where the ranks' store is to listen.
            still_limit_s: how long it may neither work nor report.

        Raises:
            OSError: it cannot be started, or its log cannot be written.
        """
        self.rank = rank
        self.local_rank = local_rank
        self._log = directory / "logs" / f"rank{rank}.log"
        self._result = directory / "ranks" / f"rank{rank}.json"
        self.code: int | None = None
        self.observed_exit: float | None = None
        self.finished_at: float | None = None
        self.stopped: Mapping[str, Any] | None = None
        self.failure: Failure | None = None
        self._signalled: set[int] = set()
        self._pending = b""
        self.silent = False
        self.result.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.pipe, writer = os.pipe()
        try:
            os.set_blocking(self.pipe, False)
            with self.log.open("ab") as log, bound(cores):
                self.log_offset = log.seek(0, 2)
                self.started = self.seen_alive = time.time()
                self._process = subprocess.Popen(
                    list(argv),
                    env={
                        **environment,
                        **parent_environment(),
                        EVENTS_FD: str(writer),
                        "PYTHONUNBUFFERED": "1",
                        **({} if listener is None else {STORE_FD: str(listener)}),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writer,) if listener is None else (writer, listener),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(writer)
        self.movement = Movement(self._process.pid, still_limit_s)
        self.handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel or a sandbox: then we poll
                self.handle = os.pidfd_open(self._process.pid)

    @property
    def log(self) -> Path:
        """The file of what it prints, where it is now."""
        return settled(self._log)

    @property
    def result(self) -> Path:
        """The file of what became of it."""
        return settled(self._result)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its end has not been noticed yet."""
        return self.observed_exit is None

    @property
    def at_work(self) -> bool:
        """Whether it has not reported its end in any way."""
        return self.running and self.finished_at is None and not self.stopped and not self.failure

    @property
    def ok(self) -> bool:
        """Whether it did all its work and left in order."""
        return self.code == 0 and self.finished_at is not None and self.failure is None

    @property
    def stopped_in_order(self) -> bool:
        """Whether it was asked to end, and left with a checkpoint to go on from."""
        return self.code == STOPPED and self.stopped is not None and self.failure is None

    def signal(self, signum: int) -> None:
        """Send a signal to its whole process group."""
        if not self.running:
            return
        if not self._dying():  # otherwise its death is not our doing
            self._signalled.add(signum)
        self._signal_group(signum)

    def read_events(self) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
        """The lines that it has written since: (event, line), or (None, line) for other text.

        Bounded, so that a rank which writes without end does not keep its agent from the others.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(_CHUNKS):
                chunk = os.read(self.pipe, 65536)
                if not chunk:
                    self.silent = True
                    return
                *lines, self._pending = (self._pending + chunk).split(b"\n")
                for line in lines:
                    yield self._take(line), line + b"\n"
                if len(self._pending) > _LONGEST_LINE:
                    yield None, self._pending + b"\n"
                    self._pending = b""

    def touch(self, now: float) -> None:
        """Record that it was alive at `now`, a moment that has just passed, if it is."""
        if self.running and not self._dying():
            self.seen_alive = now

    def check(self, now: float) -> bool:
        """Notice whether it has ended; True the first time that it has.

        The process is not reaped here: its number, and so its group's, stays taken until
        `release`, and a signal to the group cannot reach strangers.
        """
        if not self.running:
            return False
        if not self._ended():
            self.touch(now)
            return False
        self.observed_exit = time.time()
        return True

    def release(self) -> None:
        """End what is left of its group, reap it, and judge its exit. Call it once, after `check`
        returned True and the last events were read.
        """
        self._signal_group(signal.SIGKILL)
        self.code = self._process.wait()
        self._close()
        assert self.observed_exit is not None
        in_order = self.ok or self.stopped_in_order
        if self.failure is None and not in_order and not self._ended_by_us(self.code):
            self.failure = from_exit(
                self.rank,
                self.code,
                finished=self.finished_at is not None,
                seen_alive=self.seen_alive,
                observed=self.observed_exit,
            )

    def abandon(self) -> None:
        """Kill the group of a rank that still runs, and reap it if it ends soon."""
        if not self.running:
            return
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(timeout=5)
            self.observed_exit = time.time()
        self._close()

    def write_result(self, state: str, host: str) -> None:
        """Write what became of it to ``ranks/rankN.json``."""
        failure = self.failure
        record = {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "host": host,
            "pid": self.pid,
            "state": state,
            "code": self.code,
            "signal": -self.code if self.code is not None and self.code < 0 else None,
            "started": self.started,
            "finished": self.finished_at,
            "ended": self.observed_exit,
            "failed": failure.time if failure else None,
            "what": failure.what if failure else None,
            "error": dict(failure.error) if failure and failure.error else None,
            "log": str(self.log),
        }
        write_text(self.result, json.dumps(record, indent=2) + "\n")

    def _ended(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _dying(self) -> bool:
        """Whether the kernel has begun to take it down.

        Peers notice that early: connections close seconds before the process is gone, if a driver
        has memory to clean up.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return self._ended()
        # proc(5): the name, field 2, may hold spaces and brackets; flags are field 9.
        return self._ended() or bool(int(stat.rpartition(b")")[2].split()[6]) & _PF_EXITING)

    def _take(self, line: bytes) -> dict[str, Any] | None:
        event = read_event(line)
        if event is None:
            return None
        self.movement.reported(event)
        if event["event"] == "finished":
            self.finished_at = time.time()
        elif event["event"] == "stopped":
            self.stopped = event
        elif event["event"] == "failed" and self.failure is None:
            self.failure = from_event(self.rank, event, time.time())
        return event

    def _ended_by_us(self, code: int) -> bool:
        if code == -signal.SIGKILL:
            return signal.SIGKILL in self._signalled
        if not self._signalled:
            return False
        # 0 and 143: a rank that handles SIGTERM itself and leaves in order.
        return code in (0, -signal.SIGTERM, 128 + signal.SIGTERM, -END_AT_ONCE)

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # only a zombie is left
            os.killpg(self.pid, signum)

    def _close(self) -> None:
        os.close(self.pipe)
        if self.handle is not None:
            os.close(self.handle)
