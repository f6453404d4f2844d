"""Variables of a run: settings, and the rules that make them.

A backend states its rules as a table. What a run gets, what ``anygauge env --explain`` shows and
what the documentation lists are all made from it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anygauge.interface.fabric import NO_FABRIC, ChosenFabric
from anygauge.interface.job import Job
from anygauge.interface.node import Node
from anygauge.interface.probe import major_minor

__all__ = [
    "THREADS",
    "EnvironmentRule",
    "RuleContext",
    "Scope",
    "Setting",
    "Skip",
    "interface_rule",
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
        between_machines: it is asked only of jobs on several machines.
        reason: why it is set at all.
        source: where that is documented.
        decide: pure; what `RuleContext.set_to` gives, or a `Skip`.
    """

    name: str
    value: str
    scope: Scope = Scope.JOB
    reason: str
    source: str
    decide: Callable[[RuleContext], Setting | Skip]
    between_machines: bool = False


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
        """Major and minor; (0, 0) where the library is not installed or its version unreadable."""
        return major_minor(self.node.libraries.get(library)) or (0, 0)


def interface_rule(
    name: str,
    library: str,
    source: str,
    *,
    only_one: str = "there is a single one",
    exactly: str = "",
) -> EnvironmentRule:
    """The variable by which a library takes the interface that its collectives use.

    Args:
        only_one: why the library is left alone where there is a single one.
        exactly: what the library wants before a name that is no prefix.
    """

    def decide(context: RuleContext) -> Setting | Skip:
        node = context.node
        if node.main_interface is None:
            return Skip("no interface is the obvious one: the library chooses")
        if len(node.external_interfaces) == 1:
            return Skip(only_one)
        why = "ranks must meet on interfaces that reach each other"
        why += f"; {exactly!r}: the whole name, not a prefix" if exactly else ""
        return context.set_to(exactly + node.main_interface.name, why + _others_up(node))

    which = f"{exactly}NAME of the first" if exactly else "the first"
    return EnvironmentRule(
        name=name,
        value=f"{which} physical interface, on several machines with several interfaces",
        scope=Scope.NODE,
        reason=f"{library} may otherwise use a network that other machines cannot reach",
        source=source,
        decide=decide,
        between_machines=True,
    )


def _others_up(node: Node) -> str:
    """``; also up: eth1``: interfaces other than the main one that could have been meant."""
    names = [i.name for i in node.external_interfaces if i != node.main_interface]
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


def _decide_threads(context: RuleContext) -> Setting:
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
    decide=_decide_threads,
)
"""Threads of the host's part of a rank."""
