"""The other side of `anygauge.models.fetch`: start that process, and hear what it reports."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from anygauge.interface import ModelError
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.util.processes import describe_exit, parent_environment

MODULE = "anygauge.models.fetch"

SILENCE_S = 300.0
"""Without a byte for so long, the hub or the disk is called silent. The library itself tries again
for a minute."""

_TURN_S = 0.1


def always() -> bool:
    """Nothing else to do meanwhile."""
    return True


def fetching(
    arguments: Sequence[str], environ: Mapping[str, str], turn: Callable[[], bool] = always
) -> Iterator[Mapping[str, Any]]:
    """Have a process of its own fetch a model; it is gone when the iterator is.

    Args:
        arguments: of that process: what is wanted.
        environ: likewise.
        turn: called ten times a second meanwhile; False gives up.

    Yields:
        Its events ``message``, ``fetching`` and ``fetched``.

    Raises:
        HubUnreachableError: no answer of the hub could be had.
        ModelError: the model cannot be had: why, and what to do.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--events", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**environ, **parent_environment()},
        )
        assert process.stdout is not None
        try:
            for line in _lines(process.stdout.fileno(), turn):
                event = json.loads(line)
                if event["event"] == "refused":
                    unreachable = event.get("unreachable")
                    raise (HubUnreachableError if unreachable else ModelError)(event["message"])
                yield event
            if turn() and process.wait():
                raise _broken(process.returncode, output)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _lines(descriptor: int, turn: Callable[[], bool]) -> Iterator[bytes]:
    """Until the process closes its end, or this one gives up."""
    text, heard = b"", time.monotonic()
    while turn():
        if select.select([descriptor], [], [], _TURN_S)[0]:
            new = os.read(descriptor, 2**16)
            if not new:
                return
            heard = time.monotonic()
            *lines, text = (text + new).split(b"\n")
            yield from lines
        elif time.monotonic() - heard > SILENCE_S:
            raise HubUnreachableError(
                f"nothing arrived from the hub for {SILENCE_S:.0f} s: check the network and the "
                "disk of HF_HOME; complete files are kept"
            )


def _broken(code: int, output: IO[bytes]) -> HubUnreachableError:
    output.seek(0)
    last = output.read().decode(errors="replace").strip().splitlines()[-1:]
    said = f": {last[0].strip()}" if last else ""
    return HubUnreachableError(f"fetching the model ended with {describe_exit(code)}{said}")
