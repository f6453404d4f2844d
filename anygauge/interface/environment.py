"""Variables of a run: settings, the rules that make them, and the network between machines.

A backend states its rules as a table. What a run gets, what ``anygauge env --explain`` shows and
what the documentation lists are all made from it.

Networks belong to no launcher: the same machines have the same ones, however agents are started
there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.interface.job import Job, Node, RdmaDevice
from anygauge.util.errors import RunFileError

__all__ = [
    "ETHERNET",
    "ONE_NODE",
    "THREADS",
    "ChosenFabric",
    "EnvironmentRule",
    "Fabric",
    "RuleContext",
    "Scope",
    "Setting",
    "Skip",
    "choose_fabric",
    "detected_by",
    "main_interface",
    "meeting_rule",
]


class Scope(enum.Enum):
    """Where a setting's value is the same: in the whole job, on one node, or in one rank only."""

    JOB = "job"
    NODE = "node"
    RANK = "rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One proposed value.

    Attributes:
        name: an environment variable, or a dotted field of an engine's configuration.
        value: always a string for the environment; any JSON value for an engine. ``None``
            in the environment means: remove the variable.
        reason: why it is set, in one line.
        source: where that is documented or derived.
        secret: never shown or stored by value.
    """

    name: str
    value: Any
    scope: Scope = Scope.JOB
    reason: str
    source: str
    secret: bool = False


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


def _ethernet(node: Node) -> str | None:
    found = node.main_interface or next(iter(node.outward), None)
    return None if found is None else f"interface {found.name}, and no better network"


def detected_by(wanted: Callable[[RdmaDevice], bool]) -> Callable[[Node], str | None]:
    """Detected by the RDMA devices of a kind."""

    def detect(node: Node) -> str | None:
        names = [device.name for device in node.rdma_devices if wanted(device)]
        return f"RDMA devices {', '.join(names)}" if names else None

    return detect


ETHERNET = Fabric(
    name="ethernet", what="TCP over the machine's network interfaces", detect=_ethernet
)
"""What every machine has."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A rule does not touch its variable, for a reason in one line."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRule:
    """One variable and how its value comes about.

    Attributes:
        value: the rule in words, for tables: ``1 in lazy mode, else 0``.
        scope: rules of `Scope.RANK` are asked for ranks only.
        reason: why it is set at all.
        source: where that is documented.
        decide: pure; what `RuleContext.set_to` gives, or a `Skip`.
    """

    name: str
    value: str
    scope: Scope
    reason: str
    source: str
    decide: Callable[[RuleContext], Setting | Skip]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleContext:
    """All that a rule may read.

    Attributes:
        local_rank: whose environment is asked for; None for what the whole node shares.
        options: of the class that `BackendSpec.options` names.
    """

    rule: EnvironmentRule
    job: Job
    node: Node
    options: Any
    local_rank: int | None = None
    fabric: ChosenFabric = NO_FABRIC

    def set_to(self, value: str | None, reason: str) -> Setting:
        """Give the rule's variable this value (None removes it), for a reason in one line."""
        return Setting(
            name=self.rule.name,
            value=value,
            scope=self.rule.scope,
            reason=reason,
            source=self.rule.source,
        )

    def variable(self, name: str) -> str | None:
        """What the user, or else the run file, sets for a variable of `Backend.variables`."""
        return self.node.variables.get(name, self.job.environment.get(name))

    def version(self, library: str) -> tuple[int, int]:
        """``2.9.0+cu128`` is (2, 9); (0, 0) where the library is not installed or unreadable."""
        major, _, rest = self.node.libraries.get(library, "").partition(".")
        minor = rest.partition(".")[0]
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def main_interface(context: RuleContext, only_one: str, *, exactly: str = "") -> Setting | Skip:
    """The main interface, for a library that would choose among several of a machine.

    Args:
        only_one: why it is left alone where there is a single one.
        exactly: what the library wants before a name that is no prefix.
    """
    node = context.node
    if context.job.launch.nodes == 1:
        return Skip(ONE_NODE)
    if node.main_interface is None:
        return Skip("no interface is the obvious one: the library chooses")
    if len(node.outward) == 1:
        return Skip(only_one)
    why = "ranks must meet on interfaces that reach each other"
    why += f"; {exactly!r}: the whole name, not a prefix" if exactly else ""
    return context.set_to(exactly + node.main_interface.name, why + _others_up(node))


def _others_up(node: Node) -> str:
    """``; also up: eth1``: interfaces other than the main one that could have been meant."""
    names = [i.name for i in node.outward if i != node.main_interface]
    return f"; also up: {', '.join(names)}" if names else ""


def _meeting_interface(context: RuleContext) -> Setting | Skip:
    node = context.node
    if context.job.launch.nodes == 1:
        if node.loopback is None:
            return Skip("the loopback interface is not up")
        why = "all ranks are on this machine: works without a host name that resolves"
        return context.set_to(node.loopback.name, why)
    if node.main_interface is None:
        return Skip("no interface is the obvious one: the host name is resolved")
    why = "the first interface that is up and physical"
    return context.set_to(node.main_interface.name, why + _others_up(node))


def meeting_rule(name: str, library: str) -> EnvironmentRule:
    """The variable by which a library of torch's takes the interface that ranks meet on."""
    return EnvironmentRule(
        name=name,
        value="the loopback on one machine; else the first physical interface that is up",
        scope=Scope.NODE,
        reason=f"{library} otherwise resolves the host name, which fails or finds an unreachable "
        "address",
        source="pytorch.org/docs: distributed, choosing the network interface to use",
        decide=_meeting_interface,
    )


def _threads(context: RuleContext) -> Setting:
    node, ranks = context.node, context.job.launch.devices
    return context.set_to(
        str(node.threads_per_rank(ranks)), f"{node.physical_cores} physical cores for {ranks} ranks"
    )


THREADS = EnvironmentRule(
    name="OMP_NUM_THREADS",
    value="physical cores / ranks of the machine, at least 1",
    scope=Scope.RANK,
    reason="more threads than cores make ranks wait for each other",
    source="pytorch.org/docs: notes/multiprocessing, on oversubscription",
    decide=_threads,
)
"""Threads of the host's part of a rank."""
