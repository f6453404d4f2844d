"""Lets ranks meet that another launcher started; rank 0 informs the others there.

The launcher's address has a store of torch's. Rank 0 tells through it which run this is; the others
read its job file, which only their user can. The store knows no authentication.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import re
import secrets
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge.interface import ATTEMPTS, AnygaugeError, Job
from anygauge.util.text import first_line

if TYPE_CHECKING:
    import torch.distributed as dist

    from anygauge.launch.foreign import ForeignLaunch

TURN_S = 0.05
_SEEN_S = 30.0
"""Until a file that rank 0 has written is seen on other machines."""
_MAX_SHOWN = 8


def meeting_store(launch: ForeignLaunch, patience_s: float) -> dist.Store:
    """Return the store where ranks meet; rank 0 serves it, unless the launcher does.

    Raises:
        AnygaugeError: it cannot be served, or nobody serves it in time.
    """
    from anygauge.util.rendezvous import connect_store, listen_at, own_addresses, serve_store

    timeout = datetime.timedelta(seconds=patience_s)
    if launch.served or launch.rank != 0:
        return connect_store(launch.host, launch.port, timeout)
    # Every address where this machine does not know the one by which the others reach it.
    for address in (*own_addresses(launch.host), ""):
        try:
            listener = listen_at(address, launch.port).detach()
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise AnygaugeError(
                f"rank 0 cannot listen at {launch.host}, port {launch.port}, where the ranks of "
                f"{launch.launcher} meet: {error.strerror or error}. Another job may use the port: "
                "set MASTER_PORT to a free one for all ranks. If your launcher already serves "
                "torch's store there, set TORCHELASTIC_USE_AGENT_STORE=True"
            ) from error
        return serve_store(address or launch.host, launch.port, listener, timeout)
    raise AnygaugeError(
        f"rank 0 cannot listen at {launch.host}: it is not an address of this machine. Set "
        "MASTER_ADDR to the address of rank 0's machine"
    )


def agree(
    store: dist.Store, launch: ForeignLaunch, known: Mapping[str, Any], patience_s: float
) -> Mapping[str, Any]:
    """Return what rank 0 knows of the run.

    A launcher's store may hold what an earlier attempt has left. So each rank asks with a number
    that it draws, and then puts the run's in its place.

    Args:
        known: what this rank knows; of rank 0: with the run's number, ``id``.

    Raises:
        AnygaugeError: rank 0 or others did not come.
    """
    mine = f"anygauge/rank/{launch.rank}"
    if launch.rank == 0:
        _answer_all(store, launch, known, patience_s)
        return known
    number = secrets.token_hex(16)
    store.set(mine, number)
    try:
        answer: dict[str, Any] = json.loads(store.get(f"anygauge/answer/{number}"))
    except RuntimeError as error:
        raise AnygaugeError(
            f"rank 0 did not announce the run within {patience_s:g} s (launch.join_timeout_s): "
            f"{first_line(error)}"
        ) from error
    store.set(mine, answer["id"])
    return answer


def _answer_all(
    store: dist.Store, launch: ForeignLaunch, known: Mapping[str, Any], patience_s: float
) -> None:
    text, answered = json.dumps(known), {""}
    missing = list(range(1, launch.world_size))
    deadline = time.monotonic() + patience_s
    while missing:
        for rank in tuple(missing):
            key = f"anygauge/rank/{rank}"
            number = store.get(key).decode() if store.check([key]) else ""
            if number == known["id"]:
                missing.remove(rank)
            elif number not in answered:
                answered.add(number)
                store.set(f"anygauge/answer/{number}", text)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing[:_MAX_SHOWN]))
            more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
            raise AnygaugeError(
                f"of {launch.world_size} ranks, {names}{more} did not connect to {launch.host}, "
                f"port {launch.port}, within {patience_s:g} s (launch.join_timeout_s)"
            )
        time.sleep(TURN_S)


def job_of(launch: ForeignLaunch, known: Mapping[str, Any], answer: Mapping[str, Any]) -> Job:
    """The job that rank 0 has written.

    Args:
        known: what this rank knows: the folder that its arguments name, and its machine.

    Raises:
        AnygaugeError: it is not seen here, belongs to another run, or this machine does not fit.
    """
    from anygauge.launch.hello import HELLO, check_hello
    from anygauge.launch.outcome import read_record

    path = answer["job"]
    # A stranger may have answered: what the store names must be a run of one's own.
    within = re.escape(known["folder"]) + rf"(-\d+)?(/{ATTEMPTS}/[^/]+)?/job\.json"
    if not re.fullmatch(within, path):
        raise AnygaugeError(
            f"rank 0 writes to {answer['folder']}, but this rank's arguments name "
            f"{known['folder']}. Start all ranks from the same folder, with the same arguments, "
            "and give the shared storage the same path on every machine"
        )
    if launch.node_rank:
        first, own = (read_record(HELLO, each["hello"]) for each in (answer, known))
        check_hello(first, own, {})
    deadline = time.monotonic() + _SEEN_S
    while True:
        with contextlib.suppress(AnygaugeError):
            job = Job.load(path)
            if job.id == answer["id"]:  # not what another machine still shows of an earlier job
                return job
        if time.monotonic() > deadline:
            raise AnygaugeError(
                f"{path}, which rank 0 has written, is not seen on {socket.gethostname()}. The "
                "folder of a run must be on storage that all its machines share (--output)"
            )
        time.sleep(TURN_S)
