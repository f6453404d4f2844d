"""An agent on this machine that was started before its job was known: the side of its owner.

See `anygauge.agent.waiting`. Imports next to nothing: the command line starts it first thing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.util.forking import send
from anygauge.util.processes import parent_environment

AGENT = (sys.executable, "-m", "anygauge.agent")
"""How the command of an agent begins that a waiting one can stand for."""

_begun: list[WaitingAgent] = []


def begin() -> None:
    """Start an agent, which `begun` gives."""
    _begun.append(WaitingAgent())


def begun() -> WaitingAgent | None:
    """The agent that `begin` has started, once."""
    return _begun.pop() if _begun else None


class WaitingAgent:
    """An agent that waits, and ends with this process.

    Start it from the main thread: on Linux it ends with the thread that started it.

    Attributes:
        process: its process. Standard output is a pipe, for its events.
    """

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*AGENT[:2], "anygauge.agent.waiting", str(theirs.fileno())],
                env={**os.environ, **parent_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C reaches the command line alone, which then ends the job in order.
                start_new_session=True,
            )

    def prepare(self, order: Mapping[str, Any]) -> None:
        """Have it import what the ranks of a job need: see `anygauge.agent.forks.prepare_order`."""
        with contextlib.suppress(OSError):  # it has ended; `run` tells
            send(self._channel, {"prepare": order})

    def run(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        held: Sequence[int] = (),
    ) -> bool:
        """Have it run a job, as if it had been started for that.

        Args:
            argv: its command, which begins like `AGENT`.
            environment: all its variables.
            log: descriptor of the file for what it prints as errors.
            held: descriptors that it keeps open.

        Returns:
            False if it has ended: then another must be started.
        """
        order = {"arguments": list(argv[len(AGENT) :]), "environment": dict(environment)}
        if tuple(argv[: len(AGENT)]) == AGENT and self.process.poll() is None:
            with contextlib.suppress(OSError), self._channel:
                send(self._channel, order, [log, *held])
                return True
        self._end()  # a job has one agent, also where this one has got a part of its order
        os.write(log, b"the agent that had begun early has ended; another one starts\n")
        return False

    def end(self) -> None:
        """End it, if it still waits."""
        if self._channel.fileno() != -1:
            self._end()

    def _end(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.communicate()
