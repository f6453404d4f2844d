"""How the agents of a job know each other before they say anything that matters.

1. The worker says hello, with a number that it has drawn.
2. The coordinator answers with a number of its own. Both make the key of this connection from the
   job's secret and the two numbers, and seal it. The coordinator sends the first proof: ``known``.
3. The worker, sure of the coordinator, sends its hello under the seal: ``join``.

The secret is never on the wire, nothing that was recorded opens another connection, and a false
coordinator learns nothing and can give no orders.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from anygauge.agent.link import LONGEST_LINE, UNPROVEN, Link
from anygauge.agent.messages import shown
from anygauge.agent.nodes import Hello
from anygauge.interface import AnygaugeError
from anygauge.util.exchange import derived_key

OF_ANOTHER_JOB = "that agent is of another job, or of another version of anygauge"


def drawn_number() -> str:
    """What one end adds, so that no two connections have one key."""
    return secrets.token_hex(16)


def key_of(token: str, worker: str, coordinator: str) -> bytes:
    """The key of a connection, from the job's secret and the numbers of both ends."""
    return derived_key(token, f"link between agents {worker} {coordinator}")


def _is_number(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


class Newcomer:
    """A connection at the coordinator, from the first byte until its sender is known.

    Attributes:
        since: when it came, in monotonic seconds.
        greeted: it has said hello as an agent does, which proves nothing yet.
    """

    def __init__(self, link: Link, token: str, since: float) -> None:
        self.link = link
        self.since = since
        self.greeted = False
        self._token = token

    def advance(self) -> Mapping[str, Any] | None:
        """Read and answer what has come; the proven ``join`` once it is there.

        Whatever else it sends closes the link.
        """
        message = self.link.receive_one()
        if message is not None and not self.greeted:
            self._answer(message)
            message = self.link.receive_one()
        if message is None:
            return None
        if message["kind"] != "join":
            self.link.close(f"it sent {message['kind'][:40]!r} before it had joined")
            return None
        self.link.longest = LONGEST_LINE
        return message

    def _answer(self, message: Mapping[str, Any]) -> None:
        number = message.get("number", "")
        if message["kind"] != "hello" or not _is_number(number):
            self.link.send("refused", reason=OF_ANOTHER_JOB)
            self.link.close("it belongs to another job, or is not an agent")
            return
        own = drawn_number()
        self.link.send("number", number=own)
        self.link.seal(key_of(self._token, number, own), "coordinator", "worker")
        self.link.send("known")
        self.greeted = True


class Application:
    """A connection at a worker, until the coordinator has answered.

    Attributes:
        joined: the coordinator has proved itself, and was told who this is.
    """

    def __init__(self, link: Link, token: str, join: Mapping[str, Any]) -> None:
        """Say hello.

        Args:
            join: what the coordinator is told once it has proved itself.
        """
        self.link = link
        self._token = token
        self._join = join
        self._number = drawn_number()
        self._sealed = self.joined = False
        link.send("hello", number=self._number)

    def advance(self) -> Mapping[str, Any] | None:
        """Read and answer; the proven coordinator's message once the worker has joined."""
        message = self.link.receive_one()
        if message is None or self.joined:
            return message
        if not self._sealed:
            number = message.get("number", "")
            if message["kind"] == "number" and _is_number(number):
                self.link.seal(key_of(self._token, self._number, number), "worker", "coordinator")
                self._sealed = True
            else:
                self.link.close(UNPROVEN)
        elif message["kind"] == "known":
            self.link.longest = LONGEST_LINE
            self.link.send("join", **self._join)
            self.joined = True
        return None


def read_hello(record: object) -> Hello:
    """What a node says of itself, every field looked at.

    Raises:
        ValueError: a field is missing, unknown or of another type; says which.
    """
    if not isinstance(record, dict):
        raise ValueError("it is not a mapping")
    names = {each.name for each in fields(Hello)}
    for name in sorted(names ^ set(record)):
        raise ValueError(f"{shown(name)} is {'missing' if name in names else 'unknown'}")
    for name in ("node_rank", "nodes", "devices_per_node"):
        if type(record[name]) is not int:
            raise ValueError(f"{name!r} is not a whole number: {shown(record[name])}")
    for name in ("host", "version", "fabric"):
        if not isinstance(record[name], str):
            raise ValueError(f"{name!r} is not text: {shown(record[name])}")
    settings = record["settings"]
    if not isinstance(settings, dict) or not all(isinstance(v, str) for v in settings.values()):
        raise ValueError("'settings' is not a mapping from names to text")
    return Hello(**record)


def check_hello(own: Hello, other: Hello, known: Mapping[int, str]) -> None:
    """Refuse a node that does not fit.

    Raises:
        AnygaugeError: it is there twice, or was started for another job or from another version.
    """
    who = f"node {other.node_rank} ({other.host})"
    if other.node_rank in known:
        raise AnygaugeError(
            f"two agents report that they are node {other.node_rank}: {known[other.node_rank]} and "
            f"{other.host}. Each machine must be given a number of its own, from 0 to "
            f"{own.nodes - 1}"
        )
    if not 0 <= other.node_rank < own.nodes:
        raise AnygaugeError(f"{who}: the job has nodes 0 to {own.nodes - 1}")
    for name, mine, theirs in (
        ("launch.nodes", own.nodes, other.nodes),
        ("launch.devices", own.devices_per_node, other.devices_per_node),
        ("the version of anygauge", own.version, other.version),
    ):
        if mine != theirs:
            raise AnygaugeError(
                f"{who} has {theirs} for {name}, the coordinator ({own.host}) {mine}: all nodes "
                "must have the same"
            )
    names = sorted({*own.settings, *other.settings})
    differ = [name for name in names if own.settings.get(name) != other.settings.get(name)]
    if own.fabric != other.fabric:
        raise AnygaugeError(
            f"launch.fabric: {who} would use {other.fabric or 'what its library finds'} between "
            f"machines, the coordinator ({own.host}) {own.fabric or 'what its library finds'}: "
            "name one that all have"
        )
    if differ:
        raise AnygaugeError(
            f"{', '.join(differ)}: {who} has another value than the coordinator ({own.host}); the "
            "whole job needs one. Set it in the run file (environment), which wins on every node"
        )
