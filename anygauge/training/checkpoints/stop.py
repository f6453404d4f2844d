"""The wish that a run end soon: SIGTERM, answered at the end of the step under way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether this process was asked to end.

    While it listens, SIGTERM is noted instead of ending the process. A rank that waits for its
    peers inside a collective notes it when the collective is done; whoever must end such a rank at
    once uses another signal.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM for as long as this lasts; without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.asked = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
