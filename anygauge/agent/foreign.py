"""A process that another launcher started as a rank: which rank it is, and where the ranks meet.

Read from variables of the launcher, by these rules, the first that fits:

1. ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``, as torchrun sets them, and all that speak its
   language: accelerate, DeepSpeed's launcher, Ray Train, a script of one's own.
2. A step of Slurm with several tasks (``SLURM_STEP_NUM_TASKS``, which neither a batch script nor
   salloc's shell has). Its first node is where the ranks meet.
3. Several processes of Open MPI's mpirun, which names no address: on one machine none is needed.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from anygauge.interface import UsageError
from anygauge.util.files import write_text

_LOCALHOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Derived ports: below those that systems give to connections (32768 and up on Linux)."""


ALONE = "start it without that launcher, or unset RANK, WORLD_SIZE and MASTER_ADDR"
"""What leads back to ranks that anygauge starts."""

_OR_UNSET = f"or, to have anygauge start the ranks itself: {ALONE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignLaunch:
    """One rank of a launch that is not anygauge's.

    Attributes:
        launcher: what started it, in words.
        devices: ranks on each machine.
        host: of rank 0, as all ranks know it.
        port: where the ranks meet there.
        served: the launcher itself has a store at that port (torch's agent), and rank 0 opens none.
        tied: it is a child of the launcher, and is to end with it.
        restarts: how often the launcher would start the ranks again.
        error_file: where the launcher looks for a rank's error; empty where it does not.
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
        """Leave an error where the launcher looks for it: torchrun shows that of the earliest.

        Args:
            at: seconds since the epoch; None for now.
        """
        if self.error_file:
            # torch/distributed/elastic/multiprocessing/errors: ProcessFailure._get_error_data
            record = {"message": text, "timestamp": str(int(time.time() if at is None else at))}
            with contextlib.suppress(OSError):
                write_text(self.error_file, json.dumps(record))


def find_launch(environ: Mapping[str, str]) -> ForeignLaunch | None:
    """Whose rank this process is; None where anygauge is to start ranks itself.

    Raises:
        UsageError: the variables do not say enough, contradict each other, or give the machines
            different numbers of ranks.
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


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: ``gpu[01-04,07],login`` begins with ``gpu01``."""
    name, within = "", False
    chosen = False
    for letter in nodes:
        if letter == "[":
            within, chosen = True, False
        elif letter == "]":
            within = False
        elif within:
            chosen = chosen or not letter.isdigit()
            name += "" if chosen else letter
        elif letter == ",":
            break
        else:
            name += letter
    return name


def _of_torch(environ: Mapping[str, str]) -> ForeignLaunch:
    elastic = bool(environ.get("TORCHELASTIC_RUN_ID"))
    alone = environ["WORLD_SIZE"] == "1"
    local = environ.get("LOCAL_RANK") or ("0" if alone else "")
    # torch's name, and that of DeepSpeed's launcher
    devices = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or ("1" if alone else "")
    if not local or not devices:
        raise UsageError(
            "RANK, WORLD_SIZE and MASTER_ADDR are set, so this process is a rank that another "
            "launcher started; but LOCAL_RANK and LOCAL_WORLD_SIZE, which say which device of this "
            f"machine it has, are not both set. Set them, as torchrun does; {_OR_UNSET}"
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
            f"mpirun started {world_size} ranks on several machines and names no address: say "
            "where rank 0 is (mpirun -x MASTER_ADDR=HOST, with the host of the first machine)"
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
            f"{found.launcher} says that this is rank {found.rank} of {found.world_size}, and port "
            f"{found.port} where ranks meet: ranks count from 0, ports are 1 to 65535; {_OR_UNSET}"
        )
    if found.devices < 1 or found.world_size % found.devices:
        raise UsageError(
            f"{found.launcher} started {found.world_size} ranks, {found.devices} of them on this "
            "machine: every machine must have equally many"
        )
    if found.local_rank != found.rank % found.devices:
        raise UsageError(
            f"{found.launcher} made rank {found.rank} number {found.local_rank} of the "
            f"{found.devices} ranks of its machine: neighbouring ranks must be on one machine, "
            "equally many on each (srun --distribution=block, mpirun --map-by ppr:N:node)"
        )


def _port(environ: Mapping[str, str], of: str) -> int:
    """The user's, or one that all ranks of a launch derive alike."""
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
            f"{name} is {text!r}, not a number from 0: this process was started as a rank by "
            f"another launcher, which sets it; {_OR_UNSET}"
        )
    return int(text)
