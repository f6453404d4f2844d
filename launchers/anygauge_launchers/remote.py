"""A job whose agents are at the far end of processes that this one holds: one for each node."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from anygauge.interface import (
    LOST,
    AnygaugeError,
    Plan,
    PlannedProcess,
    RunningJob,
    UnsupportedError,
)
from anygauge.util.files import write_text
from anygauge.util.processes import describe_exit, parent_environment
from anygauge.util.start import settled
from anygauge_launchers.held import keep

Event = Mapping[str, Any]

LEFT_ALONE_S = 5.0
"""Seconds in which the other nodes may end by themselves once one is gone."""


_ENDING_S = 5.0
"""More than a process needs to end that has closed its output."""
_FIRMNESS = 3
_WORDS = 8
"""Lines shown of the beginning and of the end of what a program said."""


class RemoteJob:
    """Agents that are tied to this process, by their standard input or by a signal."""

    record = None
    found: Literal["known"] = "known"

    def __init__(
        self, processes: list[_Connection], keeper: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._connections = processes
        self._keeper = keeper
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
        passed = {n: os.environ[n] for n in plan.pass_environment if n in os.environ}
        started: list[_Connection] = []
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for file in plan.files:
                write_text(file.path, file.text, file.mode)
            if not all(process.arguments for process in plan.processes):
                # What does not go through standard input waits in a file for the agents.
                write_text(logs.parent / "variables.json", json.dumps(passed), 0o600)
            for process in plan.processes:
                log = logs / f"{_program(process)}{process.node_rank}.log"
                started.append(_Connection(process, passed, log, plan.held))
            # The folder's lock: nobody else enters while ranks still save, even if this process is
            # killed. An ssh does not keep what it inherits.
            keeper = keep(plan.held, [connection.pid for connection in started])
        except OSError as error:
            for connection in started:
                connection.kill()
            raise AnygaugeError(f"cannot start the run in {logs.parent}: {error}") from error
        job = cls(started, keeper)
        for connection in started:
            threading.Thread(target=job._read, args=(connection,), daemon=True).start()
        return job

    def events(self) -> Iterator[Event]:
        """What the agents report, until all have ended; how the job ended comes last, once."""
        endings: dict[int, Event] = {}
        trouble: Event | None = None
        part_from: float | None = None
        live = set(self._connections)
        began = False
        while live:
            try:
                connection, event = self._arrived.get(timeout=0.2)
            except queue.Empty:
                if part_from is not None and time.monotonic() > part_from:
                    part_from = time.monotonic() + LEFT_ALONE_S
                    for other in live:
                        other.part()
                    # What it leaves behind may hold its output open, but has nothing to say.
                    live = {other for other in live if not other.parted}
                continue
            if event is not None:
                if event["event"] == "ended":
                    endings[int(event.get("node_rank", connection.node_rank))] = event
                    part_from = part_from or time.monotonic() + LEFT_ALONE_S
                else:
                    began = True
                    yield event
                continue
            live.discard(connection)
            if not endings and not self._cancellations:
                text = connection.why_it_ended()
                part_from = part_from or time.monotonic() + LEFT_ALONE_S
                state, status = ("lost", LOST) if began else ("failed", 1)
                trouble = trouble or {
                    "event": "ended", "state": state, "exit_status": status, "cause": text,
                }  # fmt: skip
        coordinator = endings.get(0)
        if (
            trouble is not None
            and coordinator is not None
            and coordinator.get("state") == "cancelled"
        ):
            coordinator = None  # it was let go of, since another node was not to be reached
        final = coordinator or trouble or next(iter(endings.values()), _CANCELLED)
        self._status = int(str(final["exit_status"]))
        yield final

    def status(self) -> str:
        """How many of its connections are open."""
        count = sum(connection.running for connection in self._connections)
        return f"{count} of {len(self._connections)} nodes connected"

    @property
    def alive(self) -> bool:
        """Whether any of its connections is open."""
        return any(connection.running for connection in self._connections)

    def cancel(self) -> None:
        """Ask the coordinator to end all ranks; again to kill them; a third time, let go of all."""
        self._cancellations += 1
        coordinator = self._connections[0]
        for connection in self._connections:
            if self._cancellations > 2:
                connection.kill()
            elif connection is coordinator or not coordinator.running:
                connection.ask_to_end()

    def wait(self) -> int:
        """Exit status of the job, once its events have ended."""
        if self._keeper is not None:
            # The next command is to find the folder free. A connection that lives on keeps it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(_ENDING_S)
        return self._status

    def _read(self, connection: _Connection) -> None:
        for event in connection.events():
            self._arrived.put((connection, event))
        self._arrived.put((connection, None))


class TiedLauncher:
    """What launchers share whose jobs end with the command that started them."""

    def submit(self, plan: Plan) -> RemoteJob:
        """Write the files and start every process.

        Raises:
            AnygaugeError: a file cannot be written, or a process cannot be started.
        """
        return RemoteJob.start(plan)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> RunningJob:
        """There is none to attach to.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{run_directory}: a job of the {type(self).__name__.lower()} launcher ends with the "
            "command that started it"
        )


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
        self._speaks = bool(planned.arguments)
        self._asked = self._parting = 0
        self._log = log
        with log.open("ab") as stderr:
            self._log_begin = stderr.seek(0, 2)
            self._process = subprocess.Popen(
                planned.argv,
                env={
                    **os.environ,
                    **passed,
                    **planned.environment,
                    # For `tied`; where standard input is the tie, nobody on the way takes it out.
                    **({} if self._speaks else parent_environment()),
                },
                stdin=subprocess.PIPE if self._speaks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=held,
                # Ctrl-C reaches the command line alone, which then ends the job in order.
                start_new_session=True,
            )
        if self._speaks:
            given = {
                "arguments": planned.arguments,
                "environment": {**passed, **planned.environment},
            }
            self._say(json.dumps(given))

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
        self._asked += 1
        if self._speaks:
            self._say("SIGTERM")
        else:
            self._process.send_signal(signal.SIGUSR1 if self._asked == 1 else signal.SIGTERM)

    @property
    def parted(self) -> bool:
        """Whether it was let go of at last, and has ended."""
        return self._parting > _FIRMNESS and not self.running

    def part(self) -> None:
        """Let go of a process that has nothing more to do, more and more firmly."""
        self._parting += 1
        if self._parting >= _FIRMNESS:
            self._process.kill()
        elif self._speaks and self._parting == 1:
            self._hang_up()
        else:
            self._process.terminate()

    def kill(self) -> None:
        """End the process; the agent's standard input ends with it."""
        self._process.kill()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def events(self) -> Iterator[Event]:
        """What the agent reports; what is not an event goes to the log (greetings of a shell)."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = _parse(line)
            if event is not None:
                yield event
                continue
            with settled(self._log).open("ab") as log:
                log.write(line)

    def why_it_ended(self) -> str:
        """Once its output has ended: its exit and its last words."""
        code = self._process.wait()
        log = settled(self._log)
        with log.open("rb") as file:
            file.seek(self._log_begin)
            text = file.read().decode(errors="replace")
        # Open MPI frames what it says with dashes.
        lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
        if len(lines) > 2 * _WORDS:
            lines[_WORDS:-_WORDS] = ["..."]
        words = "".join(f"\n  | {line}" for line in lines)
        return (
            f"node {self.node_rank} ({self._host}): {self._name} ended with {describe_exit(code)}"
            f"\nits log: {log}{words}"
        )


def _program(planned: PlannedProcess) -> str:
    """What is started: the name in front of its log's."""
    return next((n for n in ("ssh", "mpirun", "srun") if n in planned.argv[:8]), "srun")


_CANCELLED = {"event": "ended", "state": "cancelled", "exit_status": 143, "cause": "let go"}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
