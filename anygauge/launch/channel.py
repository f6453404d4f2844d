"""The connection between the agents of two nodes: messages of JSON that never block an agent.

A message is the number of its bytes (four bytes, big-endian) and then an object of JSON with a
``kind``. When a worker joins, both ends prove that they know the job's secret:

1. The worker sends ``hello`` with a random number.
2. The coordinator draws a number of its own and sends it as ``proof``, with the HMAC-SHA256 of its
   role and both numbers.
3. The worker now trusts the coordinator. It sends ``join``, with an HMAC for its own role and a
   description of its node.

The secret is never sent. A recording opens no other connection, since both numbers are new each
time. A false coordinator receives a random number, and can give no instructions. Messages after the
join carry no proof: ``SECURITY.md`` says what that leaves open.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anygauge.util.exchange import derived_key

MAX_BYTES = 16 * 1024 * 1024
MAX_UNPROVEN_BYTES = 64 * 1024
"""Bytes of a message before its sender has proved that it knows the secret."""

UNPROVEN = "it did not prove that it knows this job's secret"

_SIZE = struct.Struct("!I")

_CHUNK = 65536
_CHUNKS = 16
_CLOSING_S = 2.0
_MESSAGE = TypeAdapter(dict[str, Any])


class Channel:
    """One end of a connection. It keeps what it cannot send at once until `flush`.

    Attributes:
        socket: not blocking.
        peer: who is at the other end, in words.
        heard: when something last arrived (monotonic seconds).
        closed: nothing more will arrive: the other end closed, died, or sent what is no message.
        why: why it was closed, in words.
        longest: the most bytes that a message may have.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.peer = peer
        self.heard = time.monotonic()
        self.closed = False
        self.why = ""
        self.longest = MAX_UNPROVEN_BYTES
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that are not sent yet; 0 once it is closed."""
        return len(self._outgoing)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message, and send what can be sent."""
        if self.closed:
            return
        # Half a character (of a path that is not a text) becomes a mark: no JSON may have one.
        text = json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode(errors="replace")
        self._outgoing += _SIZE.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived; bounded, so that no peer can stall its agent.

        What is not taken from the iterator comes first at the next call.
        """
        for _ in range(_CHUNKS):
            while (message := self._next_message()) is not None:
                yield message
            if self.closed or not self._read():
                return

    def close(self, why: str) -> None:
        """Close at once, and keep the reason."""
        if not self.closed:
            self.closed, self.why = True, why
            self._incoming.clear()
            self._outgoing.clear()
            self.socket.close()

    def _read(self) -> bool:
        """Read one chunk of what has arrived; whether there was any."""
        try:
            chunk = self.socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionError("the connection was closed")
        except BlockingIOError:
            return False
        except OSError as error:
            self.close(str(error))
            return False
        self.heard = time.monotonic()
        self._incoming += chunk
        return True

    def _next_message(self) -> dict[str, Any] | None:
        """The next message of what was read; what is none closes the connection."""
        if len(self._incoming) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._incoming)[0]
        if end - _SIZE.size > self.longest:
            self.close(f"it sent a message of more than {self.longest:,} bytes")
            return None
        if len(self._incoming) < end:
            return None
        text = bytes(self._incoming[_SIZE.size : end])
        del self._incoming[:end]
        try:
            # Unlike json, this takes UTF-8 alone, no half characters, and no depth without end.
            message = _MESSAGE.validate_json(text)
        except ValidationError:
            message = {}
        if not isinstance(message.get("kind"), str):
            self.close(f"it sent what is not a message: {text[:80]!r}")
            return None
        return message


def close_all(channels: Collection[Channel]) -> None:
    """Send what is left, for a short time, and close."""
    deadline = time.monotonic() + _CLOSING_S
    while any(channel.unsent_bytes for channel in channels) and time.monotonic() < deadline:
        time.sleep(0.01)
        for channel in channels:
            channel.flush()
    for channel in channels:
        channel.close("it was closed here")


def proof_of(secret: str, role: str, worker: str, coordinator: str) -> str:
    """What only one who knows the secret can send, in this role and on this connection.

    Args:
        role: of the sender: ``worker`` or ``coordinator``.
        worker, coordinator: the random numbers of both ends.
    """
    return derived_key(secret, f"join of agents: {role} {worker} {coordinator}").hex()


def has_proof(message: Mapping[str, Any], expected: str) -> bool:
    """Whether a message has the proof that its sender knows the secret."""
    found = message.get("proof")
    return isinstance(found, str) and hmac.compare_digest(found.encode(), expected.encode())
