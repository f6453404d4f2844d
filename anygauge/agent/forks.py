"""The agent's side of a fork server, which becomes its ranks: see `anygauge.training.fork_server`.

The server loads libraries in the variables that all ranks of the node have alike. It may begin
before these are known; what it was told in the end must be what ranks get.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from anygauge.util.forking import ARGUMENT, receive, send
from anygauge.util.processes import adopt_orphans, parent_environment

WORKER = "anygauge.training.worker"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Ranks have it, so that a log is complete when one is killed."""

LATE = ("OMP_", "KMP_", "GOMP_", "MKL_", "TORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")
LATE_ENDS = ("_SOCKET_IFNAME",)
"""How variables begin, or end, that are read by libraries which a server imports only once it was
told its environment. Others may have been read before: by the loader, the allocator, Python."""

_ANSWER_S = 30.0
_END_S = 1.0


class ForkError(Exception):
    """No rank can be forked; says why."""


class RankHandle(Protocol):
    """What an agent needs of a rank's process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """The exit code, once it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Reap it; returns the exit code."""


class ForkServer:
    """A process that imports, and then becomes ranks.

    Args:
        environment: of the process; None: this one's.
        order: see `prepare`; None where that comes later.
        module: that serves.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        order: Mapping[str, Any] | None = None,
        *,
        module: str = WORKER,
    ) -> None:
        self._begun_with = dict(os.environ if environment is None else environment)
        self._folder = Path.cwd()
        self._order: Mapping[str, Any] | None = None
        self._why_not = ""
        self._ready = False
        self._channel, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, ARGUMENT, str(theirs.fileno())],
                env={**self._begun_with, **UNBUFFERED, **parent_environment()},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(theirs.fileno(),),
            )
        if order is not None:
            self.prepare(order)

    def fileno(self) -> int:
        """For a selector: can be read when `settled` may have changed."""
        return self._channel.fileno()

    def prepare(self, order: Mapping[str, Any]) -> None:
        """Have it import what ranks need: see `prepare_order`. Once."""
        self._order = order
        if (early := self._read_too_early(order["environment"])) is not None:
            self._why_not = f"it began with another value of {early}"
            return
        try:
            send(self._channel, {"prepare": order})
        except OSError as error:
            self._why_not = f"it has ended: {error}"

    def _read_too_early(self, environment: Mapping[str, str]) -> str | None:
        """A variable that this process may have read before it had the value in `environment`."""
        before, after = self._begun_with | UNBUFFERED, environment
        changed = {n for n in (*before, *after) if before.get(n) != after.get(n)}
        early = (n for n in sorted(changed) if not n.startswith(LATE) and not n.endswith(LATE_ENDS))
        return next(early, None)

    def serves(self, order: Mapping[str, Any] | None) -> str:
        """Why it does not serve ranks with this order, None: any rank; "" if it does."""
        if order is None:
            return "the ranks of this run cannot be forked"
        if self._why_not:
            return self._why_not
        if self._folder != Path.cwd():
            return f"it began in {self._folder}"
        if self._order is None:
            return "it was told nothing"
        if self._order == order:
            return ""
        parts = [name for name in order if self._order.get(name) != order[name]]
        if parts == ["environment"]:
            before, after = self._order["environment"], order["environment"]
            names = {n for n in (*before, *after) if before.get(n) != after.get(n)}
            return f"it has other variables: {', '.join(sorted(names))}"
        return f"it was prepared for another {' and '.join(parts)}"

    def settled(self, within_s: float = 0) -> bool:
        """Whether it is known if ranks can be forked."""
        if not self._ready and not self._why_not and select.select([self], [], [], within_s)[0]:
            received = receive(self._channel)
            self._ready = received is not None and "ready" in received[0]
            if not self._ready:
                code = self._process.poll()
                self._why_not = str(
                    received[0]["refused"] if received else f"it ended while it imported ({code})"
                )
        return self._ready or bool(self._why_not)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        events: int,
        listener: int | None = None,
    ) -> ForkedProcess:
        """Start a rank.

        Args:
            arguments: of the rank's module.
            environment: all its variables.
            log, events: descriptors that it writes to.
            listener: socket of the ranks' store, for the rank that serves it.

        Raises:
            ForkError: it could not be started; nothing of it is left.
        """
        if self._why_not or not self._ready:
            raise ForkError(self._why_not or "it was not ready in time")
        if not adopt_orphans(True):
            raise ForkError("this kernel does not give processes to others than the first")
        ours, theirs = socket.socketpair()
        order = {
            "agent": os.getpid(),
            "arguments": list(arguments),
            "environment": dict(environment),
        }
        with ours, contextlib.suppress(TimeoutError, ConnectionError):
            with theirs:
                more = [] if listener is None else [listener]
                send(self._channel, {"fork": order}, [log, events, theirs.fileno(), *more])
            ours.settimeout(_ANSWER_S)
            answer = receive(ours)
            if answer is not None:
                process = ForkedProcess(answer[0]["pid"])
                send(ours, {"go": True})  # without it, the rank would end
                return process
        self._why_not = "it gave no rank"
        raise ForkError(self._why_not)

    def close(self) -> None:
        """End the server; ranks stay."""
        if self._process.returncode is not None:
            return
        adopt_orphans(False)
        self._channel.close()
        if not self._ready:
            self._process.kill()  # it imports, and would not notice before it is done
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def prepare_order(
    environment: Mapping[str, str], run: str, backend: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a server must know to import.

    Args:
        environment: variables that all ranks of the node have alike.
        run: the text of the resolved run, as ranks read it.
        options: the run file's ``backend_options``.
    """
    return {
        "environment": {**environment, **UNBUFFERED},
        "run": run,
        "backend": backend,
        "options": dict(options),
    }


class ForkedProcess:
    """A rank that was forked: a child of this process that `subprocess` did not start."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, once it has ended; it is reaped then."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and reap it; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if timeout is None and self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline = time.monotonic() + (timeout or 0)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0)
            time.sleep(0.01)
        return code
