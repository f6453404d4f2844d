"""An agent whose parent is on another machine: its standard input is the thread between them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

from anygauge.interface import AnygaugeError

LONGEST_LINE = 16 * 1024 * 1024
PARENT_SPEAKS_S = 2.0
PARENT_ENDS_S = 2.0
_SIGNALS = {b"SIGTERM": signal.SIGTERM, b"SIGINT": signal.SIGINT}


def obey_standard_input() -> list[str]:
    """Take arguments and variables from the first line of standard input, then signals.

    The line is a JSON object: ``arguments``, a list, and ``environment``, name -> value or null to
    unset. Nothing of it passes through a shell. Each later line names a signal for this agent. The
    end of the input is one, too (SIGHUP): a parent that dies closes its end, whatever killed it,
    and ssh passes that on.

    Returns:
        The arguments.

    Raises:
        AnygaugeError: the line is none.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        byte = os.read(0, 1)  # no more than the line: the rest is for the watcher
        if not byte:
            raise AnygaugeError("standard input ended before the line of arguments")
        line += byte
    try:
        given = json.loads(line)
        arguments = [str(each) for each in given["arguments"]]
        for name, value in given["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise AnygaugeError(
            f"standard input: the line of arguments cannot be read: {error!r}"
        ) from error
    threading.Thread(target=_watch, name="standard-input", daemon=True).start()
    return arguments


def end_parent() -> None:
    """End the process that started this one, first in order.

    It gets some time before that, to pass on what this one has said last.
    """
    parent = os.getppid()
    time.sleep(PARENT_SPEAKS_S)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signum)
        deadline = time.monotonic() + PARENT_ENDS_S
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.05)


def _watch() -> None:
    pending = b""
    while True:
        try:
            chunk = os.read(0, 4096)
        except OSError:
            chunk = b""
        if not chunk:
            os.kill(os.getpid(), signal.SIGHUP)
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[line])
