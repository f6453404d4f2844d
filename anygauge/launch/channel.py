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
import errno
import hmac
import json
import re
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anygauge.interface import AnygaugeError
from anygauge.util.exchange import derived_key
from anygauge.util.rendezvous import listen_at, own_addresses

LONGEST = 16 * 1024 * 1024
LONGEST_OF_UNKNOWN = 64 * 1024
"""Bytes of a message before its sender has proved that it knows the secret."""
MOST_UNKNOWN = 64
"""Connections of unknown senders at the same time, in addition to one for each node."""
UNKNOWN_S = 10.0
"""Seconds that a sender may stay unknown."""

UNPROVEN = "it did not prove that it knows this job's secret"

_CHUNK = 65536
_CHUNKS = 16
_SIZE = struct.Struct("!I")
_MESSAGE = TypeAdapter(dict[str, Any])
_ACCEPTED_AT_ONCE = 16
_CLOSING_S = 2.0
_PAUSE_S = 0.05
_NOTES = 100
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Channel:
    """One end of a connection. It keeps what it cannot send at once until `flush`.

    Attributes:
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
        self._socket = connection
        self.peer = peer
        self.heard = time.monotonic()
        self.closed = False
        self.why = ""
        self.longest = LONGEST_OF_UNKNOWN
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """The address of this end, as the other one reaches it."""
        return str(self._socket.getsockname()[0])

    @property
    def waiting(self) -> int:
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
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived; bounded, so that no peer can stall its agent.

        What is not taken from the iterator comes first at the next call.
        """
        chunks = 0
        while True:
            message = self._next()
            if message is not None:
                yield message
            elif chunks == _CHUNKS or not self._read():
                return
            else:
                chunks += 1

    def close(self, why: str) -> None:
        """Close at once, and keep the reason."""
        if not self.closed:
            self.closed, self.why = True, why
            self._incoming.clear()
            self._outgoing.clear()
            self._socket.close()

    def _read(self) -> bool:
        """Read one chunk of what has arrived; whether there was any."""
        if self.closed:
            return False
        try:
            chunk = self._socket.recv(_CHUNK)
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

    def _next(self) -> dict[str, Any] | None:
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


def close_all(channels: Sequence[Channel]) -> None:
    """Send what is left, for a short time, and close."""
    deadline = time.monotonic() + _CLOSING_S
    while any(channel.waiting for channel in channels) and time.monotonic() < deadline:
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


def proves(message: Mapping[str, Any], expected: str) -> bool:
    """Whether a message has the proof that its sender knows the secret."""
    found = message.get("proof")
    return isinstance(found, str) and hmac.compare_digest(found.encode(), expected.encode())


@dataclass(slots=True)
class _Unknown:
    """A connection of which the sender has not proved anything.

    Attributes:
        since: when it was accepted, in monotonic seconds.
        numbers: of the worker and of this end, once it has sent ``hello``.
    """

    channel: Channel
    since: float
    numbers: tuple[str, str] | None = None


class Listener:
    """Accepts connections until their senders have joined: few at a time, none for long.

    A context manager.

    Attributes:
        where: at which addresses it listens, in words.
    """

    def __init__(self, host: str, port: int, secret: str, nodes: int) -> None:
        """Listen.

        Args:
            host: this machine, as the others know it.

        Raises:
            AnygaugeError: the port is taken, or may not be used.
        """
        try:
            self._sockets = _listen(host, port)
        except OSError as error:
            raise AnygaugeError(
                f"the agent of node 0 cannot listen at port {port} on {socket.gethostname()}: "
                f"{error.strerror or error}. If another job uses it, give this one another "
                "launch.port"
            ) from error
        names = [str(each.getsockname()[0]) for each in self._sockets]
        where = "every address" if names == ["0.0.0.0"] else ", ".join(names)
        self.where = f"{where}, port {port}"
        print(f"waiting for the other nodes at {self.where} ({host})", file=sys.stderr)
        self._secret = secret
        self._most = MOST_UNKNOWN + nodes
        self._unknown: list[_Unknown] = []
        self._notes = 0

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
        for one in self._unknown:
            one.channel.close("all nodes have met, or the job has ended")

    def joined(self, timeout_s: float) -> list[tuple[Channel, Mapping[str, Any]]]:
        """Wait for messages; the channels of those who have now joined, and their ``join``."""
        # poll rather than epoll, which would need a descriptor of its own.
        with selectors.PollSelector() as selector:
            for each in self._sockets:
                selector.register(each, selectors.EVENT_READ)
            for one in self._unknown:
                selector.register(one.channel, selectors.EVENT_READ)
            selector.select(timeout_s)
        for each in self._sockets:
            self._accept(each)
        found = []
        now = time.monotonic()
        for one in list(self._unknown):
            join = self._advance(one)
            if join is not None:
                self._unknown.remove(one)
                found.append((one.channel, join))
            elif one.channel.closed:
                self._reject(one, one.channel.why)
            elif now - one.since > UNKNOWN_S:
                self._reject(one, f"it had not joined after {UNKNOWN_S:g} s")
        return found

    def note(self, channel: Channel, why: str) -> None:
        """Log that a connection was rejected; only the first hundred, since strangers may try."""
        self._notes += 1
        if self._notes <= _NOTES:
            print(f"rejected a connection from {channel.peer}: {why}", file=sys.stderr)

    def _advance(self, one: _Unknown) -> Mapping[str, Any] | None:
        """Read and answer what has arrived; the ``join``, once it is proven."""
        for message in one.channel.receive():
            number = str(message.get("number"))
            if one.numbers is None and re.fullmatch("[0-9a-f]{32}", number):
                one.numbers = (number, secrets.token_hex(16))
                proof = proof_of(self._secret, "coordinator", *one.numbers)
                one.channel.send("proof", number=one.numbers[1], proof=proof)
            elif one.numbers and proves(message, proof_of(self._secret, "worker", *one.numbers)):
                one.channel.longest = LONGEST
                return message
            else:
                one.channel.close(UNPROVEN)
        return None

    def _reject(self, one: _Unknown, why: str) -> None:
        one.channel.close(why)
        self._unknown.remove(one)
        self.note(one.channel, why)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # What a stranger does to its own connection, or to this process's descriptors, must
                # not end the job.
                if error.errno in _NO_DESCRIPTORS and not self._make_room("no descriptor is free"):
                    time.sleep(_PAUSE_S)
                return
            if len(self._unknown) >= self._most:
                self._make_room(f"more than {self._most} connections were waiting to join")
            channel = Channel(connection, str(address[0]))
            self._unknown.append(_Unknown(channel, time.monotonic()))

    def _make_room(self, why: str) -> bool:
        """Reject the oldest, preferably one that has sent nothing valid; whether there was any."""
        if not self._unknown:
            return False
        self._reject(min(self._unknown, key=lambda one: (bool(one.numbers), one.since)), why)
        return True


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses that `host` has here; at every address where it has none.

    It may have none: the resolver of this machine does not know the name, the name is that of a
    service in front of the machine, or only this machine resolves it to 127.0.1.1.
    """
    with contextlib.ExitStack() as opened:
        found = []
        for address in own_addresses(host):
            try:
                found.append(opened.enter_context(listen_at(address, port)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        found = found or [listen_at("", port)]
        opened.pop_all()  # close none of them: there was no error
    for each in found:
        each.setblocking(False)
    return found
