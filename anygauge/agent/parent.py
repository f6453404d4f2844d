"""An agent whose parent is on another machine: its standard input is the thread between them."""

from __future__ import annotations

import json
import os
import signal
import threading

from anygauge.interface import AnygaugeError

LONGEST_LINE = 16 * 1024 * 1024


def obey_standard_input() -> None:
    """Take variables from the first line of standard input; its end, later on, ends the agent.

    The line is a JSON object, name -> value, or null to unset. A parent that dies closes its end,
    whatever killed it; ssh passes that on. The ranks then get the time of a regular stop.

    Raises:
        AnygaugeError: the line is none.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        byte = os.read(0, 1)  # no more than the line: the rest is for the watcher
        if not byte:
            raise AnygaugeError("standard input ended before the line of variables")
        line += byte
    try:
        variables = json.loads(line)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    except (ValueError, TypeError, AttributeError) as error:
        raise AnygaugeError(
            f"standard input: the line of variables cannot be read: {error}"
        ) from error
    threading.Thread(target=_watch, name="standard-input", daemon=True).start()


def _watch() -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)
