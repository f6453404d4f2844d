"""What an agent and its fork server say to each other: messages with descriptors, over a socket.

A fork server imports what all ranks of a node need, once, and then becomes each of them by a fork:
`anygauge.agent.forks` is the agent's side of it, `anygauge.training.fork_server` its own. A message
is a JSON object after its length; descriptors travel with its first byte.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

ARGUMENT = "--fork-server"
"""Makes the process of a rank a fork server; the descriptor of its socket follows."""

_LENGTH = struct.Struct("!Q")
_MOST_DESCRIPTORS = 8


def send(
    channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send a message, and copies of descriptors with it.

    Raises:
        OSError: the other side has gone.
    """
    text = json.dumps(message).encode()
    data = memoryview(_LENGTH.pack(len(text)) + text)
    sent = socket.send_fds(channel, [data], list(descriptors)) if descriptors else 0
    # Nothing is an error, too, where the other side has read it all and closed its end.
    if sent < len(data):
        channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message; returns it with its descriptors, or None if the other side has gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
        data += _exactly(channel, _LENGTH.size - len(data)) if data else b""
        if len(data) < _LENGTH.size:
            return None
        size = _LENGTH.unpack(data)[0]
        text = _exactly(channel, size)
    except ConnectionError:
        return None
    return (json.loads(text), descriptors) if len(text) == size else None


def _exactly(channel: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the other side has gone."""
    parts = []
    while size and (part := channel.recv(min(size, 2**16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
