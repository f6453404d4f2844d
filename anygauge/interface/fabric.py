"""Networks between machines.

They belong to no launcher: the same machines have the same ones, however agents are started there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anygauge.interface.job import Job
from anygauge.interface.node import Node, RdmaDevice
from anygauge.util.errors import RunFileError

__all__ = ["ETHERNET", "ONE_NODE", "ChosenFabric", "Fabric", "choose_fabric", "detected_by"]

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """One kind of network.

    Attributes:
        name: what users write as ``launch.fabric``.
        what: the network, in words.
        detect: pure; what on a machine shows that it has this network, None where nothing does.
            Without it, nothing ever does, and the network is never chosen by itself.
        resource: what a container must ask a cluster for, such as ``vpc.amazonaws.com/efa``.
        capabilities: what a container must be allowed.
    """

    name: str
    what: str
    detect: Callable[[Node], str | None] | None = None
    resource: str | None = None
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenFabric:
    """What a job uses between machines.

    Attributes:
        name: empty where there is nothing to choose or the library chooses.
        requested: by the user, rather than detected.
        missing: why this machine cannot have it; empty where it may.
    """

    name: str
    why: str
    requested: bool = False
    missing: str = ""


ONE_NODE = "all ranks are on one machine"
"""Why a rule about the network between machines leaves its variable."""

NO_FABRIC = ChosenFabric(name="", why=ONE_NODE)


def choose_fabric(fabrics: Sequence[Fabric], job: Job, node: Node) -> ChosenFabric:
    """The network between the machines of a job, as this one shows it.

    Raises:
        RunFileError: the one that was asked for is none of the backend's.
    """
    if job.launch.nodes == 1:
        return NO_FABRIC
    named = named_fabric(fabrics, job.launch.fabric)
    if named is not None:
        missing = ""
        if named.detect is not None and named.detect(node) is None:
            found = ", ".join(f"{d.name} ({d.driver}, {d.link_layer})" for d in node.rdma_devices)
            missing = (
                f"launch.fabric: {named.name}: {node.hostname} does not show {named.what}; its "
                f"RDMA devices: {found or 'none'}. Another fabric, or auto, does without"
            )
        return ChosenFabric(name=named.name, why="launch.fabric", requested=True, missing=missing)
    for fabric in fabrics:
        detected = fabric.detect(node) if fabric.detect else None
        if detected is not None:
            return ChosenFabric(name=fabric.name, why=detected)
    return ChosenFabric(name="", why="nothing shows which: the library chooses")


def named_fabric(fabrics: Sequence[Fabric], name: str) -> Fabric | None:
    """The one of a name; None for ``auto``.

    Raises:
        RunFileError: there is none; lists them.
    """
    if name == AUTO:
        return None
    found = next((fabric for fabric in fabrics if fabric.name == name), None)
    if found is None:
        known = ", ".join((AUTO, *(fabric.name for fabric in fabrics)))
        raise RunFileError(f"launch.fabric: {name!r}: this backend has {known}")
    return found


def _detect_ethernet(node: Node) -> str | None:
    found = node.main_interface or next(iter(node.external_interfaces), None)
    return None if found is None else f"interface {found.name}, and no better network"


def detected_by(wanted: Callable[[RdmaDevice], bool]) -> Callable[[Node], str | None]:
    """Detected by the RDMA devices of a kind."""

    def detect(node: Node) -> str | None:
        names = [device.name for device in node.rdma_devices if wanted(device)]
        return f"RDMA devices {', '.join(names)}" if names else None

    return detect


ETHERNET = Fabric(
    name="ethernet", what="TCP over the machine's network interfaces", detect=_detect_ethernet
)
"""What every machine has."""
