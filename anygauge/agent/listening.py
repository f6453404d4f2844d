"""Where the coordinator listens, and whom it lets in: few at a time, and nobody for long."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from anygauge.agent.admission import Newcomer
from anygauge.agent.link import Link
from anygauge.interface import AnygaugeError
from anygauge.util.rendezvous import listen_at

MOST_UNKNOWN = 64
"""Connections of unknown senders at once, beside one for each node."""
UNKNOWN_S = 10.0
"""Seconds that a sender may stay unknown."""

_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.05
_NOTES = 100
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """Takes in connections until their senders are known. To be left by ``with``.

    Attributes:
        where: at which addresses it listens, in words.
    """

    def __init__(self, host: str, port: int, token: str, nodes: int) -> None:
        """Listen.

        Args:
            host: this machine, as the others were told of it.

        Raises:
            AnygaugeError: the port is taken, or may not be used.
        """
        try:
            self._listeners = _listen(host, port)
        except OSError as error:
            raise AnygaugeError(
                f"the agent of node 0 cannot listen at port {port} on {socket.gethostname()}: "
                f"{error.strerror or error}. If another job has it, give this one launch.port"
            ) from error
        names = [str(each.getsockname()[0]) for each in self._listeners]
        every = names == ["0.0.0.0"]
        self.where = f"{'every address' if every else ', '.join(names)}, port {port}"
        print(f"waiting for the other nodes at {self.where} ({host})", file=sys.stderr)
        self._token = token
        self._most = MOST_UNKNOWN + nodes
        self._newcomers: list[Newcomer] = []
        self._notes = 0

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        for newcomer in self._newcomers:
            newcomer.link.close("all nodes have met, or the job has ended")

    @property
    def unknown(self) -> int:
        """Connections whose senders are not known yet."""
        return len(self._newcomers)

    def joined(self, timeout_s: float) -> list[tuple[Link, Mapping[str, Any]]]:
        """Wait for news, so long at most; those who have proved themselves, and their ``join``."""
        # Of poll rather than epoll, which would need a descriptor of its own.
        with selectors.PollSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            for newcomer in self._newcomers:
                selector.register(newcomer.link, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout_s)}
        for listener in self._listeners:
            if listener in ready:
                self._accept(listener)
        found = []
        now = time.monotonic()
        for newcomer in list(self._newcomers):
            link = newcomer.link
            join = newcomer.advance()
            if join is not None:
                self._newcomers.remove(newcomer)
                found.append((link, join))
            elif link.closed:
                self.turn_away(newcomer, link.why)
            elif now - newcomer.since > UNKNOWN_S:
                self.turn_away(newcomer, f"it had not joined after {UNKNOWN_S:g} s")
        return found

    def turn_away(self, newcomer: Newcomer, why: str) -> None:
        """Close a connection; the log says why, for the first of them."""
        newcomer.link.close(why)
        self._newcomers.remove(newcomer)
        self.note(newcomer.link, why)

    def note(self, link: Link, why: str) -> None:
        """Write to the log who was turned away."""
        self._notes += 1
        if self._notes <= _NOTES:
            print(f"{link.peer} was turned away: {why}", file=sys.stderr)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # What a stranger does to his own connection, or to this process's descriptors,
                # must not end the job.
                if error.errno in _NO_ROOM and not self._make_room("no descriptor is free"):
                    time.sleep(_PAUSE_S)
                return
            if len(self._newcomers) >= self._most:
                self._make_room(f"more than {self._most} connections were waiting to join")
            link = Link(connection, str(address[0]))
            self._newcomers.append(Newcomer(link, self._token, time.monotonic()))

    def _make_room(self, why: str) -> bool:
        """Turn away the oldest, and rather one who has said nothing; whether there was any."""
        oldest = min(self._newcomers, key=lambda n: (n.greeted, n.since), default=None)
        if oldest is not None:
            self.turn_away(oldest, why)
        return oldest is not None


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses that `host` has here; at every address where it has none.

    It may have none: names that the resolver of this machine does not know, that of a service in
    front of it, and one that this machine calls 127.0.1.1 though the others do not.
    """
    found: list[socket.socket] = []
    try:
        for address in own_addresses(host):
            try:
                listener = listen_at(address, port)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise
            found.append(listener)
        if not found:
            found.append(listen_at("", port))
    except OSError:
        for listener in found:
            listener.close()
        raise
    for listener in found:
        listener.setblocking(False)
    return found


def own_addresses(host: str) -> list[str]:
    """Addresses of a name at which others can reach it; none of a loopback, but for localhost."""
    with contextlib.suppress(OSError, UnicodeError):
        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(each[4][0]) for each in known))
        if host == "localhost" or host in found:
            return found
        return [each for each in found if not each.startswith("127.") and each != "::1"]
    return []
