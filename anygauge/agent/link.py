"""A connection between the agents of two nodes: JSON lines both ways, without ever blocking.

It begins in the open, and is sealed once both ends have drawn a number (`admission`): from then on
each line carries an HMAC over who sent it, its number and its text. A line that was altered, left
out, repeated or sent by somebody else closes the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

LONGEST_LINE = 16 * 1024 * 1024
LONGEST_OF_STRANGERS = 64 * 1024
"""Bytes of a line before its sender is known."""

_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_CHUNK = 65536
_CHUNKS = 16
_PROOF = 64  # hexadecimal digits


@dataclass(slots=True)
class Seal:
    """What proves the lines of one direction.

    Attributes:
        sender: who sends them: ``coordinator`` or ``worker``.
        count: of lines so far.
    """

    key: bytes
    sender: str
    count: int = 0

    def next(self, text: bytes) -> bytes:
        """The proof of the next line."""
        said = f"{self.sender} {self.count} ".encode() + text
        self.count += 1
        return hmac.digest(self.key, said, "sha256").hex().encode()


class Link:
    """One end of a connection. What it cannot send at once it keeps until `flush`.

    Attributes:
        peer: who is at the other end, in words.
        heard: when something last arrived (monotonic seconds).
        closed: nothing more will arrive: the other end closed, died, or sent what is not a line.
        why: what closed it, in words.
        longest: bytes that a line may have.
    """

    def __init__(
        self, connection: socket.socket, peer: str, longest: int = LONGEST_OF_STRANGERS
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.peer = peer
        self.heard = time.monotonic()
        self.closed = False
        self.why = ""
        self.longest = longest
        self._incoming = bytearray()
        self._searched = 0
        self._outgoing: deque[memoryview] = deque()
        self._sent: Seal | None = None
        self._received: Seal | None = None

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

    def seal(self, key: bytes, own: str, other: str) -> None:
        """Prove every line from now on, and demand it of the other end.

        Args:
            key: of this connection alone.
            own, other: what the two ends are.
        """
        self._sent, self._received = Seal(key, own), Seal(key, other)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message, and send what can be sent."""
        if self.closed:
            return
        text = json.dumps({"kind": kind, **fields}).encode()
        if self._sent is not None:
            text = self._sent.next(text) + text
        self._outgoing.append(memoryview(text + b"\n"))
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
                self.close(str(error))
                return
            if sent == len(first):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = first[sent:]

    def receive(self, chunks: int = _CHUNKS) -> list[dict[str, Any]]:
        """The whole messages that have arrived; bounded, so that no peer can hold up its agent."""
        found: list[dict[str, Any]] = []
        for _ in range(chunks):
            while (message := self._next()) is not None:
                found.append(message)
            if not self._read():
                break
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def receive_one(self) -> dict[str, Any] | None:
        """The next whole message, if it has arrived; for what must be sealed between two."""
        message = self._next()
        if message is None and self._read():
            message = self._next()
        return message

    def _read(self) -> bool:
        """Take in what has arrived, so much at most; whether there was anything."""
        if self.closed:
            return False
        try:
            chunk = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close(str(error))
            return False
        if not chunk:
            self.close("the connection was closed")
            return False
        self.heard = time.monotonic()
        self._incoming += chunk
        return True

    def _next(self) -> dict[str, Any] | None:
        """The next message of what was read; closes the connection where it is none."""
        end = self._incoming.find(b"\n", self._searched)
        if (len(self._incoming) if end < 0 else end) > self.longest:
            self._incoming.clear()
            self._searched = 0
            self.close(f"it sent a line of more than {self.longest:,} bytes")
            return None
        if end < 0:
            self._searched = len(self._incoming)
            return None
        line = bytes(self._incoming[:end])
        del self._incoming[: end + 1]
        self._searched = 0
        if self._received is not None:
            proof, line = line[:_PROOF], line[_PROOF:]
            if not hmac.compare_digest(proof, self._received.next(line)):
                self._incoming.clear()
                self.close(UNPROVEN)
                return None
        message = _parse(line)
        if message is None:
            self._incoming.clear()
            self.close(f"it sent a line that is not a message: {line[:80]!r}")
        return message

    def shut(self, timeout_s: float = 2.0) -> None:
        """Send what is left, for so long at most, and close."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(timeout_s)
            while self._outgoing and not self.closed:
                self._socket.sendall(self._outgoing.popleft())
        self.close("it was closed here")

    def close(self, why: str) -> None:
        """Close at once, and keep the reason."""
        if not self.closed:
            self.closed, self.why = True, why
            self._socket.close()


UNPROVEN = "it did not prove that it knows this job's secret"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        text = line.decode()  # of bytes, json takes more encodings, and halves of characters
        message = json.loads(text)
        if _HALF.search(text):
            # Half a character cannot be encoded again: not for a log, a key or a follower.
            whole = json.dumps(message, ensure_ascii=False).encode(errors="replace")
            message = json.loads(whole)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    return message
