"""Ranks that another launcher started: which rank this process is, and where the ranks meet.

It is read from the launcher's variables. The first rule that applies counts:

1. ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are set, as torchrun sets them, and with it
   accelerate, DeepSpeed's launcher, Ray Train or a script of the user.
2. A step of Slurm has several tasks (``SLURM_STEP_NUM_TASKS``, which neither a batch script nor
   salloc's shell has). The ranks meet on its first node.
3. Open MPI's mpirun started several processes. It gives no address; one machine needs none.

Ranks that anygauge starts must not inherit such variables: see `scrub`.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from anygauge.interface import UsageError
from anygauge.util.events import EVENTS_FD
from anygauge.util.files import write_text
from anygauge.util.processes import PARENT_PID
from anygauge.util.rendezvous import STORE_FD

_LOCALHOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Derived ports: below those that systems give to connections (32768 and up on Linux)."""

_IDENTITY = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CROSS_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("LOCAL_SIZE", "CROSS_SIZE", "ROLE_NAME"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
        *("SLURM_GTIDS", "SLURM_TASK_PID"),
        *(EVENTS_FD, PARENT_PID, STORE_FD),
    }
)
_IDENTITY_PREFIXES = ("MASTER_", "TORCHELASTIC_", "PET_", "OMPI_COMM_", "PMI_", "PMIX_")

ALONE = "start it without that launcher, or unset RANK, WORLD_SIZE and MASTER_ADDR"
"""How to have anygauge start the ranks instead."""

_OR_UNSET = f"or, to have anygauge start the ranks itself: {ALONE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignLaunch:
    """One rank of another launcher.

    Attributes:
        launcher: its name, for messages.
        devices: ranks on each machine.
        host: of rank 0, as all ranks know it.
        port: where the ranks meet there.
        served: the launcher serves a store at that port (torch's agent does); rank 0 opens none.
        tied: it is a child of the launcher, and must end with it.
        restarts: how often the launcher would restart the ranks.
        error_file: where the launcher reads a rank's error; empty where it reads none.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    devices: int
    host: str
    port: int
    served: bool = False
    tied: bool = False
    restarts: int = 0
    error_file: str = ""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.devices

    @property
    def node_rank(self) -> int:
        """Which machine this is, from 0."""
        return self.rank // self.devices

    def report(self, text: str, at: float | None = None) -> None:
        """Write an error where the launcher reads it: torchrun shows that of the earliest rank.

        Args:
            at: seconds since the epoch; None for now.
        """
        if self.error_file:
            # torch/distributed/elastic/multiprocessing/errors: ProcessFailure._get_error_data
            record = {"message": text, "timestamp": str(int(time.time() if at is None else at))}
            with contextlib.suppress(OSError):
                write_text(self.error_file, json.dumps(record))


def find_launch(environ: Mapping[str, str]) -> ForeignLaunch | None:
    """The rank that this process is; None where anygauge is to start ranks itself.

    Raises:
        UsageError: variables are missing, contradict each other, or give the machines different
            numbers of ranks.
    """
    if all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        found = _of_torch(environ)
    elif _count(environ, "SLURM_STEP_NUM_TASKS") > 1 and environ.get("SLURM_PROCID"):
        found = _of_slurm(environ)
    elif _count(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        found = _of_open_mpi(environ)
    else:
        return None
    _check(found)
    return found


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without the variables by which another launcher numbers its processes.

    Libraries inside a rank would believe them over those of the agent.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _IDENTITY and not name.startswith(_IDENTITY_PREFIXES)
    }


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: ``gpu[01-04,07],login`` begins with ``gpu01``."""
    return re.sub(r"\[(\d*)[^\]]*\]?", r"\1", nodes).partition(",")[0]


def _of_torch(environ: Mapping[str, str]) -> ForeignLaunch:
    elastic = bool(environ.get("TORCHELASTIC_RUN_ID"))
    alone = environ["WORLD_SIZE"] == "1"
    local = environ.get("LOCAL_RANK") or ("0" if alone else "")
    # torch's name, and that of DeepSpeed's launcher
    devices = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or ("1" if alone else "")
    if not local or not devices:
        raise UsageError(
            "RANK, WORLD_SIZE and MASTER_ADDR are set, so this process is a rank that another "
            "launcher started; but LOCAL_RANK and LOCAL_WORLD_SIZE, which choose its device on "
            f"this machine, are not both set. Set them, as torchrun does; {_OR_UNSET}"
        )
    known = {**environ, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": devices}
    return ForeignLaunch(
        launcher="torchrun" if elastic else "another launcher",
        rank=_number(known, "RANK"),
        world_size=_number(known, "WORLD_SIZE"),
        local_rank=_number(known, "LOCAL_RANK"),
        devices=_number(known, "LOCAL_WORLD_SIZE"),
        host=environ["MASTER_ADDR"],
        port=_number(known, "MASTER_PORT"),
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        tied=elastic,
        restarts=_count(environ, "TORCHELASTIC_MAX_RESTARTS"),
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _of_slurm(environ: Mapping[str, str]) -> ForeignLaunch:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = max(1, _count(environ, "SLURM_STEP_NUM_NODES"))
    first = first_host(environ.get("SLURM_STEP_NODELIST", "")) if nodes > 1 else _LOCALHOST
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return ForeignLaunch(
        launcher="srun",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        devices=world_size // nodes if world_size % nodes == 0 else world_size,
        host=environ.get("MASTER_ADDR") or first,
        port=_port(environ, step),
        tied=True,
    )


def _of_open_mpi(environ: Mapping[str, str]) -> ForeignLaunch:
    world_size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    devices = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = environ.get("MASTER_ADDR", "")
    if not host and world_size != devices:
        raise UsageError(
            f"mpirun started {world_size} ranks on several machines, but did not tell them the "
            "address of rank 0. Pass it with mpirun -x MASTER_ADDR=HOST, where HOST is the first "
            "machine"
        )
    return ForeignLaunch(
        launcher="mpirun",
        rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        devices=devices,
        host=host or _LOCALHOST,
        port=_port(environ, environ.get("PMIX_NAMESPACE", "")),
        tied=True,
    )


def _check(found: ForeignLaunch) -> None:
    if not 0 <= found.rank < found.world_size or not 0 < found.port < 65536:
        raise UsageError(
            f"{found.launcher} gave this process rank {found.rank} of {found.world_size} ranks, "
            f"and port {found.port} to meet at. A rank must be at least 0 and below the number of "
            f"ranks, and a port from 1 to 65535. Correct them; {_OR_UNSET}"
        )
    if found.devices < 1 or found.world_size % found.devices:
        raise UsageError(
            f"{found.launcher} started {found.world_size} ranks, {found.devices} of them on this "
            "machine: every machine must have equally many"
        )
    if found.local_rank != found.rank % found.devices:
        raise UsageError(
            f"{found.launcher} gave rank {found.rank} the local rank {found.local_rank} of the "
            f"{found.devices} on its machine, but it must be {found.rank % found.devices}. Place "
            "neighbouring ranks on the same machine, and the same number on each machine (srun "
            "--distribution=block, mpirun --map-by ppr:N:node)"
        )


def _port(environ: Mapping[str, str], of: str) -> int:
    """The user's ``MASTER_PORT``, or one that all ranks derive from the launch in the same way."""
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT")
    return _FIRST_PORT + zlib.crc32(of.encode()) % _PORTS


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdecimal():
        raise UsageError(
            f"{name} is {text!r}, not a whole number from 0. Another launcher started this process "
            f"as a rank, and sets that variable; {_OR_UNSET}"
        )
    return int(text)
