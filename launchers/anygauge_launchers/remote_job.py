"""A job on other machines that ends with this process, which holds a connection to each agent.

A connection is a process such as an ssh or an mpirun: it leads to agents, which end when it does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from anygauge.interface import (
    LOST,
    AnygaugeError,
    Job,
    JobState,
    Plan,
    PlannedFile,
    PlannedProcess,
    RunningJob,
    UnsupportedError,
)
from anygauge.util.clients import first_and_last
from anygauge.util.events import ended_event, read_event
from anygauge.util.processes import describe_exit, parent_environment

Event = Mapping[str, Any]

_PEERS_END_S = 5.0
"""Seconds in which the other nodes may end by themselves once one has ended; then again between two
attempts to close their connections, each firmer than the one before."""
_KILL_AT = 3
"""The attempt from which a connection is killed."""
_HOLDER_ENDS_S = 5.0
"""More than the process that holds the run directory's lock needs to end after the connections."""
_CANCELLED = ended_event(
    "cancelled", 143, "the connections to the agents were closed before an agent reported the end"
)
_ALIVE_S = 5


def keep_alive(job: Job) -> tuple[str, ...]:
    """Options by which an ssh ends once its machine is gone.

    Agents notice first, after `lost_after_s`: they can say which node is lost.
    """
    times = 1 + math.ceil(job.launch.silence_s / _ALIVE_S)
    return ("-o", f"ServerAliveInterval={_ALIVE_S}", "-o", f"ServerAliveCountMax={times}")


def job_file(job: Job) -> PlannedFile:
    """The job, beside the run file, to be accepted with it; `Job.load` finds it where it is then.

    The run file's variables stand in it by value, and some may be secrets.
    """
    path = Path(job.run_file).with_name("job.json")
    return PlannedFile(path=str(path), text=job.dump(), mode=0o600)


class ForegroundLauncher:
    """What launchers share whose jobs end with the command that started them."""

    def submit(self, plan: Plan) -> RunningJob:
        """Write the files and start every process."""
        return RemoteJob.start(plan)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> RunningJob:
        """Always refused: such a job has ended."""
        raise UnsupportedError(
            f"{run_directory}: a job of the {type(self).__name__.lower()} launcher ends with the "
            "command that started it"
        )


class RemoteJob:
    """Agents that end with this process: it holds their standard input, or they get a signal."""

    record = None

    def __init__(
        self, connections: list[_Connection], lock_holder: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._connections = connections
        self._lock_holder = lock_holder
        self._arrived: queue.SimpleQueue[tuple[_Connection, Event | None]] = queue.SimpleQueue()
        self._cancellations = 0
        self._status = 1

    @classmethod
    def start(cls, plan: Plan) -> RemoteJob:
        """Write the files, start the processes, and give each agent its arguments.

        Raises:
            AnygaugeError: a file cannot be written, or a process cannot be started.
        """
        logs = Path(plan.files[0].path).parent / "logs"
        started: list[_Connection] = []
        try:
            logs.mkdir(parents=True, exist_ok=True)
            plan.write_files()
            for process in plan.processes:
                log = logs / f"{_program(process)}{process.node_rank}.log"
                started.append(_Connection(process, plan.passed, log, plan.held))
            # The run directory's lock: nobody else enters while ranks still save, even if this
            # process is killed. An ssh does not keep what it inherits.
            lock_holder = _keep_open(plan.held, [connection.pid for connection in started])
        except OSError as error:
            for connection in started:
                connection.kill()
            raise AnygaugeError(f"cannot start the run in {logs.parent}: {error}") from error
        job = cls(started, lock_holder)
        for connection in started:
            threading.Thread(target=job._read, args=(connection,), daemon=True).start()
        return job

    def events(self) -> Iterator[Event]:
        """What the agents report, until all have ended; how the job ended comes last, once."""
        endings: dict[int, Event] = {}
        trouble: Event | None = None
        close_at: float | None = None
        live = set(self._connections)
        began = False
        while live:
            try:
                connection, event = self._arrived.get(timeout=0.2)
            except queue.Empty:
                if close_at is not None and time.monotonic() > close_at:
                    close_at = time.monotonic() + _PEERS_END_S
                    for other in live:
                        other.close()
                    # A process that it has left behind may hold its output open, but has nothing to
                    # report.
                    live = {other for other in live if not other.closed}
                continue
            if event is not None:
                if event["event"] == "ended":
                    endings[int(event.get("node_rank", connection.node_rank))] = event
                    close_at = close_at or time.monotonic() + _PEERS_END_S
                else:
                    began = True
                    yield event
                continue
            live.discard(connection)
            if not endings and not self._cancellations:
                text = connection.why_it_ended()
                close_at = close_at or time.monotonic() + _PEERS_END_S
                state, status = ("lost", LOST) if began else ("failed", 1)
                trouble = trouble or ended_event(state, status, text)
        coordinator = endings.get(0)
        if trouble and coordinator and coordinator.get("state") == "cancelled":
            coordinator = None  # its connection was closed because another node had been lost
        final = coordinator or trouble or next(iter(endings.values()), _CANCELLED)
        self._status = int(str(final["exit_status"]))
        if self._lock_holder is not None:
            # The next command must find the folder free. A connection that lives on keeps it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._lock_holder.wait(_HOLDER_ENDS_S)
        yield final

    def state(self) -> JobState:
        """How many of its connections are open."""
        count = sum(connection.running for connection in self._connections)
        text = f"{count} of {len(self._connections)} nodes connected"
        if count:
            return JobState(phase="running", text=text)
        return JobState(phase="failed" if self._status else "done", text=text)

    def cancel(self) -> None:
        """Ask the coordinator to end all ranks; again: to kill them; a third time, kill all
        connections."""
        self._cancellations += 1
        coordinator = self._connections[0]
        for connection in self._connections:
            if self._cancellations > 2:
                connection.kill()
            elif connection is coordinator or not coordinator.running:
                connection.ask_to_end()

    def _read(self, connection: _Connection) -> None:
        for event in connection.events():
            self._arrived.put((connection, event))
        self._arrived.put((connection, None))


class _Connection:
    """The process that leads to one node's agent."""

    def __init__(
        self,
        planned: PlannedProcess,
        passed: Mapping[str, str],
        log: Path,
        held: Sequence[int] = (),
    ) -> None:
        self.node_rank = planned.node_rank
        self._host = planned.host
        self._name = _program(planned)
        self._writes = bool(planned.arguments)
        self._requests = self._closings = 0
        self._log = log
        with log.open("ab") as stderr:
            self._log_begin = stderr.seek(0, 2)
            self._process = subprocess.Popen(
                planned.argv,
                env={
                    **os.environ,
                    **passed,
                    # For `python -m anygauge.util.processes`. An agent whose standard input ends
                    # with this process needs none, and nobody on the way to it would remove it.
                    **({} if self._writes else parent_environment()),
                },
                stdin=subprocess.PIPE if self._writes else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=held,
                # Ctrl-C reaches the command line alone, which then ends the job in order.
                start_new_session=True,
            )
        if self._writes:
            given = {"arguments": planned.arguments, "environment": passed}
            self._write(json.dumps(given))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask_to_end(self) -> None:
        """Have the agents end their ranks; again: at once."""
        self._requests += 1
        if self._writes:
            self._write("SIGTERM")
        else:
            self._process.send_signal(signal.SIGUSR1 if self._requests == 1 else signal.SIGTERM)

    @property
    def closed(self) -> bool:
        """Whether it was killed by `close`, and has ended."""
        return self._closings > _KILL_AT and not self.running

    def close(self) -> None:
        """End a process that has nothing more to do, each time more firmly."""
        self._closings += 1
        if self._closings >= _KILL_AT:
            self._process.kill()
        elif self._writes and self._closings == 1:
            with contextlib.suppress(OSError):
                self._input.close()
        else:
            self._process.terminate()

    def kill(self) -> None:
        """End the process; the agent's standard input ends with it."""
        self._process.kill()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def events(self) -> Iterator[Event]:
        """What the agent reports; other lines, such as a shell's greeting, go to the log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = read_event(line)
            if event is not None:
                yield event
                continue
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                log.write(line)

    def why_it_ended(self) -> str:
        """Its exit status and what it printed to its log; call it once its output has ended."""
        code = self._process.wait()
        log = self._log
        with log.open("rb") as file:
            file.seek(self._log_begin)
            text = file.read().decode(errors="replace")
        # Open MPI frames its messages with dashes.
        lines = first_and_last([one.strip() for one in text.splitlines() if one.strip(" -")])
        shown = "".join(f"\n  | {line}" for line in lines)
        return (
            f"node {self.node_rank} ({self._host}): {self._name} ended with {describe_exit(code)}"
            f"\nits log: {log}{shown}"
        )


def _program(planned: PlannedProcess) -> str:
    """The program that is started: its log is named after it."""
    return next((n for n in ("ssh", "mpirun", "srun") if n in planned.argv[:8]), "srun")


_LOCK_HOLDER = """\
import select, sys
ends = {int(number) for number in sys.argv[1:]}
waiting = select.poll()
for end in ends:
    waiting.register(end, select.POLLIN)
while ends:
    for end, _ in waiting.poll():
        waiting.unregister(end)
        ends.discard(end)
"""


def _keep_open(held: Sequence[int], processes: Sequence[int]) -> subprocess.Popen[bytes] | None:
    """Keep the descriptors `held` open until all of `processes` have ended, even without this one.

    A program that leads to other machines may close the descriptors that it inherits; ssh does so
    first of all. So a small process has them, and waits for such programs.

    Args:
        processes: ids of children that nobody has waited for.

    Returns:
        That process, which ends by itself; None where there is nothing to keep, or where the kernel
        has no descriptors of processes (Linux before 5.3).

    Raises:
        OSError: it cannot be started.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for process in processes if held else ():
            try:
                end = os.pidfd_open(process)
            except (AttributeError, OSError):
                return None
            stack.callback(os.close, end)
            ends.append(end)
        if not ends:
            return None
        return subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _LOCK_HOLDER, *map(str, ends)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(*held, *ends),
            start_new_session=True,
        )
