"""Watches the ranks of one node from start to end: all of them do their work, or none goes on.

One thread, one loop: it wakes for events, ends of processes and signals, forwards what ranks
report, and ends the others when one fails. Nothing it starts outlives it. What other nodes do, it
learns from `Nodes`, at each turn.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from anygauge.agent.failures import Failure, cause
from anygauge.agent.nodes import Nodes, Order
from anygauge.agent.outcome import JobFailure, JobOutcome, Report
from anygauge.agent.ranks import Rank
from anygauge.agent.wakeup import SIGNALLED, wakened_by_signals
from anygauge.interface import AnygaugeError, Job
from anygauge.util.processes import END_AT_ONCE

GRACE_S = 5.0
"""Seconds between `END_AT_ONCE` and SIGKILL."""

_TURN_S = 0.2  # bounds how long ago a rank was last seen alive
_TURN_WITHOUT_HANDLES_S = 0.02
_UNKILLABLE_S = 30.0
_REPEATED_SIGNAL_S = 0.5
_LIMITS = "launch.collective_timeout_s and the grace time"


def rank_numbers(job: Job, node_rank: int, local_rank: int) -> dict[str, str]:
    """The variables that tell a process which rank of the job it is, as torchrun names them."""
    count = job.launch.devices
    return {
        "RANK": str(node_rank * count + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(count),
    }


class Supervisor:
    """Starts one rank per device of this node and stays until all have ended.

    Args:
        rank_argv: the command of a rank; all ranks run the same.
        rank_environment: local rank -> its whole environment, but for its identity.
        nodes: the job's other nodes, and where events go.
        grace_s: seconds between `END_AT_ONCE` and SIGKILL when ranks are ended.
        cores: local rank -> logical processors that it is bound to.
        asked: signals, and when they came, that had arrived before.
    """

    def __init__(
        self,
        job: Job,
        *,
        node_rank: int,
        hostname: str,
        rank_argv: Sequence[str],
        rank_environment: Callable[[int], dict[str, str]],
        nodes: Nodes,
        grace_s: float = GRACE_S,
        cores: Mapping[int, tuple[int, ...]] | None = None,
        asked: list[tuple[int, float]] | None = None,
    ) -> None:
        self._job = job
        self._node_rank = node_rank
        self._hostname = hostname
        self._argv = rank_argv
        self._environment = rank_environment
        self._nodes = nodes
        self._grace_s = grace_s
        self._cores = cores or {}
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals = [] if asked is None else asked
        self._reading = True
        self._ended_with: int | None = None  # the signal that ranks were sent
        self._kill_at: float | None = None  # monotonic, as are the next two
        self._killed_at: float | None = None
        self._first_finish: float | None = None
        self._finish_told = 0.0
        self._reported = False
        self._limit_s = job.launch.collective_timeout_s + grace_s
        self._then = ""  # what the ranks were in when the first of them failed
        self._cancelled_by: int | None = None
        self._cancelled_at: float | None = None  # since the epoch: compared with failures

    def run(self) -> int:
        """Start the ranks, watch them and the other nodes to their end; call it from the main
        thread.

        Returns:
            The exit status: 0, that of the earliest failure, or 128 + the signal received.

        Raises:
            AnygaugeError: a rank cannot be started; those that were have been ended.
        """
        try:
            with wakened_by_signals(self._signals, self._selector):
                self._nodes.attach(self._selector)
                self._start()
                self._act_on_signals()  # one that has kept ranks from starting has its answer here
                while not self._over():
                    self._turn()
        finally:
            for rank in self._ranks:
                rank.abandon()
            self._selector.close()
        assert self._nodes.outcome is not None
        return self._conclude(self._nodes.outcome)

    def _over(self) -> bool:
        """Whether all ranks have ended, here and elsewhere; reports once those here have."""
        if any(rank.running for rank in self._ranks) and not self._given_up():
            return False
        if not self._reported:
            self._reported = True
            self._nodes.report(self._report())
        return self._nodes.over

    def _start(self) -> None:
        directory = self._job.start_directory
        count = self._job.launch.devices
        for local_rank in range(count):
            if self._signals:
                return
            numbers = rank_numbers(self._job, self._node_rank, local_rank)
            rank = int(numbers["RANK"])
            environment = {**self._environment(local_rank), **numbers}
            try:
                cores = self._cores.get(local_rank, ())
                # The rank holds a copy of the socket from then on; this one is closed.
                with self._nodes.store_socket(rank) as store:
                    listener = None if store is None else store.fileno()
                    started = Rank(
                        *(rank, local_rank, self._argv, environment, directory, cores),
                        listener=listener,
                        still_limit_s=self._limit_s,
                    )
            except OSError as error:
                raise AnygaugeError(
                    f"rank {rank} cannot be started on {self._hostname}: {error}"
                ) from error
            self._ranks.append(started)
            self._listen(started, True)
            if started.handle is not None:
                self._selector.register(started.handle, selectors.EVENT_READ)
            on = f" on cores {', '.join(map(str, cores))}" if cores else ""
            _note(f"rank {rank} started, process {started.pid}{on}")

    def _turn(self) -> None:
        """Wait for news, and act on it."""
        polled = any(rank.handle is None for rank in self._ranks)
        for key, _ in self._selector.select(_TURN_WITHOUT_HANDLES_S if polled else _TURN_S):
            if isinstance(key.data, Rank):
                self._read(key.data)
            elif key.data == SIGNALLED:
                os.read(key.fd, 512)  # the signal itself is in self._signals
        self._check_all()
        self._act_on_signals()
        for order in self._nodes.turn():
            self._obey(order)
        self._keep_time()
        self._balance_reading()

    def _check_all(self) -> None:
        now = time.time()  # one time for all, so that no order is read into their sequence
        for rank in self._ranks:
            if not rank.check(now):
                continue
            self._read(rank)
            self._listen(rank, False)
            if rank.handle is not None:
                self._selector.unregister(rank.handle)
            rank.release()
            _note(f"rank {rank.rank} ended with code {rank.code}")
            self._nodes.send("rank_exited", rank=rank.rank, code=rank.code, log=str(rank.log))
            if not (rank.ok or rank.stopped_in_order):
                self._fail()

    def _read(self, rank: Rank) -> None:
        for event, line in rank.read_events():
            if event is None:
                _note(f"rank {rank.rank} sent a line that is not an event: {line[:500]!r}")
                continue
            if event["event"] != "progress":  # for this agent alone
                self._nodes.forward(line)
            if self._first_finish is not None:
                self._finishing()  # who reports is not stuck
        if rank.silent:
            self._listen(rank, False)
        if rank.failure is not None:
            self._fail()
        if (rank.finished_at is not None or rank.stopped) and self._first_finish is None:
            self._finishing()

    def _finishing(self) -> None:
        """Ranks have nothing more to do but to wait for the last; other nodes' have not, either."""
        self._first_finish = now = time.monotonic()
        if now - self._finish_told > 1:
            self._finish_told = now
            self._nodes.tell(Order.FINISH)

    def _fail(self) -> None:
        self._keep_doings()
        self._end_ranks(END_AT_ONCE, self._grace_s)
        self._nodes.tell(Order.END)

    def _obey(self, order: Order) -> None:
        if order is Order.FINISH:
            self._first_finish = time.monotonic()
        elif order is Order.END:
            self._end_ranks(END_AT_ONCE, self._grace_s)
        elif order is Order.STOP:
            self._stop(self._nodes.signum or signal.SIGTERM, time.time())
        else:
            self._kill_ranks()

    def _end_ranks(self, signum: int, grace_s: float) -> None:
        """Send all that run a signal to end, and SIGKILL after a while.

        SIGTERM asks them to end the step under way and write a checkpoint; after a failure none of
        them can, and they are sent `END_AT_ONCE`. One that has reported its own failure is on its
        way out.
        """
        if self._ended_with in (signum, END_AT_ONCE):
            return
        self._ended_with = signum
        deadline = time.monotonic() + grace_s
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        for rank in self._ranks:
            # How a rank ends from here on may be our doing: settle first whether it is alive.
            rank.touch(time.time())
            if rank.failure is None:
                rank.signal(signum)

    def _kill_ranks(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)

    def _act_on_signals(self) -> None:
        if not self._signals:
            return
        signum, at = self._signals[0]
        if self._cancelled_at is None:
            _note(f"received {signal.Signals(signum).name}: ending the ranks")
            self._stop(signum, at)
            self._nodes.tell(Order.STOP, signum)
        # Schedulers deliver one request twice in a row, to the step and to its processes; and a
        # terminal that closes asks for nothing more than the Ctrl-C before it.
        again, later = self._signals[-1]
        if later - at > _REPEATED_SIGNAL_S and again in (signal.SIGTERM, signal.SIGINT):
            self._kill_ranks()
            self._nodes.tell(Order.KILL)

    def _stop(self, signum: int, at: float) -> None:
        if self._cancelled_at is None:
            self._cancelled_at, self._cancelled_by = at, signum
            self._end_ranks(signal.SIGTERM, self._job.stop_grace_s)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now > self._kill_at:
            self._kill_ranks()
        self._watch(now)
        if (
            self._kill_at is None
            and self._first_finish is not None
            and now - self._first_finish > self._limit_s
        ):
            late = next((rank for rank in self._ranks if rank.running), None)
            if late is None:
                return
            did = "did not end" if late.finished_at is not None else "did not finish"
            self._give_up(
                late,
                f"{did} within {self._limit_s:g} s after the first rank had finished its work "
                f"({_LIMITS}); it was killed",
            )

    def _watch(self, now: float) -> None:
        """End the job if a rank neither works nor reports: no library need ever notice."""
        for rank in self._ranks:
            if rank.running:
                rank.movement.turn(now, excused=not self._reading)
        if self._kill_at is not None:
            return
        at_work = [rank for rank in self._ranks if rank.at_work]
        still = max(at_work, key=lambda rank: rank.movement.still_s(now), default=None)
        if still is not None and still.movement.still_s(now) > still.movement.limit_s:
            self._give_up(
                still,
                f"neither worked nor reported anything for {still.movement.limit_s:g} s "
                f"({_LIMITS}); it was killed",
            )

    def _give_up(self, rank: Rank, what: str) -> None:
        """Kill all ranks because of one that does not go on."""
        self._keep_doings()
        rank.failure = Failure(rank=rank.rank, time=time.time(), what=what)
        self._ended_with, self._kill_at = END_AT_ONCE, time.monotonic()
        self._kill_ranks()
        self._nodes.tell(Order.END)

    def _keep_doings(self) -> None:
        """Before ranks are ended: what each was in, if one of them hangs."""
        now = time.monotonic()
        running = [rank for rank in self._ranks if rank.running]
        if not self._then and any(rank.movement.suspicious(now) for rank in running):
            doings = (f"rank {rank.rank}: {rank.movement.describe(now)}" for rank in running)
            self._then = "\n".join((f"the ranks on {self._hostname} then:", *doings))

    def _balance_reading(self) -> None:
        """Let ranks wait with their events while the follower is far behind."""
        if self._reading is not self._nodes.full:
            return
        self._reading = not self._reading
        for rank in self._ranks:
            self._listen(rank, self._reading and rank.running and not rank.silent)

    def _listen(self, rank: Rank, wanted: bool) -> None:
        if wanted is (rank.pipe in self._selector.get_map()):
            return
        if wanted:
            self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
        else:
            self._selector.unregister(rank.pipe)

    def _given_up(self) -> bool:
        """Whether a killed rank does not die: it waits inside the kernel, for a device say."""
        return self._killed_at is not None and time.monotonic() - self._killed_at > _UNKILLABLE_S

    def _report(self) -> Report:
        """What became of the ranks."""
        complete = len(self._ranks) == self._job.launch.devices
        in_order = complete and all(rank.stopped_in_order for rank in self._ranks)
        return Report(
            node_rank=self._node_rank,
            host=self._hostname,
            ok=complete and all(rank.ok for rank in self._ranks),
            stopped=(self._ranks[0].stopped or {}) if in_order else None,
            failures=tuple(
                self._job_failure(r, r.failure) for r in self._ranks if r.failure is not None
            ),
            signalled_at=self._cancelled_at,
            signum=self._cancelled_by,
        )

    def _job_failure(self, rank: Rank, failure: Failure) -> JobFailure:
        if self._then and not failure.for_user:
            failure = replace(failure, what=f"{failure.what}\n{self._then}")
        return JobFailure(
            time=failure.time,
            rank=rank.rank,
            by_signal=failure.by_signal,
            exit_status=failure.exit_status,
            final=failure.for_user,
            text=cause(
                failure,
                host=self._hostname,
                world_size=self._job.world_size,
                log=rank.log,
                log_offset=rank.log_offset,
            ),
        )

    def _conclude(self, outcome: JobOutcome) -> int:
        text = outcome.cause
        stuck = [rank for rank in self._ranks if rank.running]
        if stuck:
            text = f"{text}\nprocesses that SIGKILL does not end: {[rank.pid for rank in stuck]}"
        for rank in self._ranks:
            try:
                rank.write_result(self._state_of(rank, outcome.state), self._hostname)
            except OSError as error:
                _note(f"{rank.result} cannot be written: {error}")
        _note(f"ended: {outcome.state}, exit status {outcome.exit_status}")
        if outcome.state == "again":
            return outcome.exit_status
        self._nodes.send(
            "ended",
            state=outcome.state,
            exit_status=outcome.exit_status,
            cause=text,
            node_rank=self._node_rank,
        )
        return outcome.exit_status

    def _state_of(self, rank: Rank, state: str) -> str:
        if rank.ok:
            return "ok"
        if rank.stopped_in_order:
            return "stopped"
        if rank.running:
            return "stuck"
        if state == "cancelled":
            return "cancelled"
        return "failed" if rank.failure is not None else "stopped"


def _note(text: str) -> None:
    """A line in the agent's own log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent: {text}", file=sys.stderr, flush=True)
