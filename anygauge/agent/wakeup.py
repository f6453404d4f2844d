"""Requests to end: signals that are collected, and that wake a loop which waits for events."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from types import FrameType

# SIGUSR1: schedulers send it before the time is up.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""All of them ask for the same."""

SIGNALLED = "signals"
"""Data of the selector's key that becomes ready when one has come."""


def collect(received: list[tuple[int, float]]) -> None:
    """Have signals added to a list, each with its time in seconds since the epoch, from now on."""

    def note(signum: int, frame: FrameType | None) -> None:
        received.append((signum, time.time()))

    for number in SIGNALS:
        signal.signal(number, note)


@contextlib.contextmanager
def wakened_by_signals(
    received: list[tuple[int, float]], selector: selectors.BaseSelector
) -> Iterator[None]:
    """Collect signals meanwhile, and have each wake the selector. For the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    selector.register(reader, selectors.EVENT_READ, SIGNALLED)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    collect(received)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        selector.unregister(reader)
        os.close(reader)
        os.close(writer)
