"""A job that a service runs, followed by its coordinator's log and by what the service reports."""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from anygauge.interface import LOST, AnygaugeError, JobState, Plan, UnsupportedError
from anygauge.util.clients import (
    NoAnswerError,
    NotInstalledError,
    client_output,
    last_line,
    run_client,
)
from anygauge.util.events import ended_event, message_event, read_event
from anygauge.util.processes import parent_environment

Event = Mapping[str, Any]

POLL_S = 3.0
"""Seconds between two questions to the service."""
_READ_S = 0.2
"""Seconds between two looks at what has arrived."""


_Answer = tuple[JobState, tuple[str, ...] | None]


class Service(abc.ABC):
    """A service with one job of it: a dataclass of what the job is found by.

    Attributes:
        owner: who answers, in words.
        noun: what such a job is, for humans.
        gone: pattern of its complaint about a job that it does not know.
        log_delay_s: seconds that the coordinator's log may take to arrive once the service reports
            the end of the job.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    owner: ClassVar[str]
    noun: ClassVar[str]
    gone: ClassVar[str]
    log_delay_s = 15.0

    name: str

    @property
    def title(self) -> str:
        """The job, for humans."""
        return f"{self.noun} {self.name}"

    @property
    def record(self) -> Mapping[str, Any]:
        """By which the job is found again."""
        assert is_dataclass(self)
        return asdict(self)

    @abc.abstractmethod
    def state(self) -> JobState:
        """Ask the service about the job."""

    @abc.abstractmethod
    def log_command(self) -> tuple[str, ...] | None:
        """What prints the coordinator's output and follows it; None while there is none."""

    def whole_log(self, folder: Path) -> bytes:
        """The coordinator's output of an ended job; empty where `log_command` prints all of it.

        Args:
            folder: of the run, on this machine.
        """
        return b""

    @abc.abstractmethod
    def stop(self, *, force: bool) -> None:
        """Ask for the job's end.

        Args:
            force: without time for a checkpoint.

        Raises:
            AnygaugeError: the service refuses.
        """

    def answer(self, command: Sequence[str]) -> str | JobState:
        """What the client's command prints; the job's state where it fails."""
        done = run_client(command)
        if done.returncode == 0:
            return done.stdout
        if re.search(self.gone, done.stderr, re.DOTALL):
            return JobState(phase="gone", text=f"{self.title} is gone")
        text = f"{self.owner} does not answer: {last_line(done.stderr)}"
        return JobState(phase="silent", text=text)

    def end(self, client: str, command: Sequence[str], unless: str = r"\Z.") -> None:
        """Have the client ask for the job's end.

        Raises:
            AnygaugeError: it refuses, and not for the reason `unless`.
        """
        done = run_client(command)
        if done.returncode and not re.search(unless, done.stderr):
            raise AnygaugeError(f"{client} cannot end {self.title}: {last_line(done.stderr)}")


class ServiceLauncher:
    """What launchers of such jobs share.

    Attributes:
        service: of its jobs.
        title: of the service.
        called: a job of it, in words.
    """

    service: ClassVar[type[Service]]
    title: ClassVar[str]
    called: ClassVar[str]

    def submit(self, plan: Plan) -> ServiceJob:
        """Write the plan's files and create the job."""
        job = self.attach(plan.record, Path(plan.files[-1].path).parent)
        self.create(plan)
        return job

    def create(self, plan: Plan) -> None:
        """Write the plan's files, and run the command that submits them; raises as `submit`."""
        plan.write_files()
        try:
            done = run_client(plan.processes[0].argv)
        except NoAnswerError as error:
            name = plan.record["name"]
            raise NoAnswerError(
                f"{error}. The service may have accepted the job all the same, as {name}"
            ) from error
        if done.returncode:
            raise AnygaugeError(f"{self.title} refused the job: {client_output(done)}")

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> ServiceJob:
        """A job that was submitted before."""
        try:
            service = TypeAdapter(self.service).validate_python(dict(record))
        except ValidationError as error:
            raise UnsupportedError(f"{dict(record)} is not a record of {self.called}") from error
        return ServiceJob(service, run_directory)


class ServiceJob:
    """A submitted job. It outlives this process.

    The coordinator's agent prints events; the service keeps them as the coordinator's log.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._folder = folder
        self._log = folder / "logs" / "coordinator.log"
        self._client_log = folder / "logs" / "client.log"
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[_Answer | AnygaugeError] = queue.SimpleQueue()
        self._known: set[int] = set()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._complaints: set[str] = set()
        self._followed = False
        self._cancellations = 0

    @property
    def record(self) -> Mapping[str, Any]:
        """By which the job is found again."""
        return self._service.record

    def events(self) -> Iterator[Event]:
        """What the coordinator and the service report, until the job is over.

        Raises:
            AnygaugeError: this machine does not have the service's client.
        """
        reported, ended, over_at, fetched = "", None, None, False
        state = JobState(phase="waiting", text="")
        ask_at: float | None = time.monotonic()
        try:
            while True:
                for event in self._new_events():
                    if event["event"] == "ended":
                        # Where several agents write to one log, the coordinator's report counts.
                        if ended is None or event.get("node_rank") == 0:
                            ended = event
                    else:
                        # The service has started the job again: that was not its end.
                        ended = None if event["event"] == "started" else ended
                        yield event
                while not self._warnings.empty():
                    yield message_event(self._warnings.get(), "warning")
                now = time.monotonic()
                if ask_at is not None and now >= ask_at:
                    ask_at = None
                    threading.Thread(target=self._ask, daemon=True).start()
                elif not self._answers.empty():
                    state, ask_at = self._take_answer(self._answers.get()), now + POLL_S
                    if state.text != reported:
                        reported = state.text
                        yield message_event(reported)
                if not state.has_ended:
                    over_at, fetched = None, False
                else:
                    over_at = over_at or now
                    if ended is None and not fetched and now - over_at > self._service.log_delay_s:
                        fetched = True
                        for line in self._service.whole_log(self._folder).splitlines(True):
                            self._lines.put(line)
                    elif ended is not None or fetched:
                        yield self._end_event(state, ended)
                        return
                time.sleep(_READ_S)
        finally:
            if self._reader is not None:
                self._reader.kill()
                self._reader.wait()

    def state(self) -> JobState:
        """What the service reports of it."""
        return self._service.state()

    def cancel(self) -> None:
        """Ask the ranks to write a checkpoint and end; a second time, end the job.

        Raises:
            AnygaugeError: the service refuses, and nobody follows the job, or it is over.
        """
        if not self._followed and not self._cancellations and (state := self.state()).has_ended:
            raise AnygaugeError(f"{state.text}: there is nothing to end")
        self._cancellations += 1
        try:
            self._service.stop(force=self._cancellations > 1)
        except AnygaugeError as error:
            if not self._followed:  # the caller must know; a follower reports it as a warning
                raise
            self._warnings.put(str(error))

    def _ask(self) -> None:
        """Get the job's state, and the command for its log where nobody reads that."""
        try:
            state, command = self._service.state(), None
            if self._reader is None and state.phase != "silent":
                command = self._service.log_command()
            self._answers.put((state, command))
        except AnygaugeError as error:
            self._answers.put(error)

    def _take_answer(self, answer: _Answer | AnygaugeError) -> JobState:
        if not isinstance(answer, AnygaugeError):
            self._followed = True
            state, command = answer
            if command is not None and self._reader is None:
                self._read(command)
            return state
        if isinstance(answer, NotInstalledError):
            raise answer
        return JobState(phase="silent", text=str(answer))

    def _read(self, command: tuple[str, ...]) -> None:
        """Start reading; from the thread that follows, since for the kernel that is the parent."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._client_log.open("ab") as log:
            self._reader = reader = subprocess.Popen(
                # It ends with this process, however that ends.
                (sys.executable, "-m", "anygauge.util.processes", *command),
                env={**os.environ, **parent_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self._pump, args=(reader,), daemon=True).start()

    def _pump(self, reader: subprocess.Popen[bytes]) -> None:
        assert reader.stdout is not None
        for line in reader.stdout:
            self._lines.put(line)
        if reader.wait() > 0:
            self._complain()
        self._lines.put(None)

    def _complain(self) -> None:
        """Report why the coordinator's output cannot be read; each reason once."""
        reason = last_line(self._client_log.read_text(errors="replace"))
        if reason and reason not in self._complaints:
            self._complaints.add(reason)
            self._warnings.put(f"the first machine's output cannot be read: {reason}")

    def _new_events(self) -> Iterator[Event]:
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                if line is None:
                    # The reader ended, or its connection did. The next one repeats all lines.
                    self._reader = None
                    continue
                if hash(line) in self._known:
                    continue
                self._known.add(hash(line))
                # A service may put a time in front of an event.
                begin = line.find(b'{"event"')
                event = read_event(line[begin:]) if begin >= 0 else None
                if event is not None:
                    yield event
                else:
                    with self._log.open("ab") as log:
                        log.write(line)

    def _end_event(self, state: JobState, ended: Event | None) -> Event:
        if ended is not None and not (ended.get("state") == "ok" and state.phase == "failed"):
            return ended
        if self._cancellations:
            outcome, status = "cancelled", 143
        elif state.phase == "done":
            outcome, status = "ok", 0
        elif state.phase == "failed":
            outcome, status = "failed", 1
        else:
            outcome, status = "lost", LOST
        return ended_event(outcome, status, state.text)
