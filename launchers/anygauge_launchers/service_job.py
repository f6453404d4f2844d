"""A job that a cluster's service runs: followed through its head's log and the service's word."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from anygauge.interface import LOST, AnygaugeError

Event = Mapping[str, Any]

ASK_S = 3.0
"""How often the service is asked."""
_GLANCE_S = 0.2
_SETTLING_S = 15.0


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


class Service(Protocol):
    """One job in the hands of a cluster's service."""

    @property
    def record(self) -> Mapping[str, Any]:
        """By which it is found again."""

    def look(self) -> Seen:
        """How it fares."""

    def log_command(self) -> tuple[str, ...] | None:
        """What prints the head's output and follows it; None while there is none."""

    def stop(self, *, firmly: bool) -> None:
        """Ask for its end; firmly: without time for a checkpoint."""


class ServiceJob:
    """A submitted job. It goes on when this process ends.

    The head's agent prints events; the service keeps them as the head's log.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._log = folder / "logs" / "head.log"
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader: subprocess.Popen[bytes] | None = None
        self._known: set[int] = set()
        self._cancellations = 0
        self._status = 1

    @property
    def record(self) -> Mapping[str, Any]:
        """By which the job is found again."""
        return self._service.record

    def events(self) -> Iterator[Event]:
        """What the head reports and how the job fares, until it is over."""
        said, asked, ended, over_at = "", float("-inf"), None, None
        seen = Seen(phase="waiting", text="")
        try:
            while True:
                for event in self._new():
                    if event["event"] == "ended":
                        # Of several agents that speak there, the head knows best.
                        if ended is None or event.get("node_rank") == 0:
                            ended = event
                    else:
                        # The service has started all over again: that was not the last word.
                        ended = None if event["event"] == "started" else ended
                        yield event
                now = time.monotonic()
                if now - asked >= ASK_S:
                    asked, seen = now, self._service.look()
                    if seen.text != said:
                        said = seen.text
                        yield {"event": "message", "time": time.time(), "text": said,
                               "level": "info"}  # fmt: skip
                    if self._reader is None and seen.phase != "silent":
                        self._read(self._service.log_command())
                if seen.phase in ("waiting", "running", "silent"):
                    over_at = None
                else:
                    over_at = over_at or now
                    # What was said last may still be on its way through the service.
                    if ended is not None or now - over_at > self._patience():
                        final = self._final(seen, ended)
                        self._status = int(str(final["exit_status"]))
                        yield final
                        return
                time.sleep(_GLANCE_S)
        finally:
            self._let_go()

    def status(self) -> str:
        """What the service says of it."""
        return self._service.look().text

    def cancel(self) -> None:
        """Ask the ranks to write a checkpoint and end; a second time, end the job."""
        self._cancellations += 1
        self._service.stop(firmly=self._cancellations > 1)

    def wait(self) -> int:
        """Exit status of the job, once its events have ended."""
        return self._status

    def _patience(self) -> float:
        return _SETTLING_S if self._known or self._reader is not None else ASK_S

    def _read(self, command: tuple[str, ...] | None) -> None:
        if command is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._reader = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
                )
            except FileNotFoundError as error:
                raise AnygaugeError(f"{command[0]} is not installed here") from error
        threading.Thread(target=self._pump, args=(self._reader,), daemon=True).start()

    def _pump(self, reader: subprocess.Popen[bytes]) -> None:
        assert reader.stdout is not None
        for line in reader.stdout:
            self._lines.put(line)
        reader.wait()
        self._lines.put(None)

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

    def _let_go(self) -> None:
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()

    def _final(self, seen: Seen, ended: Event | None) -> Event:
        if ended is not None and not (ended.get("state") == "ok" and seen.phase == "failed"):
            return ended
        if self._cancellations:
            state, status = "cancelled", 143
        elif seen.phase == "done":
            state, status = "ok", 0
        else:
            state, status = ("lost", LOST) if self._known else ("failed", 1)
        return {"event": "ended", "state": state, "exit_status": status, "cause": seen.text}


def _parse(line: bytes) -> dict[str, Any] | None:
    """An event; services may put a time in front of it."""
    begin = line.find(b'{"event"')
    try:
        event = json.loads(line[begin:]) if begin >= 0 else None
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
