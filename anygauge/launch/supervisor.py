"""Watches the ranks of one machine from start to end: when one fails, all end.

One thread runs one loop. At each turn it looks at the processes of the ranks, forwards what they
report, takes requests to end and the instructions of other machines (`Nodes`), and ends all ranks
when one fails. No process that it starts outlives that thread.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TextIO

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.attempt import Attempt, Requests
from anygauge.launch.nodes import Instruction, Nodes
from anygauge.launch.outcome import JobOutcome
from anygauge.launch.rank_process import RankProcess
from anygauge.launch.rank_start import RankArgv, rank_numbers
from anygauge.util.processes import REPEATED_SIGNAL_S
from anygauge.util.rendezvous import STORE_FD, file_of
from anygauge.util.run_lock import check_lock

GRACE_S = 5.0
"""Seconds between `END_AT_ONCE` and SIGKILL."""

_TURN_S = 0.1  # torchrun's, too; bounds how long ago a rank was last seen alive


@dataclass
class Supervisor:
    """Starts one rank per device of this machine, and watches them until those of all have ended.

    After a failure it starts them again, as often as the job allows.

    Attributes:
        nodes: the job's other nodes, and where events go.
        rank_argv: the command of a rank; all ranks run the same.
        rank_environment: local rank -> all its variables, except for those of `rank_numbers`.
        requests: to end the job; some may have arrived before.
        grace_s: seconds between `END_AT_ONCE` and SIGKILL when ranks are ended.
        cores: local rank -> logical processors that it is bound to.
        lock: of the run directory (`identity_of`); where it is another, nothing is written there.
        held: descriptors that ranks inherit: the lock is held until the last of them is gone.
        resume: the first attempt resumes from the newest checkpoint.
        log: of this machine; None: standard error.
    """

    job: Job
    nodes: Nodes
    _: KW_ONLY
    rank_argv: RankArgv
    rank_environment: Callable[[int], dict[str, str]]
    requests: Requests
    node_rank: int = 0
    hostname: str = field(default_factory=socket.gethostname)
    grace_s: float = GRACE_S
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    lock: str | None = None
    held: Sequence[int] = ()
    resume: bool = False
    log: TextIO | None = None

    def __post_init__(self) -> None:
        self._attempt = Attempt(self.job, self.hostname, self.grace_s)

    def run(self) -> int:
        """Run the ranks of this machine.

        Ranks end with the thread that calls this, whatever ends it.

        Returns:
            The exit status of the job: 0, that of the earliest failure, or 128 + the signal
            received.

        Raises:
            AnygaugeError: the run directory is not this run's any more, or a rank cannot be
                started; those that had started were ended.
        """
        with contextlib.closing(self.turns()) as turns:
            for _ in turns:
                self._wait()
        assert self.nodes.outcome is not None
        return self.nodes.outcome.exit_status

    def turns(self) -> Generator[None, None, None]:
        """What `run` does; pauses between turns."""
        while True:
            attempt = self._attempt = Attempt(self.job, self.hostname, self.grace_s)
            try:
                self._start()
                self._act_on_requests()  # one that kept ranks from starting is handled here
                while attempt.running_ranks:
                    yield
                    self._turn()
                self.nodes.report(attempt.report(self.node_rank))
                while not self.nodes.has_outcome:
                    yield
                    self._turn()
            finally:
                for rank in attempt.ranks:
                    rank.abandon()
            assert self.nodes.outcome is not None
            self._end_attempt(self.nodes.outcome)
            if self.nodes.outcome.state != "again":
                return
            self.nodes.restart()
            self.resume = True

    def write_log(self, text: str) -> None:
        """Write a line to the log; a full disk must not end a run."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {text}"
        with contextlib.suppress(OSError):
            print(line, file=self.log or sys.stderr, flush=True)

    def _start(self) -> None:
        check_lock(Path(self.job.run_directory), self.lock)  # starting a rank makes folders
        meeting = file_of(self.nodes.rendezvous)
        if meeting is not None:
            # Ranks of an attempt that was killed have left their keys there.
            Path(meeting).unlink(missing_ok=True)
        for local_rank in range(self.job.launch.devices):
            if not self.requests.received:
                self._start_rank(local_rank)

    def _start_rank(self, local_rank: int) -> None:
        numbers = rank_numbers(self.job, self.node_rank, local_rank)
        environment = {**self.rank_environment(local_rank), **numbers}
        number, cores = int(numbers["RANK"]), self.cores.get(local_rank, ())
        held = list(self.held)
        try:
            # Of an attempt before.
            Path(f"{self.job.collectives_record}{number}").unlink(missing_ok=True)
            # The rank inherits a copy of the socket; this one is closed.
            with self.nodes.store_socket(number) as store:
                if store is not None:
                    environment[STORE_FD] = str(store.fileno())
                    held.append(store.fileno())
                rank = RankProcess(
                    self.rank_argv(self.nodes.rendezvous, self.resume),
                    environment,
                    self.job.start_directory,
                    cores=cores,
                    held=held,
                    idle_limit_s=self._attempt.idle_limit_s,
                )
        except OSError as error:
            raise AnygaugeError(
                f"rank {number} cannot be started on {self.hostname}: {error}"
            ) from error
        self._attempt.ranks.append(rank)
        on = f" on cores {', '.join(map(str, cores))}" if cores else ""
        self.write_log(f"rank {number} started, process {rank.pid}{on}")

    def _wait(self) -> None:
        """Until a rank or a node has written something, or the turn is over."""
        with selectors.PollSelector() as selector:
            self.nodes.attach(selector)
            for rank in self._attempt.ranks:
                if not (rank.events_closed or self.nodes.is_full):
                    selector.register(rank.pipe, selectors.EVENT_READ)
            selector.select(_TURN_S)

    def _turn(self) -> None:
        attempt, reads = self._attempt, not self.nodes.is_full  # or the follower is far behind
        # One time for all, so that none seems to have died later for its place in this loop.
        now, wall = time.monotonic(), time.time()
        for rank in attempt.ranks:
            self._look_at(rank, now, wall, reads=reads)
        if any(rank.ended_badly for rank in attempt.ranks):  # after the last words of all
            attempt.fail()
            self.nodes.broadcast(Instruction.END)
        self._act_on_requests()
        for instruction in self.nodes.poll():
            self._obey(instruction)
        attempt.keep_time()

    def _look_at(self, rank: RankProcess, now: float, wall: float, *, reads: bool) -> None:
        was_running = rank.running
        for event, line in rank.poll(now, wall, reads=reads):
            if event["event"] != "progress":  # for this supervisor alone
                self.nodes.forward(line)
        if was_running and not rank.running:
            self.write_log(f"rank {rank.rank} ended with code {rank.code}")
            self.nodes.send("rank_exited", rank=rank.rank, code=rank.code, log=str(rank.log))

    def _obey(self, instruction: Instruction) -> None:
        if instruction is Instruction.END:
            self._attempt.fail()
        elif instruction is Instruction.STOP:
            self._attempt.stop(self.nodes.signum or signal.SIGTERM, time.time())
        elif instruction is Instruction.KILL:
            self._attempt.kill()

    def _act_on_requests(self) -> None:
        if not self.requests.received:
            return
        signum, at = self.requests.received[0]
        if self._attempt.requested is None:
            self.write_log(f"received {signal.Signals(signum).name}: ending the ranks")
            self._attempt.stop(signum, time.time() - (time.monotonic() - at))
            self.nodes.broadcast(Instruction.STOP, signum)
        # A terminal that closes adds nothing to the Ctrl-C before it.
        again, later = self.requests.received[-1]
        if later - at > REPEATED_SIGNAL_S and again in (signal.SIGTERM, signal.SIGINT):
            self._attempt.kill()
            self.nodes.broadcast(Instruction.KILL)

    def _end_attempt(self, outcome: JobOutcome) -> None:
        """Record how each rank ended, and report how the job did, or that it starts again."""
        ranks, text = self._attempt.ranks, outcome.cause
        stuck = [rank.pid for rank in ranks if rank.running]
        if stuck:
            text = f"{text}\nprocesses that SIGKILL did not end: {stuck}"
        try:
            check_lock(Path(self.job.run_directory), self.lock)
            for rank in ranks:
                rank.write_result(outcome.state, self.hostname)
        except (OSError, AnygaugeError) as error:
            self.write_log(f"how the ranks ended cannot be written: {error}")
        self.write_log(f"ended: {outcome.state}, exit status {outcome.exit_status}")
        if outcome.state != "again":
            fields = {"exit_status": outcome.exit_status, "cause": text, "kind": outcome.error_kind}
            self.nodes.send("ended", state=outcome.state, node_rank=self.node_rank, **fields)
        elif self.node_rank == 0:
            text = (
                f"{outcome.cause}\nstarting again from the newest checkpoint (restart "
                f"{self.nodes.restarts + 1} of {self.job.launch.max_restarts}, launch.max_restarts)"
            )
            self.nodes.send("message", level="warning", text=text)
