"""The connection between the agents of two nodes: authenticated JSON lines that never block.

How the two ends authenticate each other:

1. The worker sends ``hello`` with a random number.
2. The coordinator answers ``number`` with one of its own. Both derive the key of this connection
   from the job's secret and the two numbers. From then on each line carries an HMAC over its
   sender, its sequence number and its text. The coordinator sends ``known``, the first such line.
3. The worker now trusts the coordinator and sends ``join``, which describes its node.

The secret is never sent, a recording opens no other connection, and a false coordinator receives
nothing and can give no instructions. A line that was altered, dropped, repeated or sent by somebody
else closes the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import json
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from anygauge.interface import AnygaugeError
from anygauge.util.exchange import derived_key
from anygauge.util.schema import Count, Text

LONGEST_LINE = 16 * 1024 * 1024
LONGEST_OF_STRANGERS = 64 * 1024
"""Bytes of a line before its sender is authenticated."""

UNPROVEN = "it did not prove that it knows this job's secret"
OF_ANOTHER_JOB = "the two agents belong to different jobs, or have different versions of anygauge"

_HALF_CHARACTER = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_CHUNK = 65536
_CHUNKS = 16
_PROOF = 64  # hexadecimal digits


@dataclass(slots=True)
class Seal:
    """Computes the HMACs of one direction.

    Attributes:
        sender: who sends its lines: ``coordinator`` or ``worker``.
        count: lines so far.
    """

    key: bytes
    sender: str
    count: int = 0

    def next(self, text: bytes) -> bytes:
        """The HMAC of the next line."""
        signed = f"{self.sender} {self.count} ".encode() + text
        self.count += 1
        return hmac.digest(self.key, signed, "sha256").hex().encode()


class Link:
    """One end of a connection. It keeps what it cannot send at once until `flush`.

    Attributes:
        peer: who is at the other end, in words.
        heard: when something last arrived (monotonic seconds).
        closed: nothing more will arrive: the other end closed, died, or sent an invalid line.
        why: why it was closed, in words.
        longest: the most bytes that a line may have.
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
        """Number of messages that are not sent yet."""
        return len(self._outgoing)

    def seal(self, key: bytes, own: str, other: str) -> None:
        """From now on, send an HMAC with every line and demand one of the other end.

        Args:
            key: of this connection alone.
            own, other: the roles of the two ends.
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
        """The complete messages that have arrived; bounded, so that no peer can stall its agent."""
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
        """The next complete message, if it has arrived: the link may be sealed before another."""
        message = self._next()
        if message is None and self._read():
            message = self._next()
        return message

    def shut(self, timeout_s: float = 2.0) -> None:
        """Send what is left, for at most `timeout_s`, and close."""
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

    def _read(self) -> bool:
        """Read one chunk of what has arrived; whether there was any."""
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
        """The next message of what was read; an invalid one closes the connection."""
        end = self._incoming.find(b"\n", self._searched)
        if (len(self._incoming) if end < 0 else end) > self.longest:
            self._reject(f"it sent a line of more than {self.longest:,} bytes")
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
                self._reject(UNPROVEN)
                return None
        message = _parse(line)
        if message is None:
            self._reject(f"it sent a line that is not a message: {line[:80]!r}")
        return message

    def _reject(self, why: str) -> None:
        self._incoming.clear()
        self._searched = 0
        self.close(why)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        text = line.decode()  # json would take more encodings from bytes, and half characters
        message = json.loads(text)
        if _HALF_CHARACTER.search(text):
            # Half a character cannot be encoded again, for a log, a key or a follower.
            whole = json.dumps(message, ensure_ascii=False).encode(errors="replace")
            message = json.loads(whole)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    return message


def key_of(token: str, worker: str, coordinator: str) -> bytes:
    """The key of a connection, from the job's secret and the random numbers of both ends."""
    return derived_key(token, f"link between agents {worker} {coordinator}")


def _random_number() -> str:
    return secrets.token_hex(16)


def _is_random_number(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


class CoordinatorHandshake:
    """A connection at the coordinator, from its first byte until its sender is authenticated.

    Attributes:
        since: when it was accepted, in monotonic seconds.
        greeted: it sent a valid ``hello``, which proves nothing yet.
    """

    def __init__(self, link: Link, token: str, since: float) -> None:
        self.link = link
        self.since = since
        self.greeted = False
        self._token = token

    def advance(self) -> Mapping[str, Any] | None:
        """Read and answer what has arrived; the authenticated ``join``, once it is there.

        Anything else closes the link.
        """
        message = self.link.receive_one()
        if message is not None and not self.greeted:
            self._answer(message)
            message = self.link.receive_one()
        if message is None:
            return None
        if message["kind"] != "join":
            self.link.close(f"it sent {message['kind'][:40]!r} before it had joined")
            return None
        self.link.longest = LONGEST_LINE
        return message

    def _answer(self, message: Mapping[str, Any]) -> None:
        number = message.get("number", "")
        if message["kind"] != "hello" or not _is_random_number(number):
            self.link.send("refused", reason=OF_ANOTHER_JOB)
            self.link.close("it belongs to another job, or is not an agent")
            return
        own = _random_number()
        self.link.send("number", number=own)
        self.link.seal(key_of(self._token, number, own), "coordinator", "worker")
        self.link.send("known")
        self.greeted = True


class WorkerHandshake:
    """A connection at a worker, until the coordinator has answered.

    Attributes:
        joined: the coordinator is authenticated, and ``join`` was sent to it.
    """

    def __init__(self, link: Link, token: str, join: Mapping[str, Any]) -> None:
        """Send ``hello``.

        Args:
            join: fields of the message to send once the coordinator is authenticated.
        """
        self.link = link
        self._token = token
        self._join = join
        self._number = _random_number()
        self._sealed = self.joined = False
        link.send("hello", number=self._number)

    def advance(self) -> Mapping[str, Any] | None:
        """Read and answer; once the worker has joined, the coordinator's next message."""
        message = self.link.receive_one()
        if message is None or self.joined:
            return message
        if not self._sealed:
            number = message.get("number", "")
            if message["kind"] == "number" and _is_random_number(number):
                self.link.seal(key_of(self._token, self._number, number), "worker", "coordinator")
                self._sealed = True
            else:
                self.link.close(UNPROVEN)
        elif message["kind"] == "known":
            self.link.longest = LONGEST_LINE
            self.link.send("join", **self._join)
            self.joined = True
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """How an agent describes its node when it joins.

    Attributes:
        fabric: network between machines that it would use; empty: its library chooses.
        settings: digest of each variable that must be the same on every node.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    node_rank: Count
    nodes: Count
    devices_per_node: Count
    host: Text = field(default_factory=socket.gethostname)
    version: Text = field(default_factory=partial(importlib.metadata.version, "anygauge"))
    fabric: Text = ""
    settings: Mapping[Text, Text] = field(default_factory=dict)


HELLO = TypeAdapter(Hello)


def check_hello(own: Hello, other: Hello, known: Mapping[int, str]) -> None:
    """Refuse a node that does not belong to this job.

    Args:
        own: of the coordinator.
        known: node rank -> host, of the nodes that have joined.

    Raises:
        AnygaugeError: its number is taken, or it was started for another job or version.
    """
    who = f"node {other.node_rank} ({other.host})"
    if other.node_rank in known:
        raise AnygaugeError(
            f"two agents report that they are node {other.node_rank}: {known[other.node_rank]} and "
            f"{other.host}. Give each machine a number of its own, from 0 to {own.nodes - 1}"
        )
    if not 0 <= other.node_rank < own.nodes:
        raise AnygaugeError(f"{who}: the job has nodes 0 to {own.nodes - 1}")
    for name, mine, theirs in (
        ("launch.nodes", own.nodes, other.nodes),
        ("launch.devices", own.devices_per_node, other.devices_per_node),
        ("the version of anygauge", own.version, other.version),
    ):
        if mine != theirs:
            raise AnygaugeError(
                f"{name} is {theirs} on {who}, but {mine} on the coordinator ({own.host}); all "
                "nodes must have the same"
            )
    names = sorted({*own.settings, *other.settings})
    differ = [name for name in names if own.settings.get(name) != other.settings.get(name)]
    if own.fabric != other.fabric:
        raise AnygaugeError(
            f"launch.fabric: between machines, {who} would use "
            f"{other.fabric or 'what its library finds'}, but the coordinator ({own.host}) would "
            f"use {own.fabric or 'what its library finds'}. Set launch.fabric to a network that "
            "all nodes have"
        )
    if differ:
        raise AnygaugeError(
            f"{', '.join(differ)}: the value on {who} differs from that on the coordinator "
            f"({own.host}), but all nodes must have the same. Set it under environment in the run "
            "file, which takes precedence on every node"
        )
