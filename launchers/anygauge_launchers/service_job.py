"""A job that a cluster's service runs: followed by its coordinator's log and by the service."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

from anygauge.interface import LOST, AnygaugeError
from anygauge.util.processes import parent_environment
from anygauge_launchers.clients import NotInstalledError, last_line

Event = Mapping[str, Any]

ASK_S = 3.0
"""How often the service is asked."""
_GLANCE_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the service says of a job.

    Attributes:
        phase: ``waiting`` for machines or images, ``running``, or how it ended; ``gone``: the
            service does not know it (any more); ``silent``: the service does not answer.
        text: the same in its own words, with its reason.
    """

    phase: Literal["waiting", "running", "done", "failed", "stopped", "gone", "silent"]
    text: str


_Answer = tuple[Seen, tuple[str, ...] | None]


class Service(abc.ABC):
    """One job in the hands of a cluster's service: a dataclass of what it is found by.

    Attributes:
        settling_s: seconds for the coordinator's last words after the service knows the end.
    """

    __slots__ = ()
    settling_s = 15.0

    @property
    def record(self) -> Mapping[str, Any]:
        """By which it is found again."""
        assert is_dataclass(self)
        return asdict(self)

    @abc.abstractmethod
    def look(self) -> Seen:
        """How it fares."""

    @abc.abstractmethod
    def log_command(self) -> tuple[str, ...] | None:
        """What prints the coordinator's output and follows it; None while there is none."""

    def whole_log(self, folder: Path) -> bytes:
        """The coordinator's output, once the job has ended; empty where the follower has all of it.

        Args:
            folder: of the run, on this machine.
        """
        return b""

    @abc.abstractmethod
    def stop(self, *, firmly: bool) -> None:
        """Ask for its end; firmly: without time for a checkpoint."""


class ServiceJob:
    """A submitted job. It goes on when this process ends.

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
        self._began = False
        self._cancellations = 0
        self._status = 1
        self.found: Literal["known", "gone", "silent"] = "known"

    @property
    def record(self) -> Mapping[str, Any]:
        """By which the job is found again."""
        return self._service.record

    def events(self) -> Iterator[Event]:
        """What the coordinator reports and how the job fares, until it is over.

        Raises:
            AnygaugeError: the service's client is not installed.
        """
        said, ended, over_at, fetched = "", None, None, False
        seen = Seen(phase="waiting", text="")
        ask_at: float | None = time.monotonic()
        try:
            while True:
                for event in self._new():
                    if event["event"] == "ended":
                        # Of several agents that speak there, the coordinator knows best.
                        if ended is None or event.get("node_rank") == 0:
                            ended = event
                    else:
                        # The service has started all over again: that was not the last word.
                        ended = None if event["event"] == "started" else ended
                        yield event
                while not self._warnings.empty():
                    yield _message(self._warnings.get(), "warning")
                now = time.monotonic()
                if ask_at is not None and now >= ask_at:
                    ask_at = None
                    threading.Thread(target=self._look, daemon=True).start()
                elif not self._answers.empty():
                    seen, ask_at = self._answered(self._answers.get()), now + ASK_S
                    if seen.text != said:
                        said = seen.text
                        yield _message(said)
                if seen.phase in ("waiting", "running", "silent"):
                    over_at, fetched = None, False
                else:
                    over_at = over_at or now
                    if ended is None and not fetched and now - over_at > self._service.settling_s:
                        fetched = True
                        for line in self._service.whole_log(self._folder).splitlines(True):
                            self._lines.put(line)
                    elif ended is not None or fetched:
                        final = self._final(seen, ended)
                        self._status = int(str(final["exit_status"]))
                        yield final
                        return
                time.sleep(_GLANCE_S)
        finally:
            if self._reader is not None:
                self._reader.kill()
                self._reader.wait()

    def status(self) -> str:
        """What the service says of it."""
        seen = self._service.look()
        self.found = seen.phase if seen.phase in ("gone", "silent") else "known"
        return seen.text

    @property
    def alive(self) -> bool | None:
        """Whether it waits or runs; None where the service does not answer."""
        phase = self._service.look().phase
        return None if phase == "silent" else phase in ("waiting", "running")

    def cancel(self) -> None:
        """Ask the ranks to write a checkpoint and end; a second time, end the job.

        Raises:
            AnygaugeError: the service refuses, and nobody follows the job, or it is over.
        """
        if not self._began and not self._cancellations and self.alive is False:
            raise AnygaugeError(f"{self.status()}: there is nothing to end")
        self._cancellations += 1
        try:
            self._service.stop(firmly=self._cancellations > 1)
        except AnygaugeError as error:
            if not self._began:  # nobody follows: whoever asked must know
                raise
            self._warnings.put(str(error))

    def wait(self) -> int:
        """Exit status of the job, once its events have ended."""
        return self._status

    def _look(self) -> None:
        """Ask how the job fares, and how its log is read where nobody reads it."""
        try:
            seen, command = self._service.look(), None
            if self._reader is None and seen.phase != "silent":
                command = self._service.log_command()
            self._answers.put((seen, command))
        except AnygaugeError as error:
            self._answers.put(error)

    def _answered(self, answer: _Answer | AnygaugeError) -> Seen:
        if not isinstance(answer, AnygaugeError):
            self._began = True
            seen, command = answer
            if command is not None and self._reader is None:
                self._read(command)
            return seen
        if isinstance(answer, NotInstalledError):
            raise answer
        return Seen(phase="silent", text=str(answer))

    def _read(self, command: tuple[str, ...]) -> None:
        """Start reading; from the thread that follows, since for the kernel that is the parent."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._client_log.open("ab") as log:
            self._reader = reader = subprocess.Popen(
                # It ends with this process, however that ends.
                (sys.executable, "-m", "anygauge_launchers.tied", *command),
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
        """Why the coordinator's output cannot be read, once."""
        said = last_line(self._client_log.read_text(errors="replace"))
        if said and said not in self._complaints:
            self._complaints.add(said)
            self._warnings.put(f"the first machine's output cannot be read: {said}")

    def _new(self) -> Iterator[Event]:
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                if line is None:  # it ended, or the connection did: asked again, all is repeated
                    self._reader = None
                    continue
                if hash(line) in self._known:
                    continue
                self._known.add(hash(line))
                event = _parse(line)
                if event is not None:
                    yield event
                else:
                    with self._log.open("ab") as log:
                        log.write(line)

    def _final(self, seen: Seen, ended: Event | None) -> Event:
        if ended is not None and not (ended.get("state") == "ok" and seen.phase == "failed"):
            return ended
        if self._cancellations:
            state, status = "cancelled", 143
        elif seen.phase == "done":
            state, status = "ok", 0
        elif seen.phase == "failed":
            state, status = "failed", 1
        else:
            state, status = "lost", LOST
        return {"event": "ended", "state": state, "exit_status": status, "cause": seen.text}


def _message(text: str, level: str = "info") -> Event:
    return {"event": "message", "time": time.time(), "text": text, "level": level}


def _parse(line: bytes) -> dict[str, Any] | None:
    """An event; services may put a time in front of it."""
    begin = line.find(b'{"event"')
    try:
        event = json.loads(line[begin:]) if begin >= 0 else None
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
