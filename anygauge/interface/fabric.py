"""Networks between machines: what each is, how it shows itself, and which of them a job uses.

A backend lists those that its collectives can use, best first. They belong to no launcher: the same
machines have the same networks, however agents are started there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anygauge.interface.errors import RunFileError
from anygauge.interface.job import Job, Node, RdmaDevice

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """One kind of network.

    Attributes:
        name: what users write as ``launch.fabric``.
        what: the network, in words.
        seen: pure; what on a machine shows that it has this network. None: nothing does.
        shows: whether a machine that has it shows it at all; if not, it is never chosen by itself.
        resource: what a container must ask a cluster for, such as ``vpc.amazonaws.com/efa``.
        capabilities: what a container must be allowed.
    """

    name: str
    what: str
    seen: Callable[[Node], str | None] = lambda node: None
    shows: bool = True
    resource: str | None = None
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenFabric:
    """What a job uses between machines.

    Attributes:
        name: of the fabric; empty where there is nothing to choose or the library chooses.
        asked: by the user, rather than found.
    """

    name: str
    why: str
    asked: bool = False


NO_FABRIC = ChosenFabric(name="", why="all ranks are on one machine")


def choose_fabric(fabrics: Sequence[Fabric], job: Job, node: Node) -> ChosenFabric:
    """The network between the machines of a job, as this one shows it.

    Raises:
        RunFileError: the one that was asked for is none of the backend's.
    """
    if job.nodes == 1:
        return NO_FABRIC
    if job.fabric != AUTO:
        named = named_fabric(fabrics, job.fabric)
        return ChosenFabric(name=named.name, why="launch.fabric", asked=True)
    for fabric in fabrics:
        seen = fabric.seen(node)
        if seen is not None:
            return ChosenFabric(name=fabric.name, why=seen)
    return ChosenFabric(name="", why="nothing shows which: the library chooses")


def named_fabric(fabrics: Sequence[Fabric], name: str) -> Fabric:
    """The one of a name.

    Raises:
        RunFileError: there is none; lists them.
    """
    found = next((fabric for fabric in fabrics if fabric.name == name), None)
    if found is None:
        known = ", ".join((AUTO, *(fabric.name for fabric in fabrics)))
        raise RunFileError(f"launch.fabric: {name!r}: this backend has {known}")
    return found


def missing_fabric(fabrics: Sequence[Fabric], job: Job, node: Node) -> str | None:
    """Why this machine cannot have the network that was asked for; None where it may."""
    if job.nodes == 1 or job.fabric == AUTO:
        return None
    fabric = named_fabric(fabrics, job.fabric)
    if not fabric.shows or fabric.seen(node) is not None:
        return None
    devices = ", ".join(f"{d.name} ({d.driver}, {d.link_layer})" for d in node.rdma_devices)
    return (
        f"launch.fabric: {fabric.name}: {node.hostname} does not show {fabric.what}; its RDMA "
        f"devices: {devices or 'none'}. Another fabric, or auto, does without"
    )


def _ethernet(node: Node) -> str | None:
    found = node.main_interface or next(iter(node.outward), None)
    return None if found is None else f"interface {found.name}, and no better network"


def shown_by(wanted: Callable[[RdmaDevice], bool]) -> Callable[[Node], str | None]:
    """Shown by the RDMA devices of a kind."""

    def seen(node: Node) -> str | None:
        names = [device.name for device in node.rdma_devices if wanted(device)]
        return f"RDMA devices {', '.join(names)}" if names else None

    return seen


ETHERNET = Fabric(name="ethernet", what="TCP over the machine's network interfaces", seen=_ethernet)
"""What every machine has."""
