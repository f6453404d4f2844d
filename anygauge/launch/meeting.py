"""How the agents of a job's nodes meet, before any rank starts.

The agent of node 0 is the coordinator; the others (workers) connect to it and to nobody else.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.channel import MAX_BYTES, UNPROVEN, Channel, close_all, has_proof, proof_of
from anygauge.launch.hello import HELLO, Hello, check_hello
from anygauge.launch.listener import Listener, allow_open_files
from anygauge.launch.nodes import HEARTBEAT_S, Nodes
from anygauge.launch.other_nodes import Coordinator, Worker, rendezvous_of
from anygauge.launch.outbox import Outbox
from anygauge.launch.outcome import read_record

_RETRY_S = 0.5
_CONNECT_S = 5.0
_PROOF_S = 10.0
_TURN_S = 0.05


class CancelledError(AnygaugeError):
    """The user ended the agent before all nodes had met."""

    exit_status = 128 + signal.SIGTERM

    def __init__(self) -> None:
        super().__init__("asked to end before all nodes had met; no rank was started")


def meet(
    job: Job, outbox: Outbox, own: Hello, address: tuple[str, int], requests: Sequence[object] = ()
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
    check_hello(own, own, {})
    if own.node_rank:
        return Worker(job, outbox, *_join_coordinator(job, own, address, requests))
    allow_open_files(job.launch)
    channels: dict[int, Channel] = {}
    try:
        return Coordinator(job, outbox, channels, *_gather(job, own, address, requests, channels))
    except AnygaugeError as error:
        _refuse_nodes(channels.values(), str(error))
        raise


# -- node 0 ----------------------------------------------------------------------------------------


def _gather(
    job: Job,
    own: Hello,
    address: tuple[str, int],
    requests: Sequence[object],
    channels: dict[int, Channel],
) -> tuple[dict[int, str], str]:
    """Wait until all nodes have joined.

    Args:
        channels: where each is put, by the number of its node.

    Returns:
        Node rank -> host, and the address by which they reach this machine.

    Raises:
        AnygaugeError: nodes are missing when the time is up, or do not belong to this job.
    """
    hosts, reached_at = {0: own.host}, ""
    beat_at = time.monotonic()
    deadline = beat_at + job.launch.join_timeout_s
    with Listener(*address, job.token, own.nodes) as listener:
        while len(channels) < own.nodes - 1:
            now = time.monotonic()
            if now > deadline:
                raise AnygaugeError(_missing_nodes(job, listener, channels))
            if requests:
                raise CancelledError
            if now - beat_at >= HEARTBEAT_S:
                beat_at = now
                for channel in channels.values():
                    channel.send("beat")
            for channel, join in listener.poll(_TURN_S):
                other = _admit_node(own, listener, channel, join, hosts)
                if other is not None:
                    channels[other.node_rank] = channel
                    hosts[other.node_rank] = other.host
                    reached_at = reached_at or str(channel.socket.getsockname()[0])
    return hosts, reached_at


def _admit_node(
    own: Hello,
    listener: Listener,
    channel: Channel,
    join: Mapping[str, Any],
    hosts: Mapping[int, str],
) -> Hello | None:
    """How a node that has joined describes itself; None where that cannot be read.

    Raises:
        AnygaugeError: it does not belong to this job.
    """
    try:
        other = read_record(HELLO, join.get("hello"))
    except ValueError as error:
        reason = f"the coordinator cannot read how the node describes itself: {error}"
        _refuse_nodes([channel], f"{reason}. Do all nodes have the same version of anygauge?")
        listener.log_rejection(channel, reason)
        return None
    channel.peer = f"node {other.node_rank} ({other.host})"
    try:
        check_hello(own, other, hosts)
    except AnygaugeError as error:
        _refuse_nodes([channel], str(error))
        raise
    return other


def _refuse_nodes(channels: Collection[Channel], reason: str) -> None:
    for channel in channels:
        channel.send("refused", reason=reason)
    close_all(channels)


def _missing_nodes(job: Job, listener: Listener, channels: Mapping[int, Channel]) -> str:
    missing = [f"node {rank}" for rank in range(1, job.launch.nodes) if rank not in channels]
    here = ", ".join(channel.peer for _, channel in sorted(channels.items()))
    return (
        f"{len(missing)} of {job.launch.nodes} nodes did not join within "
        f"{job.launch.join_timeout_s:g} s (launch.join_timeout_s): {', '.join(missing)} missing"
        + (f"; {here} joined" if here else "")
        + ". Check in logs/agentN.log of each missing node whether its agent started; if it did, "
        f"it cannot reach this node, which listens at {listener.where}"
    )


# -- the other nodes -------------------------------------------------------------------------------


def _join_coordinator(
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
                return channel, _introduce(channel, job, own, where, requests)
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
    channel: Channel, job: Job, own: Hello, where: str, requests: Sequence[object]
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
    first = _receive(channel, _PROOF_S, requests)
    other = str(first.get("number"))
    if not has_proof(first, proof_of(job.token, "coordinator", number, other)):
        raise AnygaugeError(
            f"the program that listens at {where} {UNPROVEN.removeprefix('it ')}: the two agents "
            "belong to different jobs, or have different versions of anygauge. If another job "
            "uses that port, set this job's launch.port to another one"
        )
    channel.longest = MAX_BYTES
    proof = proof_of(job.token, "worker", number, other)
    channel.send("join", proof=proof, hello=asdict(own))
    answer: Mapping[str, Any] = {"kind": "beat"}
    while answer["kind"] == "beat":
        answer = _receive(channel, job.launch.silence_s, requests)
    if answer["kind"] == "refused":
        reason = answer.get("reason")
        reason = reason if isinstance(reason, str) else "it gave no reason"
        raise AnygaugeError(f"the coordinator at {where} refused this node: {reason}")
    return rendezvous_of(answer)


def _receive(channel: Channel, limit_s: float, requests: Sequence[object]) -> Mapping[str, Any]:
    """The next message.

    Raises:
        ConnectionError: none has come in time, or this agent is asked to end.
    """
    deadline = time.monotonic() + limit_s
    while not channel.closed and not requests and time.monotonic() < deadline:
        channel.flush()
        message = next(channel.receive(), None)
        if message is not None:
            return message
        time.sleep(0.02)
    raise ConnectionError(channel.why or "it did not answer")
