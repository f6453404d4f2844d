"""A job: everything that a launcher must know to start a run, and nothing that needs a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anygauge.interface.errors import AnygaugeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run, as launchers, agents and backends see it.

    Attributes:
        name: short name for humans.
        run_directory: absolute path that every node sees; holds the resolved run file and logs.
        run_file: absolute path of the resolved run file.
        backend: name of the backend.
        strategy: name of the strategy.
        nodes: number of machines.
        devices_per_node: ranks started on each machine.
        rendezvous: where ranks meet: ``file:///path`` (one machine) or ``tcp://host:port``.
        collective_timeout_s: seconds after which a collective that hangs ends the run.
        environment: variables that the run file asks for.
        backend_options: the run file's ``backend_options``, for the backend alone to read.
    """

    name: str
    run_directory: str
    run_file: str
    backend: str
    strategy: str
    nodes: int = 1
    devices_per_node: int = 1
    rendezvous: str
    collective_timeout_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.nodes * self.devices_per_node

    def dump(self) -> str:
        """The job as JSON text; `load` reads it back."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file written by `dump`.

        Raises:
            AnygaugeError: the file is missing or is no job file of this version.
        """
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise AnygaugeError(f"{path} is not a job file of this anygauge: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """One network interface as the kernel shows it (``/sys/class/net``)."""

    name: str
    up: bool
    physical: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one machine shows of itself; `anygauge.agent.node.inspect_node` fills it.

    Backends read it and nothing else, so that their environment is a pure function.

    Attributes:
        rank: which machine of the job this is, from 0.
        hostname: its name.
        cores: logical processors this process may use (the affinity mask).
        physical_cores: distinct cores among them.
        memory_bytes: installed memory.
        interfaces: network interfaces.
        rdma_devices: names under ``/sys/class/infiniband`` with their link layer
            (``InfiniBand`` or ``Ethernet``) and driver (``mlx5_core``, ``efa``, ...).
        libraries: names and versions of fabric libraries found, such as ``aws-ofi-nccl``.
    """

    rank: int = 0
    hostname: str = "localhost"
    cores: tuple[int, ...] = (0,)
    physical_cores: int = 1
    memory_bytes: int = 0
    interfaces: tuple[NetworkInterface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaDevice:
    """One device of ``/sys/class/infiniband``."""

    name: str
    driver: str
    link_layer: str
