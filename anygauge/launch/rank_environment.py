"""The environment of one node's ranks: what the machine shows, variables and cores of each rank.

The backend, the site's plugins, the run file and the user's variables decide. Of the machine,
backends see the `Node` that `inspect_node` returns and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import (
    Backend,
    Job,
    NetworkInterface,
    Node,
    NotAvailableError,
    RdmaDevice,
    Scope,
    choose_fabric,
    file_text,
    file_texts,
    installed_version,
)
from anygauge.registry import (
    Registry,
    ResolvedSetting,
    apply_settings,
    installed_plugins,
    resolve_environment,
)
from anygauge.registry.resolve_environment import USER
from anygauge.util.files import write_text

_ETHERNET = 1  # ARPHRD_ETHER, <linux/if_arp.h>
_LOOPBACK = 772  # ARPHRD_LOOPBACK
_UP = 0x1  # IFF_UP, <linux/if.h>


class NodeEnvironment:
    """The environment of each rank of this node.

    Args:
        chosen: the plugins and the backend, where this process has made them; None: of the job.

    Attributes:
        fabric: the network between machines.
        cores: local rank -> logical processors that it is bound to; see `cores_of_ranks`.

    Raises:
        PluginError: the backend cannot be found or made.
        NotAvailableError: this machine lacks the network or the cores that the run demands.
    """

    def __init__(
        self,
        job: Job,
        node_rank: int,
        inherited: Mapping[str, str],
        chosen: tuple[Registry, Backend] | None = None,
    ) -> None:
        if chosen is None:
            loaded = installed_plugins()
            chosen = (loaded, loaded.create_backend(job.backend, job.backend_options))
        registry, backend = chosen
        node = inspect_node(backend, inherited, rank=node_rank)
        self.fabric = choose_fabric(backend.fabrics, job, node)
        if self.fabric.missing:
            raise NotAvailableError(self.fabric.missing)
        self.cores = cores_of_ranks(job, backend.launch.binding, node)
        self._inherited = inherited
        self._by_rank = {
            rank: resolve_environment(registry, backend, job, node, rank, inherited)
            for rank in range(job.launch.devices)
        }

    def record(self) -> dict[str, Any]:
        """Local rank -> each of its variables, who set it, why, and whom that overruled; secrets,
        and values that the run file sets, are hidden."""
        return {str(rank): [one.record() for one in found] for rank, found in self._by_rank.items()}

    def overruled_settings(self, local_rank: int) -> list[ResolvedSetting]:
        """Variables of the starting process that won over a different value from elsewhere."""
        own = (one for one in self._by_rank[local_rank] if one.origin == USER)
        return [one for one in own if any(value != one.value for _, value in one.overruled)]

    def of_rank(self, local_rank: int) -> dict[str, str]:
        """All variables of a rank, except for those of its numbers."""
        return apply_settings(self._by_rank[local_rank], self._inherited)

    def digests(self) -> dict[str, str]:
        """Variable -> digest of its value, of those that must be the same on all nodes."""
        return {
            one.name: hashlib.sha256(repr(one.value).encode()).hexdigest()
            for one in self._by_rank[0]
            if one.setting.scope is Scope.JOB
        }


def write_provenance(job: Job, node_rank: int, records: Mapping[str, Any]) -> None:
    """Write what `NodeEnvironment.record` returned, readable by its owner alone."""
    path = job.start_directory / f"environment-node{node_rank}.json"
    write_text(path, json.dumps(records, indent=2) + "\n", 0o600)


def cores_of_ranks(job: Job, binding: str, node: Node) -> dict[int, tuple[int, ...]]:
    """Local rank -> logical processors that it is bound to, if it is; `binding` is the backend's.

    Ranks get equal shares of whole cores, package by package, as ``mpirun --bind-to core --map-by
    slot:PE=N`` gives them. A machine with fewer cores than ranks binds none.

    Raises:
        NotAvailableError: the run demands binding, and this machine has too few cores.
    """
    wanted = binding if job.launch.binding == "auto" else job.launch.binding
    count = job.launch.devices
    bound = range(count) if wanted == "cores" and count > 1 else ()
    shares = {rank: node.cores_of_rank(rank, count) for rank in bound}
    if all(shares.values()):
        return shares
    if job.launch.binding == "cores":
        raise NotAvailableError(
            f"launch.binding: cores: {node.hostname} cannot give each of its {count} ranks whole "
            f"cores of its own: it has too few ({node.physical_cores} physical cores), or cores of "
            "several kinds. Set launch.binding: auto, which binds only where it can"
        )
    return {}


def inspect_node(
    backend: Backend, environ: Mapping[str, str], *, rank: int = 0, root: Path = Path("/")
) -> Node:
    """What this machine shows of itself in /proc and /sys; a field that it does not show keeps
    `Node`'s default.

    Nothing is opened on a device, changed or imported: this runs before torch is loaded.

    Args:
        backend: its libraries, variables, files and readings are looked at too.
        environ: the user's variables.
        rank: which machine of the job this is, from 0.
        root: the folder of /proc and /sys.
    """
    order = _ordered_cores(root)
    libraries = ("torch", *backend.libraries)  # any backend's settings may depend on torch's
    return Node(
        rank=rank,
        hostname=socket.gethostname(),
        cores=tuple(core for _, core in order),
        physical_cores=len({place for place, _ in order}),
        interfaces=_read_interfaces(root),
        rdma_devices=_rdma_devices(root),
        libraries={name: found for name in libraries if (found := installed_version(name))},
        variables={name: environ[name] for name in backend.variables if name in environ},
        files=_find_files(root, backend.files),
        texts=file_texts(backend.readings, root),
    )


def _ordered_cores(root: Path) -> list[tuple[tuple[int, ...], int]]:
    """(package, die and number of the core, logical processor) of those we may run on, sorted."""
    found = []
    for core in os.sched_getaffinity(0):
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        package, die, number = (
            _number(topology / name) for name in ("physical_package_id", "die_id", "core_id")
        )
        # Some virtual machines hide the topology: each processor then counts as a core of its own.
        place = (package or 0, die or 0, number) if number is not None else (0, 0, core)
        found.append((place, core))
    return sorted(found)


def _read_interfaces(root: Path) -> tuple[NetworkInterface, ...]:
    def order(folder: Path) -> tuple[bool, int, str]:
        index = _number(folder / "ifindex") or 0
        return _number(folder / "type") != _ETHERNET, index, folder.name

    return tuple(
        NetworkInterface(
            name=folder.name,
            # Drivers that report no state, such as the loopback's, show "unknown".
            up=bool((_number(folder / "flags") or 0) & _UP)
            and file_text(folder / "operstate") in ("up", "unknown", ""),
            physical=(folder / "device").exists(),
            loopback=_number(folder / "type") == _LOOPBACK,
        )
        for folder in sorted(root.glob("sys/class/net/*/"), key=order)
    )


def _rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    return tuple(
        RdmaDevice(
            name=folder.name,
            driver=driver.resolve().name if driver.exists() else "unknown",
            link_layer=file_text(folder / "ports/1/link_layer") or "unknown",
        )
        for folder in sorted(root.glob("sys/class/infiniband/*/"))
        for driver in [folder / "device/driver"]
    )


def _find_files(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Find which files exist. A bare name is a shared library, found where the linker searches."""
    linked = [
        Path(sys.prefix) / "lib",
        *sorted((root / "usr/lib").glob("*-linux-gnu*")),
        *(root / name for name in ("usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib")),
    ]
    found = {}
    for name in names:
        if name.startswith("/"):
            if (root / name[1:]).is_file():
                found[name] = name
        elif path := next((f / name for f in linked if (f / name).is_file()), None):
            found[name] = str(path)
    return found


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(file_text(path), 0)
    return None
