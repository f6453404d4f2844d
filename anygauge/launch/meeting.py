"""How the agents of a job's nodes meet, before any rank starts.

The agent of node 0 is the coordinator; the others (workers) connect to it and to nobody else.
"""

from __future__ import annotations

import importlib.metadata
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from anygauge.interface import AnygaugeError, Job, LaunchSettings
from anygauge.launch.channel import (
    LONGEST,
    MOST_UNKNOWN,
    UNPROVEN,
    Channel,
    Listener,
    close_all,
    proof_of,
    proves,
)
from anygauge.launch.nodes import HEARTBEAT_S, Follower, Nodes, WorkerNode, rendezvous_of
from anygauge.launch.outcome import read_record
from anygauge.util.schema import Count, Text

_RETRY_S = 0.5
_CONNECT_S = 5.0
_PROOF_S = 10.0
_TURN_S = 0.05
_FILES, _FILES_OF_A_RANK = 16, 4  # of the agent itself: logs, sockets, selectors, libraries


class CancelledError(AnygaugeError):
    """The agent was asked to end before all nodes had met."""

    exit_status = 128 + signal.SIGTERM

    def __init__(self) -> None:
        super().__init__("asked to end before all nodes had met; no rank was started")


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
    if not 0 <= other.node_rank < own.nodes:
        raise AnygaugeError(f"{who}: the job has nodes 0 to {own.nodes - 1}")
    for name, mine, theirs in (
        ("launch.nodes", own.nodes, other.nodes),
        ("launch.devices", own.devices_per_node, other.devices_per_node),
        ("the version of anygauge", own.version, other.version),
    ):
        if mine != theirs:
            raise AnygaugeError(
                f"{name} is {theirs} on {who}, but {mine} on the coordinator ({own.host}); all "
                "nodes must have the same"
            )
    names = sorted({*own.settings, *other.settings})
    differ = [name for name in names if own.settings.get(name) != other.settings.get(name)]
    if own.fabric != other.fabric:
        raise AnygaugeError(
            f"launch.fabric: between machines, {who} would use "
            f"{other.fabric or 'what its library finds'}, but the coordinator ({own.host}) would "
            f"use {own.fabric or 'what its library finds'}. Set launch.fabric to a network that "
            "all nodes have"
        )
    if differ:
        raise AnygaugeError(
            f"{', '.join(differ)}: the value on {who} differs from that on the coordinator "
            f"({own.host}), but all nodes must have the same. Set it under environment in the run "
            "file, which takes precedence on every node"
        )


def meet(
    job: Job,
    outbox: Follower,
    own: Hello,
    address: tuple[str, int],
    requests: Sequence[object] = (),
) -> Nodes:
    """Meet the agents of the job's other nodes.

    Args:
        own: of this node.
        address: name or address, and port, of node 0's agent, as the others know it.
        requests: not empty once this agent is asked to end.

    Raises:
        AnygaugeError: nodes cannot be reached in time, or do not belong to one job.
    """
    if not job.token:
        raise AnygaugeError(
            "this job file was rendered for reading, so it has no token, and nodes cannot "
            "authenticate each other without one. anygauge train and anygauge launch create a "
            "token when they submit the job; to submit it by hand, put a long random text into "
            "the job file's field token"
        )
    if not 0 <= own.node_rank < own.nodes:
        raise AnygaugeError(
            f"{own.host} was started as node {own.node_rank}; the job has nodes 0 to "
            f"{own.nodes - 1}"
        )
    if own.node_rank:
        return WorkerNode(job, outbox, *_join(job, own, address, requests))
    _allow_open_files(job.launch)
    return Nodes(job, outbox, *_gather(job, own, address, requests))


# -- node 0 ----------------------------------------------------------------------------------------


def _gather(
    job: Job, own: Hello, address: tuple[str, int], requests: Sequence[object]
) -> tuple[dict[int, Channel], dict[int, str], str]:
    """Wait until all nodes have joined.

    Returns:
        Node rank -> channel, node rank -> host, and the address by which they reach this machine.

    Raises:
        AnygaugeError: nodes are missing when the time is up, or do not belong to this job.
    """
    channels: dict[int, Channel] = {}
    hosts, reached_at = {0: own.host}, ""
    beat_at = time.monotonic()
    deadline = beat_at + job.launch.join_timeout_s
    with Listener(*address, job.token, own.nodes) as listener:
        try:
            while len(channels) < own.nodes - 1:
                now = time.monotonic()
                if now > deadline:
                    raise AnygaugeError(_missing(job, listener, channels))
                if requests:
                    raise CancelledError
                if now - beat_at >= HEARTBEAT_S:
                    beat_at = now
                    for channel in channels.values():
                        channel.send("beat")
                for channel, message in listener.joined(_TURN_S):
                    other = _admitted(own, listener, channel, message, hosts)
                    if other is not None:
                        channels[other.node_rank] = channel
                        hosts[other.node_rank] = other.host
                        reached_at = reached_at or channel.own_address
        except AnygaugeError as error:
            _refuse([*channels.values()], str(error))
            raise
    return channels, hosts, reached_at


def _admitted(
    own: Hello,
    listener: Listener,
    channel: Channel,
    message: Mapping[str, Any],
    hosts: Mapping[int, str],
) -> Hello | None:
    """How a node that has joined describes itself; None where that cannot be read.

    Raises:
        AnygaugeError: it does not belong to this job.
    """
    try:
        other = read_record(HELLO, message.get("hello"))
    except ValueError as error:
        reason = f"the coordinator cannot read how the node describes itself: {error}"
        _refuse([channel], f"{reason}. Do all nodes have the same version of anygauge?")
        listener.note(channel, reason)
        return None
    channel.peer = f"node {other.node_rank} ({other.host})"
    try:
        check_hello(own, other, hosts)
    except AnygaugeError as error:
        _refuse([channel], str(error))
        raise
    return other


def _refuse(channels: Sequence[Channel], reason: str) -> None:
    for channel in channels:
        channel.send("refused", reason=reason)
    close_all(channels)


def _missing(job: Job, listener: Listener, channels: Mapping[int, Channel]) -> str:
    missing = [f"node {rank}" for rank in range(1, job.launch.nodes) if rank not in channels]
    here = ", ".join(channel.peer for _, channel in sorted(channels.items()))
    return (
        f"{len(missing)} of {job.launch.nodes} nodes did not join within "
        f"{job.launch.join_timeout_s:g} s (launch.join_timeout_s): {', '.join(missing)} missing"
        + (f"; {here} joined" if here else "")
        + ". Check in logs/agentN.log of each missing node whether its agent started; if it did, "
        f"it cannot reach this node, which listens at {listener.where}"
    )


def _allow_open_files(launch: LaunchSettings) -> None:
    """Raise this process's limit of open files to what the connections of all nodes need.

    Raises:
        AnygaugeError: the hard limit is lower.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in limits)
    least = launch.nodes + _FILES + _FILES_OF_A_RANK * launch.devices
    if hard < least:
        raise AnygaugeError(
            f"the agent of node 0 keeps a connection to each of the job's {launch.nodes} nodes and "
            f"needs {least} open files, but its process may have {hard} at most. Raise the hard "
            f"limit on {socket.gethostname()} (ulimit -Hn; LimitNOFILE= of a service; --ulimit "
            "nofile= of a container)"
        )
    wanted = min(least + MOST_UNKNOWN, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
        print(
            f"raised the limit of open files from {soft} to {wanted}, for the connections to "
            f"{launch.nodes} nodes (ulimit -n)",
            file=sys.stderr,
        )


# -- the other nodes -------------------------------------------------------------------------------


def _join(
    job: Job, own: Hello, address: tuple[str, int], requests: Sequence[object]
) -> tuple[Channel, str]:
    """Join the coordinator; the channel to it, and where the ranks meet.

    Raises:
        AnygaugeError: it cannot be reached in time, or refuses this node.
    """
    deadline = time.monotonic() + job.launch.join_timeout_s
    trouble, where = "nothing answered", f"{address[0]}:{address[1]}"
    while time.monotonic() < deadline and not requests:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_S)
            channel = Channel(connection, "the coordinator")
            try:
                return channel, _introduce(channel, job, own, where, lambda: bool(requests))
            except BaseException:
                channel.close("this node has not joined")
                raise
        except (OSError, ValueError) as error:
            trouble = str(error)
        time.sleep(_RETRY_S)
    if requests:
        raise CancelledError
    raise AnygaugeError(
        f"node {own.node_rank} ({own.host}) could not join the coordinator at {where} within "
        f"{job.launch.join_timeout_s:g} s (launch.join_timeout_s): {trouble}. Is the agent of node "
        "0 running, and can this node connect to that port?"
    )


def _introduce(
    channel: Channel, job: Job, own: Hello, where: str, requested: Callable[[], bool]
) -> str:
    """Prove the secret, have the other end prove it, and wait for its ``start``.

    Returns:
        Where the ranks meet.

    Raises:
        OSError, ValueError: it does not answer, or cannot be understood: it may be worth a retry.
        AnygaugeError: it does not know the secret, or refuses this node.
    """
    number = secrets.token_hex(16)
    channel.send("hello", number=number)
    late = time.monotonic() + _PROOF_S
    first = _next(channel, lambda: requested() or time.monotonic() > late)
    other = str(first.get("number"))
    if not proves(first, proof_of(job.token, "coordinator", number, other)):
        raise AnygaugeError(
            f"the program that listens at {where} {UNPROVEN.removeprefix('it ')}: the two agents "
            "belong to different jobs, or have different versions of anygauge. If another job "
            "uses that port, set this job's launch.port to another one"
        )
    channel.longest = LONGEST
    proof = proof_of(job.token, "worker", number, other)
    channel.send("join", proof=proof, hello=asdict(own))
    limit_s = job.launch.silence_s
    answer: Mapping[str, Any] = {"kind": "beat"}
    while answer["kind"] == "beat":
        answer = _next(channel, lambda: requested() or time.monotonic() - channel.heard > limit_s)
    if answer["kind"] == "refused":
        reason = answer.get("reason")
        reason = reason if isinstance(reason, str) else "it gave no reason"
        raise AnygaugeError(f"the coordinator at {where} refused this node: {reason}")
    return rendezvous_of(answer)


def _next(channel: Channel, stop: Callable[[], bool]) -> Mapping[str, Any]:
    """The next message.

    Raises:
        ConnectionError: none has come before `stop` returned True.
    """
    while not channel.closed and not stop():
        channel.flush()
        message = next(channel.receive(), None)
        if message is not None:
            return message
        time.sleep(0.02)
    raise ConnectionError(channel.why or "it did not answer")
