"""Node 0 lets other nodes in: few unknown senders at a time, and none of them for long."""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from anygauge.interface import AnygaugeError, LaunchSettings
from anygauge.launch.channel import MAX_BYTES, UNPROVEN, Channel, has_proof, proof_of
from anygauge.util.rendezvous import listen_at, own_addresses

MOST_UNKNOWN = 64
"""Connections of unknown senders at the same time, in addition to one for each node."""
UNKNOWN_S = 10.0
"""Seconds that a sender may stay unknown."""

_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.05
_NOTES = 100
_FILES, _FILES_OF_A_RANK = 16, 4  # of the agent itself: logs, sockets, selectors, libraries
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections until their senders have joined. A context manager.

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
        self._unknown: dict[Channel, float] = {}  # when each was accepted, in monotonic seconds
        self._numbers: dict[Channel, tuple[str, str]] = {}  # of both ends, after ``hello``
        self._notes = 0

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._sockets, *(channel.socket for channel in self._unknown)):
            each.close()

    def poll(self, timeout_s: float) -> list[tuple[Channel, Mapping[str, Any]]]:
        """Wait for messages; the channels of those who have now joined, and their ``join``."""
        # poll rather than epoll, which would need a descriptor of its own.
        with selectors.PollSelector() as selector:
            for each in (*self._sockets, *(channel.socket for channel in self._unknown)):
                selector.register(each, selectors.EVENT_READ)
            selector.select(timeout_s)
        for each in self._sockets:
            self._accept(each)
        found = []
        late = time.monotonic() - UNKNOWN_S
        for channel, since in list(self._unknown.items()):
            join = self._advance(channel)
            if join is not None:
                self._forget(channel)
                found.append((channel, join))
            elif channel.closed or since < late:
                self._reject(channel, f"it had not joined after {UNKNOWN_S:g} s")
        return found

    def log_rejection(self, channel: Channel, why: str) -> None:
        """Log that a connection was rejected; only the first hundred, since strangers may try."""
        self._notes += 1
        if self._notes <= _NOTES:
            print(f"rejected a connection from {channel.peer}: {why}", file=sys.stderr)

    def _advance(self, channel: Channel) -> Mapping[str, Any] | None:
        """Read and answer what has arrived; the ``join``, once it is proven."""
        for message in channel.receive():
            number, numbers = str(message.get("number")), self._numbers.get(channel)
            if numbers is None and re.fullmatch("[0-9a-f]{32}", number):
                numbers = self._numbers[channel] = (number, secrets.token_hex(16))
                proof = proof_of(self._secret, "coordinator", *numbers)
                channel.send("proof", number=numbers[1], proof=proof)
            elif numbers and has_proof(message, proof_of(self._secret, "worker", *numbers)):
                channel.longest = MAX_BYTES
                return message
            else:
                channel.close(UNPROVEN)
        return None

    def _reject(self, channel: Channel, why: str) -> None:
        """Close a connection, if it is not closed for another reason."""
        channel.close(why)
        self._forget(channel)
        self.log_rejection(channel, channel.why)

    def _forget(self, channel: Channel) -> None:
        del self._unknown[channel]
        self._numbers.pop(channel, None)

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
            self._unknown[Channel(connection, str(address[0]))] = time.monotonic()

    def _make_room(self, why: str) -> bool:
        """Reject the oldest, preferably one that has sent nothing valid; whether there was any."""
        if not self._unknown:
            return False
        self._reject(min(self._unknown, key=lambda one: one in self._numbers), why)
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


def allow_open_files(launch: LaunchSettings) -> None:
    """Raise this process's limit of open files to what the connections of all nodes need.

    Raises:
        AnygaugeError: the hard limit is lower.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in limits)
    least = launch.nodes + _FILES + _FILES_OF_A_RANK * launch.devices
    if hard < least:
        raise AnygaugeError(
            f"the agent of node 0 keeps a connection to each of the job's {launch.nodes} nodes and "
            f"needs {least} open files, but its process may have {hard} at most. Raise the hard "
            f"limit on {socket.gethostname()} (ulimit -Hn; LimitNOFILE= of a service; --ulimit "
            "nofile= of a container)"
        )
    wanted = min(least + MOST_UNKNOWN, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
