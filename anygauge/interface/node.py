"""What one machine shows of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NetworkInterface", "Node", "RdmaDevice"]


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
class RdmaDevice:
    """One device of ``/sys/class/infiniband``.

    Attributes:
        driver: such as ``mlx5_core`` or ``efa``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
    """

    name: str
    driver: str
    link_layer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one machine shows of itself; `anygauge.launch.rank_environment.inspect_node` fills it.

    Backends read it and nothing else, so that their environment is a pure function.

    Attributes:
        rank: which machine of the job this is, from 0.
        cores: logical processors this process may use (the affinity mask), ordered by package and
            physical core, so that the threads of one core are neighbours.
        physical_cores: distinct cores among them.
        interfaces: network interfaces; Ethernet first, then in the order the kernel made them.
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
    def external_interfaces(self) -> tuple[NetworkInterface, ...]:
        """Interfaces that are up and may reach other machines; physical ones come first."""
        found = [i for i in self.interfaces if i.up and not i.loopback]
        return tuple(sorted(found, key=lambda i: not i.physical))

    @property
    def main_interface(self) -> NetworkInterface | None:
        """The one to reach other machines by: the first physical one, or the only one there is.

        None where that would be a guess (several, all virtual).
        """
        outward = self.external_interfaces
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
