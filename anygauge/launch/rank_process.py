"""One rank as its agent sees it: its processes, events, log, watchdog, and how it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anygauge.interface import STOPPED, Job
from anygauge.launch.decision import Decision
from anygauge.launch.outcome import Failure
from anygauge.util.events import EVENTS_FD, read_event
from anygauge.util.files import write_text
from anygauge.util.processes import END_AT_ONCE, parent_environment
from anygauge.util.rendezvous import STORE_FD

SHORTEST_LIMIT_S = 3.0
"""Ranks report once a second, so a shorter silence means nothing."""

_CHUNKS = 16
_LONGEST_LINE = 16 * 1024 * 1024
_BUSY = 0.1  # of one processor; threads of libraries that only wait use far less
_LONGEST_WINDOW_S = 10.0
_FROZEN_S = 2.0
_STOPPED_STATES = "Tt"  # proc(5): stopped by a signal, stopped by a debugger
_PF_EXITING = 0x4  # <linux/sched.h>


def rank_numbers(job: Job, node_rank: int, local_rank: int) -> dict[str, str]:
    """Variables that tell a process which rank of the job it is, named as torchrun names them."""
    count = job.launch.devices
    return {
        "RANK": str(node_rank * count + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(count),
    }


RankArgv = Callable[[str, bool], Sequence[str]]
"""Where ranks meet, and whether they resume from the newest checkpoint -> the command of a rank."""


def rank_argv(
    job_file: str, lock: str, decided: Decision | None, rendezvous: str, resume: bool
) -> tuple[str, ...]:
    """The command of a rank.

    Args:
        lock: of the run directory (`identity_of`).
        decided: None: what the job file says.
    """
    return (
        *(sys.executable, "-m", "anygauge.launch.rank", "--job", job_file),
        *("--lock", lock, "--rendezvous", rendezvous, *(("--resume",) if resume else ())),
        *(() if decided is None else ("--decided", decided.dump())),
    )


class RankProcess:
    """A started rank. It leads its own session, so that its helper processes can end with it.

    Attributes:
        last_alive: last time (seconds since the epoch) at which it was known to run.
        log: the file of what it prints.
        result: the file that records how it ended.
        observed_exit: when its exit was noticed; None while it runs.
        code: its exit code as `subprocess` reports it, once it has exited.
        finished_at: when its ``finished`` event arrived.
        stopped: its ``stopped`` event, if it ended on request.
        failure: how it failed, unless it ended because this agent ended it.
        events_closed: it has closed its pipe of events.
        watchdog: how long it has been idle, and what it was doing.
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
        held: Sequence[int] = (),
        idle_limit_s: float = math.inf,
    ) -> None:
        """Start the process.

        Args:
            directory: of its log and its result.
            cores: logical processors that it is bound to; empty for no binding.
            listener: descriptor that it inherits: the socket of the ranks' store.
            held: further descriptors that it inherits.
            idle_limit_s: how long it may neither work nor report.

        Raises:
            OSError: it cannot be started, or its log cannot be written.
        """
        self.rank = rank
        self.local_rank = local_rank
        self.log = directory / "logs" / f"rank{rank}.log"
        self.result = directory / "ranks" / f"rank{rank}.json"
        self.code: int | None = None
        self.observed_exit: float | None = None
        self.finished_at: float | None = None
        self.stopped: Mapping[str, Any] | None = None
        self.failure: Failure | None = None
        self._signalled: set[int] = set()
        self._pending = b""
        self.events_closed = False
        self.result.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.pipe, writer = os.pipe()
        try:
            os.set_blocking(self.pipe, False)
            with self.log.open("ab") as log:
                self.log_offset = log.seek(0, 2)
                self.started = self.last_alive = time.time()
                self._process = _started(argv, environment, cores, log, writer, listener, held)
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(writer)
        self.watchdog = Watchdog(self._process.pid, idle_limit_s)
        self.handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel or a sandbox: then we poll
                self.handle = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its exit has not been noticed yet."""
        return self.observed_exit is None

    @property
    def at_work(self) -> bool:
        """Whether it runs and has reported no end of its work."""
        return self.running and self.finished_at is None and not self.stopped and not self.failure

    @property
    def ok(self) -> bool:
        """Whether it finished its work and exited with 0."""
        return self.code == 0 and self.finished_at is not None and self.failure is None

    @property
    def stopped_cleanly(self) -> bool:
        """Whether it ended on request and left a checkpoint to resume from."""
        return self.code == STOPPED and self.stopped is not None and self.failure is None

    def signal(self, signum: int) -> None:
        """Send a signal to its whole process group."""
        if not self.running:
            return
        if not self._exiting():  # otherwise this agent is not the cause of its death
            self._signalled.add(signum)
        self._signal_group(signum)

    def read_events(self) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
        """The lines that it has written since: (event, line), or (None, line) for other text.

        Reads a bounded amount, so that a rank which writes without end does not keep its agent
        from the others.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(_CHUNKS):
                chunk = os.read(self.pipe, 65536)
                if not chunk:
                    self.events_closed = True
                    return
                *lines, self._pending = (self._pending + chunk).split(b"\n")
                for line in lines:
                    yield self._parse_event(line), line + b"\n"
                if len(self._pending) > _LONGEST_LINE:
                    yield None, self._pending + b"\n"
                    self._pending = b""

    def mark_alive(self, now: float) -> None:
        """Record that it was alive at `now`, a moment that has just passed, if it was."""
        if self.running and not self._exiting():
            self.last_alive = now

    def poll_exit(self, now: float) -> bool:
        """Notice whether it has exited; True the first time only.

        The process is not reaped yet: its id, and so its group's, stays taken until `reap`, and no
        signal to the group can reach an unrelated process.
        """
        if not self.running:
            return False
        if not self._exited():
            self.mark_alive(now)
            return False
        self.observed_exit = time.time()
        return True

    def reap(self) -> None:
        """Kill what is left of its group, reap it, and judge its exit.

        Call it once, after `poll_exit` returned True and the last events were read.
        """
        self._signal_group(signal.SIGKILL)
        self.code = self._process.wait()
        self._close()
        assert self.observed_exit is not None
        clean = self.ok or self.stopped_cleanly
        if self.failure is None and not clean and not self._ended_by_agent(self.code):
            self.failure = Failure.from_exit(
                self.rank,
                self.code,
                finished=self.finished_at is not None,
                last_alive=self.last_alive,
                observed=self.observed_exit,
            )

    def abandon(self) -> None:
        """Kill the group of a rank that still runs, and reap it if it exits soon."""
        if not self.running:
            return
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(timeout=5)
            self.observed_exit = time.time()
        self._close()

    def write_result(self, state: str, host: str) -> None:
        """Record how it ended in ``ranks/rankN.json``."""
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

    def _exited(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _exiting(self) -> bool:
        """Whether the kernel has begun to take it down.

        Peers notice that early: connections close seconds before the process is gone, if a driver
        has memory to clean up.
        """
        sample = sample_process(self.pid)
        return self._exited() or (sample is not None and sample.exiting)

    def _parse_event(self, line: bytes) -> dict[str, Any] | None:
        event = read_event(line)
        if event is None:
            return None
        self.watchdog.reported(event)
        if event["event"] == "finished":
            self.finished_at = time.time()
        elif event["event"] == "stopped":
            self.stopped = event
        elif event["event"] == "failed" and self.failure is None:
            self.failure = Failure.from_event(self.rank, event, time.time())
        return event

    def _ended_by_agent(self, code: int) -> bool:
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
        if self.handle is not None:
            os.close(self.handle)


def _started(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cores: tuple[int, ...],
    log: IO[bytes],
    events: int,
    listener: int | None,
    held: Sequence[int],
) -> subprocess.Popen[bytes]:
    with bound_to(cores):
        return subprocess.Popen(
            list(argv),
            env={
                **environment,
                **parent_environment(),
                EVENTS_FD: str(events),
                "PYTHONUNBUFFERED": "1",  # so that a log is complete when its rank is killed
                **({} if listener is None else {STORE_FD: str(listener)}),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(events, *held, *(() if listener is None else (listener,))),
            start_new_session=True,
        )


@contextlib.contextmanager
def bound_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind processes that are started meanwhile to these cores; an empty tuple binds nothing."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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
    """How long one rank has been idle, and what it was doing. Times are monotonic.

    A rank is active while it reports or uses the processor. During long work of its own (loading,
    saving) a thread of the rank reports again and again. During a step each micro-batch is
    reported, and a rank that waits for its peers reports nothing.

    Args:
        limit_s: how long it may be idle.
    """

    def __init__(
        self,
        pid: int,
        limit_s: float,
        *,
        sample: Callable[[int], ProcessSample | None] = sample_process,
        now: float | None = None,
    ) -> None:
        self.limit_s = max(SHORTEST_LIMIT_S, limit_s)
        self._pid = pid
        self._sample = sample
        self._window_s = min(_LONGEST_WINDOW_S, self.limit_s / 5)
        self._active_at = self._polled_at = time.monotonic() if now is None else now
        self._window: tuple[float, float] | None = None  # its begin, and processor time then
        self._doing = ""

    def reported(self, event: Mapping[str, Any], now: float | None = None) -> None:
        """Take an event of the rank as a sign of activity."""
        self._active_at = time.monotonic() if now is None else now
        if event.get("event") == "progress":
            self._doing = str(event.get("doing", ""))

    def poll(self, now: float, *, excused: bool = False) -> None:
        """Look at the process. Call it at least once a second.

        Args:
            excused: the rank may be idle because its reports are not read.
        """
        gap, self._polled_at = now - self._polled_at, now
        if gap > _FROZEN_S:  # the agent itself was stopped, and perhaps the rank with it
            self._active_at = min(now, self._active_at + gap)
            self._window = None
        if excused:
            self._active_at = now
            return
        if self._window is not None and now - self._window[0] < self._window_s:
            return
        sample = self._sample(self._pid)
        if sample is None:
            self._active_at = now  # nothing to judge by; `RankProcess.poll_exit` notices its exit
            return
        before, self._window = self._window, (now, sample.cpu_s)
        worked = before is not None and sample.cpu_s - before[1] >= _BUSY * (now - before[0])
        # A rank that never reports what it does is not judged by its silence.
        if worked or (not self._doing and sample.state not in _STOPPED_STATES):
            self._active_at = now

    def idle_s(self, now: float) -> float:
        """Seconds since it was last active."""
        return now - self._active_at

    def suspicious(self, now: float) -> bool:
        """Whether it is stopped, or has been idle for more than half of its limit."""
        return self._state() in _STOPPED_STATES or self.idle_s(now) > self.limit_s / 2

    def describe(self, now: float) -> str:
        """What it was doing, in words."""
        doing = self._doing or "starting"
        state = self._state()
        if state in _STOPPED_STATES:
            return f"{doing}; stopped (state {state} in /proc)"
        idle = self.idle_s(now)
        return f"{doing}; idle for {idle:.0f} s" if idle > self.limit_s / 2 else doing

    def _state(self) -> str:
        sample = self._sample(self._pid)
        return "?" if sample is None else sample.state
