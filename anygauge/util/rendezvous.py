"""Lets ranks meet in torch's store, made here and never from a URL.

Torch cuts a URL of a path at ``#`` and ``?``, and its own server of a store listens at every
address of the machine. So a path is taken as it is written, and a server gets a socket that is
bound to the one address by which the ranks know it.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from typing import TYPE_CHECKING

from anygauge.util.errors import AnygaugeError
from anygauge.util.exchange import derived_key
from anygauge.util.text import first_line

if TYPE_CHECKING:
    import torch.distributed as dist

_FILE, _TCP, _SERVED = "file://", "tcp://", "served://"

_ATTEMPT_S, _PAUSE_S = 5.0, 0.1

STORE_FD = "ANYGAUGE_STORE_FD"
"""Environment variable of rank 0: the socket on which its store listens, if an agent opened it."""


def file_of(rendezvous: str) -> str | None:
    """The path of a meeting point that is a file, character for character; None for another."""
    return rendezvous.removeprefix(_FILE) if rendezvous.startswith(_FILE) else None


def tcp_address(host: str, port: int) -> str:
    """The meeting point at an address."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def served_address(host: str, port: int) -> str:
    """The meeting point at an address where a store is served already."""
    return tcp_address(host, port).replace(_TCP, _SERVED, 1)


def serve_store(host: str, port: int, listener: int, timeout: datetime.timedelta) -> dist.Store:
    """Serve a store for as long as the result is kept.

    Args:
        listener: descriptor of a socket that listens there; the store takes it over.
    """
    import torch.distributed as dist

    # Torch's newer server (libuv) takes no socket of others before its release 2.8.
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener, use_libuv=False,
    )  # fmt: skip


def connect_store(host: str, port: int, timeout: datetime.timedelta) -> dist.Store:
    """A store that is served, by a rank of this job or by whoever started it.

    Raises:
        AnygaugeError: nobody has served one there in time.
    """
    import torch.distributed as dist

    nothing = f"no store answers at {host}, port {port}, where the ranks meet"
    # Torch would wait as well, and print a stack of its own for each attempt.
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=_ATTEMPT_S).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise AnygaugeError(
                    f"{nothing} (MASTER_ADDR, MASTER_PORT), within {timeout.total_seconds():g} s "
                    f"(launch.join_timeout_s): {error.strerror or error}. Rank 0 has not come, or "
                    "is not to be reached at that address"
                ) from error
        time.sleep(_PAUSE_S)
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # all of torch's own are
        raise AnygaugeError(f"{nothing}: {first_line(error)}") from error


def open_store(
    rendezvous: str,
    *,
    secret: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    listener: int | None = None,
) -> dist.Store:
    """The store of a run. Its keys stand under a prefix that follows from the job's secret.

    The prefix separates jobs, earlier ones too. It is not a password: whoever reaches the
    store can read it there.

    Args:
        rendezvous: ``file://PATH``, ``tcp://HOST:PORT``, or ``served://HOST:PORT`` where a store is
            there already.
        listener: descriptor of a socket that listens there, for rank 0; the store takes it over.

    Raises:
        AnygaugeError: it is none of them, or a port is to be used without a secret.
    """
    import torch.distributed as dist

    path = file_of(rendezvous)
    store: dist.Store
    if path is not None:
        store = dist.FileStore(path, world_size)
    else:
        host, port = _host_and_port(rendezvous)
        if not secret:
            raise AnygaugeError(
                f"ranks cannot meet at {rendezvous} without a secret: anyone could join. The job "
                "file has no token; start the run with anygauge train or launch, which draw one"
            )
        if rank == 0 and not rendezvous.startswith(_SERVED):
            if listener is None:
                listener = listen_at(host, port).detach()
            store = serve_store(host, port, listener, timeout)
        else:
            store = connect_store(host, port, timeout)
    store.set_timeout(timeout)
    return dist.PrefixStore(derived_key(secret, "keys of the store").hex()[:32], store)


def listen_at(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address (all, where it is empty); port 0 takes a free one.

    Raises:
        OSError: it is not an address of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def own_addresses(host: str) -> list[str]:
    """Addresses of a name under which others can reach it: no loopback, except for localhost."""
    with contextlib.suppress(OSError, UnicodeError):
        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(each[4][0]) for each in known))
        if host == "localhost" or host in found:
            return found
        return [each for each in found if not each.startswith("127.") and each != "::1"]
    return []


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    scheme = _SERVED if rendezvous.startswith(_SERVED) else _TCP
    host, _, port = rendezvous.removeprefix(scheme).rpartition(":")
    if not rendezvous.startswith(scheme) or not host or not port.isdecimal():
        raise AnygaugeError(
            f"ranks cannot meet at {rendezvous!r}: file:///path and tcp://host:port are known"
        )
    return host.strip("[]"), int(port)
