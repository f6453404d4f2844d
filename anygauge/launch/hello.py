"""How an agent, or a rank that another launcher started, describes its node to the first one."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from anygauge.interface import AnygaugeError
from anygauge.util.section import Count, Text

_ANY_NETWORK = "what its library finds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """How an agent describes its node when it joins.

    Attributes:
        fabric: network between machines that it would use; empty: its library chooses.
        settings: digest of each variable that must be the same on every node.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    node_rank: Count
    nodes: Count
    devices_per_node: Count
    host: Text = field(default_factory=socket.gethostname)
    version: Text = field(default_factory=partial(importlib.metadata.version, "anygauge"))
    fabric: Text = ""
    settings: Mapping[Text, Text] = field(default_factory=dict)


HELLO = TypeAdapter(Hello)


def check_hello(own: Hello, other: Hello, known: Mapping[int, str]) -> None:
    """Refuse a node that does not belong to this job.

    Args:
        own: of the coordinator.
        known: node rank -> host, of the nodes that have joined.

    Raises:
        AnygaugeError: its number is taken, or it was started for another job or version.
    """
    who = f"node {other.node_rank} ({other.host})"
    if other.node_rank in known:
        raise AnygaugeError(
            f"two agents report that they are node {other.node_rank}: {known[other.node_rank]} and "
            f"{other.host}. Give each machine a number of its own, from 0 to {own.nodes - 1}"
        )
    if other.node_rank >= own.nodes:
        raise AnygaugeError(f"{who}: the job has nodes 0 to {own.nodes - 1}")
    networks = (own.fabric or _ANY_NETWORK, other.fabric or _ANY_NETWORK)
    for name, mine, theirs, remedy in (
        ("launch.nodes", own.nodes, other.nodes, ""),
        ("launch.devices", own.devices_per_node, other.devices_per_node, ""),
        ("the version of anygauge", own.version, other.version, ""),
        ("launch.fabric", *networks, ". Set it to a network that all nodes have"),
    ):
        if mine != theirs:
            raise AnygaugeError(
                f"{name} is {theirs} on {who}, but {mine} on the coordinator ({own.host}); all "
                f"nodes must have the same{remedy}"
            )
    names = sorted({*own.settings, *other.settings})
    differ = [name for name in names if own.settings.get(name) != other.settings.get(name)]
    if differ:
        raise AnygaugeError(
            f"{', '.join(differ)}: the value on {who} differs from that on the coordinator "
            f"({own.host}), but all nodes must have the same. Set it under environment in the run "
            "file, which takes precedence on every node"
        )
