"""Events of ranks and their supervisors while a job runs: one JSON object per line.

A rank writes to the pipe whose number is in `EVENTS_FD`; its supervisor passes every line on and
adds its own events; an agent writes both to its standard output. Whoever follows the job reads a
single stream, whatever the launcher. Fields common to all: ``event``, ``time`` (seconds since the
epoch) and, from ranks, ``rank``.

====================  =============================================================================
``message``           ``text``, ``level`` (``info`` or ``warning``): a line for the terminal
``started``           ``steps`` (total), ``done`` (before), ``world_size``, ``device``: the loop
                      begins; ``stops``: asked to end, it writes a checkpoint; ``lines``: a header
                      for the terminal
``step``              ``step`` (1-based), ``steps`` and the metrics of one optimizer step
``evaluation``        ``step``, ``name`` and ``eval_loss`` (nats per token)
``progress``          ``doing``: what a rank is in, in words; again and again in long work of its
                      own, so that its supervisor knows that it is not stuck; it is not forwarded
``finished``          the rank has done all its work; rank 0 adds ``summary`` (name: value)
``stopped``           asked to end, the rank has done so; rank 0 adds ``step`` and ``checkpoint``
``failed``            ``error`` (class name), ``message``, ``for_user`` (shown without traceback),
                      ``kind`` (see `AnygaugeError.kind`), ``exit_status``; sent before the rank
                      closes its connections, so that it precedes the failures which it causes in
                      others
``rank_exited``       from the supervisor: ``rank``, ``code`` (negative: signal), ``log`` (path)
``ended``             from the supervisor, last: ``state`` (``ok``, ``failed``, ``cancelled``,
                      ``stopped``), ``exit_status``, ``cause`` (the earliest failure, in words) and
                      its ``kind``
====================  =============================================================================
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from anygauge.util.errors import AnygaugeError

EVENTS_FD = "ANYGAUGE_EVENTS_FD"
"""Environment variable: the file descriptor that a rank writes its events to."""


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None where the line is something else, such as a library's output."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def message_event(text: str, level: str = "info") -> dict[str, Any]:
    """A line for the terminal, from whoever follows the job."""
    return {"event": "message", "time": time.time(), "text": text, "level": level}


def ended_event(state: str, exit_status: int, cause: str) -> dict[str, Any]:
    """How a job ended, from whoever follows it, where no agent reports it."""
    return {"event": "ended", "state": state, "exit_status": exit_status, "cause": cause}


class EventWriter:
    """Writes events as lines to a file descriptor; to nowhere if it is None. Thread-safe."""

    def __init__(self, descriptor: int | None, rank: int | None = None) -> None:
        self._descriptor = descriptor
        self._rank = rank
        self._lock = threading.Lock()

    @classmethod
    def of_rank(cls, rank: int) -> EventWriter:
        """The writer of a rank that a supervisor started."""
        descriptor = os.environ.get(EVENTS_FD)
        return cls(int(descriptor) if descriptor else None, rank)

    def report_failure(self, error: BaseException) -> int:
        """Report the error that ends a rank; returns the exit status."""
        for_user = isinstance(error, AnygaugeError)
        status = error.exit_status if isinstance(error, AnygaugeError) else 1
        name = type(error).__name__
        text = str(error).strip() or name
        kind = error.kind if isinstance(error, AnygaugeError) else ""
        fields = {"message": text, "for_user": for_user, "kind": kind, "exit_status": status}
        self.send("failed", error=name, **fields)
        return status

    def send(self, event: str, **fields: Any) -> None:
        """Write one event. A reader that has gone away is ignored: the run's files tell all."""
        if self._descriptor is None:
            return
        record: dict[str, Any] = {"event": event, "time": time.time(), **fields}
        if self._rank is not None:
            record["rank"] = self._rank
        line = memoryview((json.dumps(record) + "\n").encode())
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                self._descriptor = None

    def message(self, text: str, level: str = "info") -> None:
        """A line for the terminal."""
        self.send("message", text=text, level=level)
