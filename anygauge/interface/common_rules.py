"""What rules of most devices share: the network of the host's messages, threads of a rank."""

from __future__ import annotations

from anygauge.interface.job import Node
from anygauge.interface.rules import Decision, EnvironmentRule, Situation, leave, use
from anygauge.interface.settings import Scope

ONE_NODE = "all ranks are on one machine"
"""Why a rule about the network between machines leaves its variable."""


def others_up(node: Node) -> str:
    """``; also up: eth1``: interfaces besides the main one that could have been meant."""
    names = [i.name for i in node.outward if i != node.main_interface]
    return f"; also up: {', '.join(names)}" if names else ""


def meeting_interface(situation: Situation) -> Decision:
    """The network interface that ranks meet on for messages between hosts."""
    node = situation.node
    if situation.job.nodes == 1:
        if node.loopback is None:
            return leave("the loopback interface is not up")
        why = "all ranks are on this machine: works without a host name that resolves"
        return use(node.loopback.name, why)
    if node.main_interface is None:
        return leave("no interface is the obvious one: the host name is resolved")
    why = "the first interface that is up and physical"
    return use(node.main_interface.name, why + others_up(node))


def _threads(situation: Situation) -> Decision:
    node, ranks = situation.node, situation.job.devices_per_node
    return use(
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
