"""The agent's way out: lines for whoever follows the job, written without ever blocking the agent.

A follower that is stopped (Ctrl-Z) leaves the pipe full. The agent must still see signals and
dead ranks then, so a thread does the writing.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from typing import Any

CAPACITY = 100_000
"""Lines kept for a follower that does not read; beyond, ranks wait with theirs."""


class Outbox:
    """Writes whole lines to a file descriptor in order, from a thread of its own.

    Attributes:
        shared: the agents of other nodes write to the same file.
        last: what was said of the job's end.
    """

    def __init__(self, descriptor: int, *, shared: bool = False) -> None:
        self.shared = shared
        self.last: dict[str, Any] = {}
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="outbox", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether the follower is so far behind that ranks should not be read from."""
        return self._lines.qsize() >= CAPACITY

    def forward(self, line: bytes) -> None:
        """Pass on a rank's line as it is; it ends in a newline."""
        self._lines.put(line)

    def send(self, event: str, **fields: Any) -> None:
        """Add an event of the agent's own."""
        record = {"event": event, "time": time.time(), **fields}
        if event == "ended":
            self.last = fields
        self._lines.put((json.dumps(record) + "\n").encode())

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the follower read what is left, for so long at most."""
        self._lines.put(None)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        gone = False
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            while rest and not gone:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except OSError:  # nobody listens any more: the run's files tell all
                    gone = True
