"""What a supervisor reports, line by line, to whoever follows the job; reporting never waits."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

OUTBOX_CAPACITY = 100_000
"""Lines kept for a follower that does not read; when it is full, no events are read from ranks."""


class Outbox:
    """The events of a job, each a line of JSON.

    A follower that is stopped (Ctrl-Z) leaves a pipe full. A supervisor must still notice signals
    and dead ranks then, so a thread does the writing.

    Attributes:
        shared: the agents of other nodes write to the same file.
        last: fields of the event that reported the job's end.
    """

    def __init__(self, descriptor: int | None = None, *, shared: bool = False) -> None:
        """Collect lines.

        Args:
            descriptor: they are written to it; None: who iterates takes them.
        """
        self.shared = shared
        self.last: dict[str, Any] = {}
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if descriptor is not None:
            self._thread = threading.Thread(
                target=self._write_to, args=(descriptor,), name="outbox", daemon=True
            )
            self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the follower is so far behind that no events should be read from ranks."""
        return self._lines.qsize() >= OUTBOX_CAPACITY

    def forward(self, line: bytes) -> None:
        """Add a rank's line as it is; it ends in a newline."""
        self._lines.put(line)

    def send(self, event: str, **fields: Any) -> None:
        """Add an event of the supervisor's own."""
        record = {"event": event, "time": time.time(), **fields}
        if event == "ended":
            self.last = fields
        self._lines.put((json.dumps(record) + "\n").encode())

    def close(self, timeout_s: float = 30.0) -> None:
        """Take no more events, and write what is left for at most so long."""
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def __iter__(self) -> Iterator[bytes]:
        """Each line, until it is closed."""
        while (line := self._lines.get()) is not None:
            yield line

    def _write_to(self, descriptor: int) -> None:
        gone = False
        for line in self:
            rest = memoryview(line)
            while rest and not gone:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except OSError:  # nobody reads any more; the run's files have everything
                    gone = True
