"""The ranks of one attempt on one machine: when they are ended, and how they ended."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from types import FrameType

from anygauge.interface import Job
from anygauge.launch.outcome import JobFailure, NodeReport, stopped_text
from anygauge.launch.rank_failure import locate_failure
from anygauge.launch.rank_process import RankProcess
from anygauge.util.processes import END_AT_ONCE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each is a request to end. Schedulers send SIGUSR1 before the time limit."""

_UNKILLABLE_S = 30.0
_GRAVITY: dict[int | None, int] = {None: 0, signal.SIGTERM: 1, END_AT_ONCE: 2, signal.SIGKILL: 3}


class Requests:
    """Requests to end a job, from signals or another thread.

    Attributes:
        received: signals, each with its time (monotonic), in the order of arrival.
    """

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []

    def add(self, signum: int, frame: FrameType | None = None) -> None:
        """Ask for the end, as if this signal had arrived."""
        self.received.append((signum, time.monotonic()))

    def collect_signals(self) -> None:
        """Make each signal a request from now on. For the main thread."""
        for number in SIGNALS:
            signal.signal(number, self.add)


class Attempt:
    """The ranks that have started.

    They run until they end by themselves, until they are requested to stop, until one of them
    fails, or until they are killed: each of these ends them at least as soon as the one before.

    Attributes:
        requested: signal and time (since the epoch) of the request to stop, if there was one.
        idle_limit_s: how long a rank may neither work nor report.
    """

    def __init__(self, job: Job, hostname: str, grace_s: float) -> None:
        self.ranks: list[RankProcess] = []
        self.requested: tuple[int, float] | None = None
        self.idle_limit_s = job.launch.collective_timeout_s + grace_s
        self._job, self._hostname, self._grace_s = job, hostname, grace_s
        self._sent: int | None = None  # the gravest signal that ranks were sent
        self._kill_at = math.inf  # monotonic
        self._doings = ""  # what the ranks were doing when the first of them failed

    @property
    def running_ranks(self) -> list[RankProcess]:
        """The ranks whose end is worth waiting for.

        One that was killed and does not exit waits inside the kernel, perhaps for a device.
        """
        if self._sent == signal.SIGKILL and time.monotonic() > self._kill_at + _UNKILLABLE_S:
            return []
        return [rank for rank in self.ranks if rank.running]

    def stop(self, signum: int, at: float) -> None:
        """Let the ranks finish their step, write a checkpoint and end, as the user requested."""
        if self.requested is None:
            self.requested = (signum, at)
            self._end(signal.SIGTERM, self._job.stop_grace_s)

    def fail(self) -> None:
        """End the ranks, which can write no checkpoint since a rank or a node has failed."""
        self._end(END_AT_ONCE, self._grace_s)

    def kill(self) -> None:
        """Kill the ranks."""
        self._end(signal.SIGKILL, 0.0)

    def keep_time(self) -> None:
        """Kill the ranks when their grace is over, or one hangs: libraries may never notice."""
        if time.monotonic() > self._kill_at:
            self.kill()
        idlest = max(self.running_ranks, key=lambda rank: rank.watchdog.idle_s, default=None)
        if self._sent is not None or idlest is None:
            return
        limit_s = idlest.watchdog.limit_s
        if idlest.watchdog.idle_s > limit_s:
            text = (
                f"neither worked nor reported anything for {limit_s:g} s "
                "(launch.collective_timeout_s and the grace time); it was killed"
            )
            idlest.failure = JobFailure(rank=idlest.rank, time=time.time(), text=text)
            self.kill()

    def report(self, node_rank: int) -> NodeReport:
        """How the ranks of this machine ended."""
        complete = len(self.ranks) == self._job.launch.devices
        clean = complete and all(rank.stopped_cleanly for rank in self.ranks)
        signum, at = self.requested or (None, None)
        return NodeReport(
            node_rank=node_rank,
            host=self._hostname,
            ok=complete and all(rank.succeeded for rank in self.ranks),
            stopped=stopped_text(self.ranks[0].stopped or {}) if clean else None,
            failures=tuple(
                locate_failure(
                    rank.failure,
                    host=self._hostname,
                    world_size=self._job.world_size,
                    log=rank.log,
                    log_offset=rank.log_offset,
                    more=self._doings,
                    record=Path(f"{self._job.collectives_record}{rank.rank}"),
                )
                for rank in self.ranks
                if rank.failure is not None
            ),
            signalled_at=at,
            signum=signum,
        )

    def _end(self, signum: int, grace_s: float) -> None:
        """Send the ranks a signal, and SIGKILL after `grace_s`; unless they had a graver one.

        A rank that has reported its own failure is about to exit, and is sent nothing.
        """
        before = _GRAVITY[self._sent]
        if _GRAVITY[signum] <= before:
            return
        if signum != signal.SIGTERM and before < _GRAVITY[END_AT_ONCE]:
            self._doings = self._describe_ranks()
        self._sent = signum
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        for rank in self.ranks:
            if rank.failure is None or signum == signal.SIGKILL:
                rank.signal(signum)

    def _describe_ranks(self) -> str:
        """What each rank is doing, where one of them seems to hang."""
        running = [rank for rank in self.ranks if rank.running]
        if not any(rank.watchdog.is_suspicious for rank in running):
            return ""
        doings = (f"rank {rank.rank}: {rank.watchdog.describe()}" for rank in running)
        return "\n".join((f"what the ranks on {self._hostname} were doing:", *doings))
