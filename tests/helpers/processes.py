"""Processes that a test starts: whatever happens, they end, and nothing waits for them for ever."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

KILLED_S = 30.0
"""Seconds that a killed process may take until it is gone, and its pipes are closed."""


def as_in_a_terminal() -> None:
    """For `preexec_fn`: ends what a child of a background job or of nohup ignores, as they do."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)


def end(*processes: subprocess.Popen[Any]) -> None:
    """Kill all that still run, read what is left of their output, and reap them."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.communicate(timeout=KILLED_S)


@contextlib.contextmanager
def bounded(process: subprocess.Popen[Any], within_s: float = 120.0) -> Iterator[None]:
    """For reading a process's output line by line: after so long it is killed, and the output ends.

    It is killed where the block fails, too.
    """
    timer = threading.Timer(within_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException:
        end(process)
        raise
    finally:
        timer.cancel()
