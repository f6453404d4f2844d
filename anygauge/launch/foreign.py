"""Ranks that another launcher started: which rank this process is, and where the ranks meet.

It is read from the launcher's variables. The first rule that applies counts:

1. ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are set, as torchrun sets them, and with it
   accelerate, DeepSpeed's launcher, Ray Train or a script of the user.
2. A step of Slurm has several tasks (``SLURM_STEP_NUM_TASKS``, which neither a batch script nor
   salloc's shell has). The ranks meet on its first node.
3. Open MPI's mpirun started several processes. It gives no address; one machine needs none.

Ranks that anygauge starts must not inherit such variables: see `without_launcher`.
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

_IDENTITY = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_|CROSS_)?RANK|((LOCAL_|GROUP_|ROLE_)?WORLD|LOCAL|CROSS)_SIZE"
    r"|ROLE_NAME|(MASTER|TORCHELASTIC|PET|OMPI_COMM|PMI|PMIX)_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|GTIDS|TASK_PID)"
    rf"|{EVENTS_FD}|{PARENT_PID}|{STORE_FD})"
)

START_REMEDY = "start it without that launcher, or unset RANK, WORLD_SIZE and MASTER_ADDR"
"""How to have anygauge start the ranks instead."""

_OR_UNSET = f"or, to have anygauge start the ranks itself: {START_REMEDY}"


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
        launcher = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "another launcher"
        told = _of_torch(environ)
    elif _count(environ, "SLURM_STEP_NUM_TASKS") > 1 and environ.get("SLURM_PROCID"):
        launcher, told = "srun", _of_slurm(environ)
    elif _count(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        launcher, told = "mpirun", _of_open_mpi(environ)
    else:
        return None
    found = ForeignLaunch(
        launcher=launcher,
        rank=_number(told, "RANK"),
        world_size=_number(told, "WORLD_SIZE"),
        local_rank=_number(told, "LOCAL_RANK"),
        devices=_number(told, "LOCAL_WORLD_SIZE"),
        host=told["MASTER_ADDR"],
        port=_number(told, "MASTER_PORT"),
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        tied=launcher != "another launcher",
        restarts=_count(environ, "TORCHELASTIC_MAX_RESTARTS"),
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )
    _check(found)
    return found


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without the variables by which another launcher numbers its processes.

    Libraries inside a rank would believe them over those of the agent.
    """
    return {name: value for name, value in environ.items() if not _IDENTITY.fullmatch(name)}


def _of_torch(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The launch in the variables of torchrun, as the two below."""
    one = environ["WORLD_SIZE"] == "1"
    local = environ.get("LOCAL_RANK") or ("0" if one else "")
    # torch's name, and that of DeepSpeed's launcher
    devices = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or ("1" if one else "")
    if not local or not devices:
        raise UsageError(
            "RANK, WORLD_SIZE and MASTER_ADDR are set, so this process is a rank that another "
            "launcher started; but LOCAL_RANK and LOCAL_WORLD_SIZE, which choose its device on "
            f"this machine, are not both set. Set them, as torchrun does; {_OR_UNSET}"
        )
    return {**environ, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": devices}


def _of_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = max(1, _count(environ, "SLURM_STEP_NUM_NODES"))
    # gpu[01-04,07],login begins with gpu01
    listed = re.sub(r"\[(\d*)[^\]]*\]?", r"\1", environ.get("SLURM_STEP_NODELIST", ""))
    first = listed.partition(",")[0] if nodes > 1 else _LOCALHOST
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(tasks // nodes if tasks % nodes == 0 else tasks),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first,
        "MASTER_PORT": environ.get("MASTER_PORT") or _port_of(step),
    }


def _of_open_mpi(environ: Mapping[str, str]) -> Mapping[str, str]:
    told = {
        "RANK": environ.get("OMPI_COMM_WORLD_RANK", ""),
        "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", ""),
        "LOCAL_WORLD_SIZE": environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    }
    if not environ.get("MASTER_ADDR") and told["WORLD_SIZE"] != told["LOCAL_WORLD_SIZE"]:
        raise UsageError(
            f"mpirun started {told['WORLD_SIZE']} ranks on several machines, but did not tell them "
            "the address of rank 0. Pass it with mpirun -x MASTER_ADDR=HOST, where HOST is the "
            "first machine"
        )
    return {
        **told,
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _LOCALHOST,
        "MASTER_PORT": environ.get("MASTER_PORT") or _port_of(environ.get("PMIX_NAMESPACE", "")),
    }


def _port_of(launch: str) -> str:
    """A port that all ranks derive from the launch in the same way."""
    return str(_FIRST_PORT + zlib.crc32(launch.encode()) % _PORTS)


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
