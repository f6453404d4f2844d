"""Where the coordinator listens: admits connections until their senders are authenticated."""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from anygauge.interface import AnygaugeError, LaunchSettings
from anygauge.launch.link import CoordinatorHandshake, Link
from anygauge.util.rendezvous import listen_at, own_addresses

MOST_UNKNOWN = 64
"""Unauthenticated connections at the same time, in addition to one for each node."""
UNKNOWN_S = 10.0
"""Seconds that a connection may stay unauthenticated."""

_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.05
_NOTES = 100
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FILES, _FILES_OF_A_RANK = 16, 4  # of the agent itself: logs, sockets, selectors, libraries


def allow_open_files(launch: LaunchSettings) -> None:
    """Raise this process's limit of open files to what the connections of all nodes need.

    Raises:
        AnygaugeError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = launch.nodes + _FILES + _FILES_OF_A_RANK * launch.devices
    if soft == resource.RLIM_INFINITY or soft >= least + MOST_UNKNOWN:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise AnygaugeError(
            f"the agent of node 0 keeps a connection to each of the job's {launch.nodes} nodes and "
            f"needs {least} open files, but its process may have {hard} at most. Raise the hard "
            f"limit on {socket.gethostname()} (ulimit -Hn; LimitNOFILE= of a service; --ulimit "
            "nofile= of a container)"
        )
    wanted = least + MOST_UNKNOWN
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if raised > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        print(
            f"raised the limit of open files from {soft} to {raised}, for the connections to "
            f"{launch.nodes} nodes (ulimit -n)",
            file=sys.stderr,
        )


class Listener:
    """Accepts connections until their senders are authenticated: few at a time, none for long.

    A context manager.

    Attributes:
        where: at which addresses it listens, in words.
    """

    def __init__(self, host: str, port: int, token: str, nodes: int) -> None:
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
        every = names == ["0.0.0.0"]
        self.where = f"{'every address' if every else ', '.join(names)}, port {port}"
        print(f"waiting for the other nodes at {self.where} ({host})", file=sys.stderr)
        self._token = token
        self._most = MOST_UNKNOWN + nodes
        self._pending: list[CoordinatorHandshake] = []
        self._notes = 0

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()
        for handshake in self._pending:
            handshake.link.close("all nodes have met, or the job has ended")

    @property
    def unknown(self) -> int:
        """Number of unauthenticated connections."""
        return len(self._pending)

    def joined(self, timeout_s: float) -> list[tuple[Link, Mapping[str, Any]]]:
        """Wait for messages; the links that are now authenticated, and their ``join``."""
        # poll rather than epoll, which would need a descriptor of its own.
        with selectors.PollSelector() as selector:
            for each in self._sockets:
                selector.register(each, selectors.EVENT_READ)
            for handshake in self._pending:
                selector.register(handshake.link, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout_s)}
        for each in self._sockets:
            if each in ready:
                self._accept(each)
        found = []
        now = time.monotonic()
        for handshake in list(self._pending):
            link = handshake.link
            join = handshake.advance() if link in ready else None
            if join is not None:
                self._pending.remove(handshake)
                found.append((link, join))
            elif link.closed:
                self._reject(handshake, link.why)
            elif now - handshake.since > UNKNOWN_S:
                self._reject(handshake, f"it had not joined after {UNKNOWN_S:g} s")
        return found

    def note(self, link: Link, why: str) -> None:
        """Log that a connection was rejected; only the first hundred, since strangers may try."""
        self._notes += 1
        if self._notes <= _NOTES:
            print(f"rejected a connection from {link.peer}: {why}", file=sys.stderr)

    def _reject(self, handshake: CoordinatorHandshake, why: str) -> None:
        handshake.link.close(why)
        self._pending.remove(handshake)
        self.note(handshake.link, why)

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
            if len(self._pending) >= self._most:
                self._make_room(f"more than {self._most} connections were waiting to join")
            link = Link(connection, str(address[0]))
            self._pending.append(CoordinatorHandshake(link, self._token, time.monotonic()))

    def _make_room(self, why: str) -> bool:
        """Reject the oldest, preferably one that has sent nothing valid; whether there was any."""
        oldest = min(self._pending, key=lambda each: (each.greeted, each.since), default=None)
        if oldest is not None:
            self._reject(oldest, why)
        return oldest is not None


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses that `host` has here; at every address where it has none.

    It may have none: the resolver of this machine does not know the name, the name is that of a
    service in front of the machine, or only this machine resolves it to 127.0.1.1.
    """
    found: list[socket.socket] = []
    try:
        for address in own_addresses(host):
            try:
                found.append(listen_at(address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not found:
            found.append(listen_at("", port))
    except OSError:
        for listener in found:
            listener.close()
        raise
    for listener in found:
        listener.setblocking(False)
    return found
