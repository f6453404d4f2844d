"""A connection between the agents of two nodes: JSON lines both ways, without ever blocking."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import deque
from typing import Any

LONGEST_LINE = 16 * 1024 * 1024
_CHUNKS = 16


class Link:
    """One end of a connection. What it cannot send at once it keeps until `flush`.

    Attributes:
        peer: who is at the other end, in words.
        heard: when something last arrived (monotonic seconds).
        closed: nothing more will arrive: the other end closed, died, or sent what is no line.
        why: what closed it, in words.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.peer = peer
        self.heard = time.monotonic()
        self.closed = False
        self.why = ""
        self._incoming = b""
        self._outgoing: deque[memoryview] = deque()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """The address of this end, as the other one reaches it."""
        return str(self._socket.getsockname()[0])

    @property
    def waiting(self) -> int:
        """Messages that have not been sent yet."""
        return len(self._outgoing)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message, and send what can be sent."""
        if self.closed:
            return
        self._outgoing.append(memoryview(json.dumps({"kind": kind, **fields}).encode() + b"\n"))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._outgoing and not self.closed:
            first = self._outgoing[0]
            try:
                sent = self._socket.send(first)
            except BlockingIOError:
                return
            except OSError as error:
                self._close(str(error))
                return
            if sent == len(first):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = first[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """The whole messages that have arrived; bounded, so that no peer can hold up its agent."""
        found: list[dict[str, Any]] = []
        for _ in range(_CHUNKS):
            if self.closed:
                break
            try:
                chunk = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:
                self._close(str(error))
                break
            if not chunk:
                self._close("the connection was closed")
                break
            self.heard = time.monotonic()
            *lines, self._incoming = (self._incoming + chunk).split(b"\n")
            for line in lines:
                message = _parse(line)
                if message is None:
                    self._close(f"it sent what is no message: {line[:80]!r}")
                    return found
                found.append(message)
            if len(self._incoming) > LONGEST_LINE:
                self._close("it sent a line without end")
        return found

    def shut(self, timeout_s: float = 2.0) -> None:
        """Send what is left, for so long at most, and close."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(timeout_s)
            while self._outgoing and not self.closed:
                self._socket.sendall(self._outgoing.popleft())
        self._close("it was closed here")

    def _close(self, why: str) -> None:
        if not self.closed:
            self.closed, self.why = True, why
            self._socket.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    return message
