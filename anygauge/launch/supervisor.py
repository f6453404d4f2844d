"""Watches the ranks of one machine from start to end: when one fails, all end.

One thread runs one loop. It wakes for events, exits of processes and requests to end, forwards what
ranks report, and ends the others when one fails. No process that it starts outlives that thread.
At each turn it takes the instructions of other machines from `Nodes`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import FrameType

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.nodes import Instruction, Nodes
from anygauge.launch.outcome import Failure, JobFailure, JobOutcome, NodeReport
from anygauge.launch.rank_process import RankArgv, RankProcess, rank_numbers
from anygauge.util.processes import END_AT_ONCE, REPEATED_SIGNAL_S
from anygauge.util.rendezvous import file_of
from anygauge.util.run_lock import check_lock

GRACE_S = 5.0
"""Seconds between `END_AT_ONCE` and SIGKILL."""

_TURN_S = 0.2  # bounds how long ago a rank was last seen alive
_TURN_WITHOUT_HANDLES_S = 0.02
_UNKILLABLE_S = 30.0
_LIMITS = "launch.collective_timeout_s and the grace time"


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each is a request to end. Schedulers send SIGUSR1 before the time limit."""


class Requests:
    """Requests to end a job: signals, each with its time (monotonic), in the order of arrival.

    They come from signal handlers or from another thread, and wake whoever selects on this.
    """

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)

    def add(self, signum: int) -> None:
        """Ask for the end, as if this signal had arrived."""
        self.received.append((signum, time.monotonic()))
        with contextlib.suppress(OSError):  # full: it is awake
            os.write(self._writer, b"\0")

    def collect_signals(self) -> None:
        """From now on, each signal is a request. For the main thread."""

        def note(signum: int, frame: FrameType | None) -> None:
            self.add(signum)

        for number in SIGNALS:
            signal.signal(number, note)

    def __bool__(self) -> bool:
        return bool(self.received)

    def fileno(self) -> int:
        """For selectors."""
        return self._reader

    def read(self) -> None:
        """Sleep again: what has arrived is in `received`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 512)


def note_on_stderr(text: str) -> None:
    """Write a line to this process's own log; a full disk must not end a run."""
    with contextlib.suppress(OSError):
        print(dated(text), file=sys.stderr, flush=True)


def dated(text: str) -> str:
    """A line of a log."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {text}"


@dataclass
class Supervisor:
    """Starts one rank per device of this node, and watches them until all have ended.

    Attributes:
        rank_argv: the command of a rank; all ranks run the same.
        rank_environment: local rank -> all its variables, except for those of `rank_numbers`.
        nodes: the job's other nodes, and where events go.
        grace_s: seconds between `END_AT_ONCE` and SIGKILL when ranks are ended.
        cores: local rank -> logical processors that it is bound to.
        lock: of the run directory (`identity_of`); where it is another, no results are recorded.
        held: descriptors that ranks inherit: the lock is held until the last of them is gone.
        requests: to end the job; some may have arrived before.
        note: takes a line for this machine's log.
    """

    job: Job
    _: KW_ONLY
    node_rank: int
    hostname: str
    rank_argv: Sequence[str]
    rank_environment: Callable[[int], dict[str, str]]
    nodes: Nodes
    grace_s: float = GRACE_S
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    lock: str | None = None
    held: Sequence[int] = ()
    requests: Requests = field(default_factory=Requests)
    note: Callable[[str], None] = note_on_stderr

    def __post_init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._reading = True
        self._ended_with: int | None = None  # the signal that ranks were sent
        self._kill_at: float | None = None  # monotonic, as are the next two
        self._killed_at: float | None = None
        self._first_finish: float | None = None
        self._finish_sent = 0.0
        self._reported = False
        self._limit_s = self.job.launch.collective_timeout_s + self.grace_s
        self._doings = ""  # what the ranks were doing when the first of them failed
        self._cancelled_by: int | None = None
        self._cancelled_at: float | None = None  # since the epoch: compared with failures

    def run(self) -> int:
        """Start the ranks, and watch them and the other nodes until all have ended.

        Ranks end with the thread that calls this, whatever ends it.

        Returns:
            The exit status: 0, that of the earliest failure, or 128 + the signal received.

        Raises:
            AnygaugeError: a rank cannot be started; those that had started were ended.
        """
        try:
            self._selector.register(self.requests, selectors.EVENT_READ)
            self.nodes.attach(self._selector)
            self._start()
            self._act_on_requests()  # one that kept ranks from starting is handled here
            while not self._over():
                self._turn()
        finally:
            for rank in self._ranks:
                rank.abandon()
            self._selector.close()
        assert self.nodes.outcome is not None
        return self._conclude(self.nodes.outcome)

    def _over(self) -> bool:
        """Whether the ranks of all nodes have ended; reports once those of this node have."""
        if any(rank.running for rank in self._ranks) and not self._is_unkillable():
            return False
        if not self._reported:
            self._reported = True
            self.nodes.report(self._report())
        return self.nodes.over

    @property
    def _must_not_start(self) -> bool:
        """Whether this node or another was asked to end."""
        return bool(self.requests) or self._ended_with is not None or self._killed_at is not None

    def _start(self) -> None:
        count = self.job.launch.devices
        for local_rank in range(count):
            if self._must_not_start:
                return
            numbers = rank_numbers(self.job, self.node_rank, local_rank)
            rank = int(numbers["RANK"])
            environment = {**self.rank_environment(local_rank), **numbers}
            try:
                cores = self.cores.get(local_rank, ())
                self._record_of(rank).unlink(missing_ok=True)  # of an attempt before
                # The rank inherits a copy of the socket; this one is closed.
                with self.nodes.store_socket(rank) as store:
                    listener = None if store is None else store.fileno()
                    started = RankProcess(
                        rank,
                        local_rank,
                        self.rank_argv,
                        environment,
                        self.job.start_directory,
                        cores,
                        listener=listener,
                        held=self.held,
                        idle_limit_s=self._limit_s,
                    )
            except OSError as error:
                raise AnygaugeError(
                    f"rank {rank} cannot be started on {self.hostname}: {error}"
                ) from error
            self._ranks.append(started)
            self._listen(started, True)
            if started.handle is not None:
                self._selector.register(started.handle, selectors.EVENT_READ)
            on = f" on cores {', '.join(map(str, cores))}" if cores else ""
            self.note(f"rank {rank} started, process {started.pid}{on}")

    def _turn(self) -> None:
        """Wait until something happens, and act on it."""
        polled = any(rank.handle is None for rank in self._ranks)
        failed = False
        for key, _ in self._selector.select(_TURN_WITHOUT_HANDLES_S if polled else _TURN_S):
            if isinstance(key.data, RankProcess):
                failed |= self._read(key.data)
            elif key.fileobj is self.requests:
                self.requests.read()
        if failed:  # only now, since other ranks' last words may say why
            self._fail()
        self._check_all()
        self._act_on_requests()
        for instruction in self.nodes.poll():
            self._follow(instruction)
        self._keep_time()
        self._balance_reading()

    def _check_all(self) -> None:
        # One time for all, so that none seems to have died later for its place in this loop.
        now = time.time()
        for rank in self._ranks:
            if not rank.poll_exit(now):
                continue
            if self._read(rank):
                self._fail()
            self._listen(rank, False)
            if rank.handle is not None:
                self._selector.unregister(rank.handle)
            rank.reap()
            self.note(f"rank {rank.rank} ended with code {rank.code}")
            self.nodes.send("rank_exited", rank=rank.rank, code=rank.code, log=str(rank.log))
            if not (rank.ok or rank.stopped_cleanly):
                self._fail()

    def _read(self, rank: RankProcess) -> bool:
        """Take what it has written since; returns whether it has failed."""
        for event, line in rank.read_events():
            if event is None:
                self.note(f"rank {rank.rank} sent a line that is not an event: {line[:500]!r}")
                continue
            if event["event"] != "progress":  # for this agent alone
                self.nodes.forward(line)
            if self._first_finish is not None:
                self._expect_finish()  # a rank that reports is not stuck
        if rank.events_closed:
            self._listen(rank, False)
        if (rank.finished_at is not None or rank.stopped) and self._first_finish is None:
            self._expect_finish()
        return rank.failure is not None

    def _expect_finish(self) -> None:
        """Allow the remaining ranks, on all nodes, a limited time to finish from now on."""
        self._first_finish = now = time.monotonic()
        if now - self._finish_sent > 1:
            self._finish_sent = now
            self.nodes.broadcast(Instruction.FINISH)

    def _fail(self) -> None:
        self._record_doings()
        self._end_ranks(END_AT_ONCE, self.grace_s)
        self.nodes.broadcast(Instruction.END)

    def _follow(self, instruction: Instruction) -> None:
        if instruction is Instruction.FINISH:
            self._first_finish = time.monotonic()
        elif instruction is Instruction.END:
            self._end_ranks(END_AT_ONCE, self.grace_s)
        elif instruction is Instruction.STOP:
            self._stop(self.nodes.signum or signal.SIGTERM, time.time())
        else:
            self._kill_ranks()

    def _end_ranks(self, signum: int, grace_s: float) -> None:
        """Send all running ranks a signal to end, and SIGKILL after `grace_s`.

        SIGTERM asks them to finish the current step and write a checkpoint. After a failure none of
        them can, and they are sent `END_AT_ONCE`. A rank that has reported its own failure is about
        to exit, and is sent nothing.
        """
        if self._ended_with in (signum, END_AT_ONCE):
            return
        self._ended_with = signum
        deadline = time.monotonic() + grace_s
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        for rank in self._ranks:
            # From here on this agent may be the cause of an exit: note first whether it is alive.
            rank.mark_alive(time.time())
            if rank.failure is None:
                rank.signal(signum)

    def _kill_ranks(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)

    def _act_on_requests(self) -> None:
        if not self.requests:
            return
        signum, at = self.requests.received[0]
        if self._cancelled_at is None:
            self.note(f"received {signal.Signals(signum).name}: ending the ranks")
            self._stop(signum, time.time() - (time.monotonic() - at))
            self.nodes.broadcast(Instruction.STOP, signum)
        # A terminal that closes adds nothing to the Ctrl-C before it.
        again, later = self.requests.received[-1]
        if later - at > REPEATED_SIGNAL_S and again in (signal.SIGTERM, signal.SIGINT):
            self._kill_ranks()
            self.nodes.broadcast(Instruction.KILL)

    def _stop(self, signum: int, at: float) -> None:
        if self._cancelled_at is None:
            self._cancelled_at, self._cancelled_by = at, signum
            self._end_ranks(signal.SIGTERM, self.job.stop_grace_s)

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
        """End the job if a rank neither works nor reports; libraries may never notice."""
        for rank in self._ranks:
            if rank.running:
                rank.watchdog.poll(now, excused=not self._reading)
        if self._kill_at is not None:
            return
        at_work = [rank for rank in self._ranks if rank.at_work]
        idlest = max(at_work, key=lambda rank: rank.watchdog.idle_s(now), default=None)
        if idlest is not None and idlest.watchdog.idle_s(now) > idlest.watchdog.limit_s:
            self._give_up(
                idlest,
                f"neither worked nor reported anything for {idlest.watchdog.limit_s:g} s "
                f"({_LIMITS}); it was killed",
            )

    def _give_up(self, rank: RankProcess, what: str) -> None:
        """Kill all ranks because one of them hangs."""
        self._record_doings()
        rank.failure = Failure(rank=rank.rank, time=time.time(), what=what)
        self._ended_with, self._kill_at = END_AT_ONCE, time.monotonic()
        self._kill_ranks()
        self.nodes.broadcast(Instruction.END)

    def _record_doings(self) -> None:
        """Before ranks are ended: if one of them seems to hang, note what each is doing."""
        now = time.monotonic()
        running = [rank for rank in self._ranks if rank.running]
        if not self._doings and any(rank.watchdog.suspicious(now) for rank in running):
            doings = (f"rank {rank.rank}: {rank.watchdog.describe(now)}" for rank in running)
            self._doings = "\n".join((f"what the ranks on {self.hostname} were doing:", *doings))

    def _balance_reading(self) -> None:
        """Stop reading events of ranks while the follower is far behind."""
        if self._reading is not self.nodes.full:
            return
        self._reading = not self._reading
        for rank in self._ranks:
            self._listen(rank, self._reading and rank.running and not rank.events_closed)

    def _listen(self, rank: RankProcess, wanted: bool) -> None:
        if wanted is (rank.pipe in self._selector.get_map()):
            return
        if wanted:
            self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
        else:
            self._selector.unregister(rank.pipe)

    def _is_unkillable(self) -> bool:
        """Whether a killed rank does not exit: it waits inside the kernel, perhaps for a device."""
        return self._killed_at is not None and time.monotonic() - self._killed_at > _UNKILLABLE_S

    def _report(self) -> NodeReport:
        """How the ranks of this node ended."""
        complete = len(self._ranks) == self.job.launch.devices
        clean = complete and all(rank.stopped_cleanly for rank in self._ranks)
        return NodeReport(
            node_rank=self.node_rank,
            host=self.hostname,
            ok=complete and all(rank.ok for rank in self._ranks),
            stopped=(self._ranks[0].stopped or {}) if clean else None,
            failures=tuple(
                self._job_failure(r, r.failure) for r in self._ranks if r.failure is not None
            ),
            signalled_at=self._cancelled_at,
            signum=self._cancelled_by,
        )

    def _job_failure(self, rank: RankProcess, failure: Failure) -> JobFailure:
        if self._doings and not failure.for_user:
            failure = replace(failure, what=f"{failure.what}\n{self._doings}")
        return JobFailure(
            time=failure.time,
            rank=rank.rank,
            by_signal=failure.by_signal,
            exit_status=failure.exit_status,
            final=failure.for_user,
            text=failure.cause(
                host=self.hostname,
                world_size=self.job.world_size,
                log=rank.log,
                log_offset=rank.log_offset,
                record=self._record_of(rank.rank),
            ),
        )

    def _record_of(self, rank: int) -> Path:
        return Path(f"{self.job.collectives_record}{rank}")

    def _conclude(self, outcome: JobOutcome) -> int:
        text = outcome.cause
        stuck = [rank for rank in self._ranks if rank.running]
        if stuck:
            text = f"{text}\nprocesses that SIGKILL did not end: {[rank.pid for rank in stuck]}"
        for rank in self._ranks:
            try:
                check_lock(Path(self.job.run_directory), self.lock)
                rank.write_result(self._state_of(rank, outcome.state), self.hostname)
            except (OSError, AnygaugeError) as error:
                self.note(f"{rank.result} cannot be written: {error}")
        self.note(f"ended: {outcome.state}, exit status {outcome.exit_status}")
        if outcome.state == "again":
            return outcome.exit_status
        self.nodes.send(
            "ended",
            state=outcome.state,
            exit_status=outcome.exit_status,
            cause=text,
            node_rank=self.node_rank,
        )
        return outcome.exit_status

    def _state_of(self, rank: RankProcess, state: str) -> str:
        if rank.ok:
            return "ok"
        if rank.stopped_cleanly:
            return "stopped"
        if rank.running:
            return "stuck"
        if state == "cancelled":
            return "cancelled"
        return "failed" if rank.failure is not None else "stopped"


def supervise(
    job: Job,
    nodes: Nodes,
    *,
    node_rank: int,
    hostname: str,
    rank_argv: RankArgv,
    rank_environment: Callable[[int], dict[str, str]],
    requests: Requests,
    grace_s: float = GRACE_S,
    cores: Mapping[int, tuple[int, ...]] | None = None,
    lock: str | None = None,
    held: Sequence[int] = (),
    resume: bool = False,
    note: Callable[[str], None] = note_on_stderr,
) -> int:
    """Run the ranks of this machine, and again after a failure as often as the job allows.

    Args:
        resume: the first attempt resumes.
        rank_environment, requests, grace_s, cores, lock, held, note: see `Supervisor`.

    Returns:
        The exit status of this machine's part of the job.

    Raises:
        AnygaugeError: the run directory is not this run's any more, or a rank cannot be started.
    """
    while True:
        check_lock(Path(job.run_directory), lock)  # starting a rank makes folders
        meeting = file_of(nodes.rendezvous)
        if meeting is not None:
            # Ranks of an attempt that was killed have left their keys there.
            Path(meeting).unlink(missing_ok=True)
        status = Supervisor(
            replace(job, rendezvous=nodes.rendezvous),
            node_rank=node_rank,
            hostname=hostname,
            rank_argv=rank_argv(nodes.rendezvous, resume),
            rank_environment=rank_environment,
            nodes=nodes,
            grace_s=grace_s,
            cores=cores or {},
            lock=lock,
            held=held,
            requests=requests,
            note=note,
        ).run()
        if nodes.outcome is None or nodes.outcome.state != "again":
            return status
        if node_rank == 0:
            text = (
                f"{nodes.outcome.cause}\nstarting again from the newest checkpoint (restart "
                f"{nodes.restarts + 1} of {job.launch.max_restarts}, launch.max_restarts)"
            )
            nodes.send("message", level="warning", text=text)
        nodes.restart()
        resume = True
