"""A job: everything that a launcher must know to start a run, and nothing that needs a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anygauge.interface.launch import LaunchProfile
from anygauge.util.errors import AnygaugeError
from anygauge.util.start import START

if TYPE_CHECKING:
    from anygauge.interface.environment import Fabric

__all__ = [
    "Job",
    "LaunchSettings",
    "NetworkInterface",
    "Node",
    "RdmaDevice",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The run file's section ``launch``, but for what the launcher alone reads.

    Attributes:
        nodes: number of machines.
        devices: ranks started on each machine.
        collective_timeout_s: seconds after which a collective that hangs ends the run, or a rank
            that neither works nor reports.
        join_timeout_s: seconds that agents have to find each other.
        lost_after_s: seconds of silence after which a node is lost.
        fabric: network between machines: ``auto``, or one of `Backend.fabrics`.
        binding: how ranks are bound to cores: ``auto`` (the backend's), ``cores`` or ``none``.
        max_restarts: how often the ranks are started again after a failure.
        port: where the coordinator's agent listens for the others.
        pass_environment: names of variables of the submitting process that go to every agent.
    """

    nodes: int = 1
    devices: int = 1
    collective_timeout_s: float = 600.0
    join_timeout_s: float = 300.0
    lost_after_s: float = 60.0
    fabric: str = "auto"
    binding: Literal["auto", "cores", "none"] = "auto"
    max_restarts: int = 0
    port: int = 29400
    pass_environment: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run, as launchers, agents and backends see it.

    Attributes:
        name: short name for humans.
        run_directory: absolute path that every node sees; holds the resolved run and logs.
        run_file: absolute path of the resolved run, JSON that ranks read: in the run
            directory, or in its `START` until the ranks have accepted to resume there. Beside it
            lies ``run.yaml``, the same for people.
        backend: name of the backend.
        strategy: name of the strategy; empty where nothing is trained.
        launch: how many ranks there are, and how they are started and watched.
        rendezvous: where the ranks of one machine meet: ``file:///path``, the path as it is, or
            ``tcp://host:port``; those that another launcher started meet at ``served://host:port``.
            Those of several machines meet where the agents agree.
        working_directory: absolute path that relative ones in the run file start from; every node
            sees it. Empty: that of the agent.
        id: tells this start of the run from others, in what they share: the cache of rows.
        token: by which the agents and the ranks of a job know each other; a secret.
        stop_grace_s: seconds that ranks get to end a step and write a checkpoint when the job is
            asked to end.
        resume: continue from the newest checkpoint, whatever the run file says: another attempt.
        takes_over: it may continue in a run directory that another job has left.
        run_text: the resolved run, for machines that do not see this one's files: the agents
            write it to `run_file`. Empty where it is there already.
        fetch: the agents fetch the run's model of the hub before ranks start; where ranks run on
            the machine of the command, that has done so.
        profile: what containers for the backend need; for launchers alone, and in no job file.
        network: the network between machines, where one was asked for by name; likewise.
        environment: variables that the run file asks for.
        backend_options: the run file's ``backend_options``, for the backend alone to read.
        expected_memory: phase -> the most bytes that the first rank's tensors take of its device,
            by the plan of the run; empty where there is none.
        expected_step_s: seconds of a step, by the same; None: not known.
        strategy_why: why it is this strategy, where the run file did not name it: what ``auto``
            found, or which default is not installed. Empty where it is the named one, the first
            default, or ``auto`` that decides when the devices are open.
    """

    name: str
    run_directory: str
    run_file: str
    backend: str
    strategy: str = ""
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    rendezvous: str
    stop_grace_s: float = 60.0
    working_directory: str = ""
    resume: bool = False
    id: str = ""
    token: str = ""
    takes_over: bool = False
    run_text: str = ""
    fetch: bool = False
    profile: LaunchProfile = field(default_factory=LaunchProfile)
    network: Fabric | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    expected_memory: Mapping[str, int] = field(default_factory=dict)
    expected_step_s: float | None = None
    strategy_why: str = ""

    @property
    def collectives_record(self) -> str:
        """Beginning of a path, which a rank's number follows: where a device's collectives may
        write what they were doing when they failed. The agent names the file in the failure."""
        return f"{self.run_directory}/logs/flight_rank_"

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.launch.nodes * self.launch.devices

    @property
    def start_directory(self) -> Path:
        """Where files of this start belong now: `START`, as long as it waits there, or the run
        directory."""
        home = Path(self.run_directory)
        waiting = Path(self.run_file).parent == home / START and (home / START).is_dir()
        return home / START if waiting else home

    def dump(self) -> str:
        """The job as JSON text; `load` reads it back."""
        fields = asdict(self)
        del fields["profile"], fields["network"]
        return json.dumps(fields, indent=2, sort_keys=True)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file written by `dump`.

        Raises:
            AnygaugeError: the file is missing or is not a job file of this version.
        """
        path = Path(path)
        if path.parent.name == START and not path.exists():
            path = path.parent.parent / path.name  # it was put in place meanwhile
        try:
            fields = json.loads(path.read_text())
            launch = fields.pop("launch")
            launch["pass_environment"] = tuple(launch["pass_environment"])
            return cls(**fields, launch=LaunchSettings(**launch))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AnygaugeError(f"{path} is not a job file of this anygauge: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """One network interface as the kernel shows it (``/sys/class/net``).

    Attributes:
        up: switched on, and not without a carrier.
        physical: a device stands behind it (bridges, tunnels and container ends have none).
        loopback: reaches this machine only.
    """

    name: str
    up: bool
    physical: bool
    loopback: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one machine shows of itself; `anygauge.agent.environment.inspect_node` fills it.

    Backends read it and nothing else, so that their environment is a pure function.

    Attributes:
        rank: which machine of the job this is, from 0.
        hostname: its name.
        cores: logical processors this process may use (the affinity mask), ordered by package and
            physical core, so that the threads of one core are neighbours.
        physical_cores: distinct cores among them.
        memory_bytes: installed memory.
        interfaces: network interfaces; Ethernet first, then in the order the kernel made them.
        rdma_devices: names under ``/sys/class/infiniband`` with their link layer
            (``InfiniBand`` or ``Ethernet``) and driver (``mlx5_core``, ``efa``, ...).
        libraries: versions of the installed packages that settings depend on: ``torch`` and those
            of `Backend.libraries`.
        variables: what the user has set of `Backend.variables`.
        files: as asked for -> path, of those of `Backend.files` that are here.
        texts: path -> text of the files that fit `Backend.readings`; "" of one that is no regular
            file, such as a device's.
    """

    rank: int = 0
    hostname: str = "localhost"
    cores: tuple[int, ...] = (0,)
    physical_cores: int = 1
    memory_bytes: int = 0
    interfaces: tuple[NetworkInterface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def loopback(self) -> NetworkInterface | None:
        """The interface that ranks of a single machine can always meet on, if it is up."""
        return next((i for i in self.interfaces if i.up and i.loopback), None)

    @property
    def outward(self) -> tuple[NetworkInterface, ...]:
        """Interfaces that are up and may reach other machines; physical ones come first."""
        found = [i for i in self.interfaces if i.up and not i.loopback]
        return tuple(sorted(found, key=lambda i: not i.physical))

    @property
    def main_interface(self) -> NetworkInterface | None:
        """The one to reach other machines by: the first physical one, or the only one there is.

        None where that would be a guess (several, all virtual).
        """
        outward = self.outward
        if outward and (outward[0].physical or len(outward) == 1):
            return outward[0]
        return None

    def threads_per_rank(self, ranks: int) -> int:
        """Physical cores for each of `ranks` ranks on this machine, at least 1."""
        return max(1, self.physical_cores // ranks)

    def cores_of_rank(self, local_rank: int, ranks: int) -> tuple[int, ...]:
        """Logical processors for one rank alone; empty where ranks must share physical cores.

        Every rank gets equally many whole cores, so that none of them waits for a slower one;
        cores that are left over serve the system.
        """
        threads_per_core, uneven = divmod(len(self.cores), max(1, self.physical_cores))
        if uneven or self.physical_cores < ranks:
            return ()
        width = self.physical_cores // ranks * threads_per_core
        return self.cores[local_rank * width : (local_rank + 1) * width]


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaDevice:
    """One device of ``/sys/class/infiniband``."""

    name: str
    driver: str
    link_layer: str
