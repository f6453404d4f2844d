"""Attacks on a coordinator that waits for its nodes: after each the real ones are admitted."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.channel import MAX_UNPROVEN_BYTES, UNPROVEN, proof_of
from anygauge.launch.hello import Hello
from anygauge.launch.listener import MOST_UNKNOWN, Listener
from anygauge.launch.meeting import meet
from anygauge.launch.outbox import Outbox
from tests.helpers.child_processes import PATIENCE_S, free_port, until
from tests.launch.cluster import Cluster
from tests.launch.fakes import FINISHED

TOKEN = "of this job"


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """A connection to the coordinator, once it listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the coordinator does not listen"
            time.sleep(0.05)
            continue
        with found:
            yield found
        return


def ends(connection: socket.socket) -> bool:
    """Whether the coordinator closes a connection; whatever it says before is read."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def sent(port: int, *pieces: bytes) -> None:
    """Send until the coordinator has had enough, and see that it closes the connection."""
    with connected(port) as stranger:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                stranger.sendall(piece)
        assert ends(stranger)


def framed(text: bytes) -> bytes:
    """A message, as long as it says."""
    return struct.pack("!I", len(text)) + text


def message(kind: str, **fields: Any) -> bytes:
    return framed(json.dumps({"kind": kind, **fields}).encode())


def greeting(number: Any = "0" * 32) -> bytes:
    return message("hello", number=number)


def deep(port: int) -> None:
    sent(port, framed(b"[" * MAX_UNPROVEN_BYTES))
    sent(port, framed(b'{"kind":' * 5_000))


def without_end(port: int) -> None:
    sent(port, struct.pack("!I", MAX_UNPROVEN_BYTES + 1))
    for _ in range(12):
        sent(port, *([b"x" * 2**20] * 15))


def noise(port: int) -> None:
    sent(port, b"GET / HTTP/1.1\r\n\r\n")
    for text in (b"", b"\0\xff", b"null", b'{"kind": 5}', b"NaN", b'"\\ud800"', b"1" * 5_000):
        sent(port, framed(text))
    odd = (None, 5, "", "x" * 31, "x" * 32, ["x" * 32], "\ud800" * 32, "\u0660" * 32)
    for number in (*odd, "0" * 31 + "\n", 10**400, float("nan"), float("inf")):
        sent(port, greeting(number))
    for text in (b'"\xed\xa0\x80"', b"1e999"):
        sent(port, framed(b'{"kind": "hello", "number": %s}' % text))
    sent(port, framed(b'{"kind": "join", "token": "of another"}'))


def received(reader: IO[bytes]) -> dict[str, Any]:
    """The next message of the coordinator, but for its heartbeats."""
    found = {"kind": "beat"}
    while found["kind"] == "beat":
        found = json.loads(reader.read(*struct.unpack("!I", reader.read(4))))
    return found


def unproven(port: int) -> None:
    """All that there is to say, but without the secret."""
    for proof in ("its own", "0" * 64, "\u0660" * 64, None, 5):
        with connected(port) as stranger:
            stranger.sendall(greeting())
            answer = received(stranger.makefile("rb"))
            assert set(answer) == {"kind", "number", "proof"}
            proof = answer["proof"] if proof == "its own" else proof
            stranger.sendall(message("join", proof=proof, hello=HELLO))
            assert ends(stranger)


HELLO = {
    "node_rank": 1, "host": "evil", "nodes": 2, "devices_per_node": 1, "version": "0", "fabric": "",
    "settings": {},
}  # fmt: skip


def described(port: int, record: Any) -> str:
    """What the coordinator answers to one who knows the secret, and says this of himself."""
    with connected(port) as stranger, stranger.makefile("rb") as reader:
        stranger.sendall(greeting())
        proof = proof_of(TOKEN, "worker", "0" * 32, received(reader)["number"])
        stranger.sendall(message("join", proof=proof, hello=record))
        reason = received(reader)["reason"]
        assert ends(stranger)
    return str(reason)


def badly_described(port: int) -> None:
    for record, said in (
        (None, "Input should be a dictionary"),
        ({}, "'node_rank' is missing"),
        ({**HELLO, "more": 1}, "'more' is unknown"),
        ({**HELLO, "node_rank": True}, "'node_rank': Input should be a valid integer"),
        ({**HELLO, "host": ["x"]}, "'host': Input should be a valid string"),
        ({**HELLO, "settings": {"A": 1}}, "'settings.A': Input should be a valid string"),
    ):
        reason = described(port, record)
        assert said in reason and "cannot read how the node describes itself: " in reason


def rejections(log: Path) -> int:
    return log.read_text().count("rejected a connection from 127.0.0.1: ")


def test_the_coordinator_admits_its_nodes_after_attacks(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2, join_timeout_s=600.0)
    cluster.start(0)
    log = cluster.directory / "logs/agent0.log"
    rejected = 0
    for attack in (deep, without_end, noise, unproven, badly_described):
        attack(cluster.port)
        until(lambda before=rejected: rejections(log) > before, f"the end of {attack.__name__}")
        rejected = rejections(log)
    cluster.start(1)
    assert [cluster.end(node)["state"] for node in (0, 1)] == ["ok", "ok"]


def limited(soft: int, hard: int | None = None) -> Callable[[], None]:
    """For `preexec_fn`: so many open files, and the hard limit as it is."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


@pytest.mark.parametrize(
    ("descriptors", "why"),
    [
        ((256, 256), f"more than {MOST_UNKNOWN + 2} connections"),
        ((40, 40), "no descriptor"),
        ((24,), f"more than {MOST_UNKNOWN + 2} connections"),  # the soft limit rises by itself
    ],
    ids=["bounded", "exhausted", "raised"],
)
def test_idle_connections_keep_nobody_out(
    cluster: Cluster, descriptors: tuple[int, ...], why: str
) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    cluster.start(0, preexec_fn=limited(*descriptors))
    with contextlib.ExitStack() as held:
        idle = [held.enter_context(connected(cluster.port)) for _ in range(300)]
        # Those that came first had to go.
        assert ends(idle[0])
        cluster.start(1)
        assert cluster.end()["state"] == "ok"
        assert cluster.end(1)["state"] == "ok"
        assert all(map(ends, idle))
    assert why in (cluster.directory / "logs/agent0.log").read_text()


def test_a_hard_limit_below_the_number_of_nodes_is_an_error_at_once(cluster: Cluster) -> None:
    nodes = 1000
    cluster.prepare({rank: [FINISHED] for rank in range(nodes)}, nodes)
    cluster.start(0, preexec_fn=limited(64, 64))
    cause = cluster.end()["cause"]
    assert "each of the job's 1000 nodes and needs 1020 open files, but its process" in cause
    assert "may have 64 at most. Raise the hard limit on " in cause


@pytest.mark.parametrize(
    ("host", "resolved", "where"),
    [
        ("127.0.0.2", None, "127.0.0.2"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("node1", ["127.0.0.1"], "every address"),  # as Debian has it for a machine's own name
        ("node1", ["203.0.113.9"], "every address"),  # of a service in front of it
        ("node1", ["203.0.113.9", "127.0.0.1"], "every address"),
        ("no such name", OSError("unknown"), "every address"),
    ],
)
def test_where_the_coordinator_listens(
    monkeypatch: pytest.MonkeyPatch, host: str, resolved: Any, where: str
) -> None:
    def resolve(name: str, *_: Any, **__: Any) -> list[Any]:
        if isinstance(resolved, OSError):
            raise resolved
        return [(None, None, None, "", (address, 0)) for address in resolved or [name]]

    monkeypatch.setattr("anygauge.launch.listener.socket.getaddrinfo", resolve)
    with Listener(host, port := free_port(), TOKEN, 2) as listener:
        assert listener.where == f"{where}, port {port}"


def test_nobody_stays_unknown_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener("127.0.0.1", port := free_port(), TOKEN, 2) as listener, connected(port) as slow:
        slow.sendall(greeting()[:10])
        until(lambda: listener.poll(0.05) == [] and len(listener._unknown) == 1, "the connection")
        monkeypatch.setattr("anygauge.launch.listener.UNKNOWN_S", -1.0)
        assert listener.poll(0) == [] and not listener._unknown
        assert ends(slow)


def recorded(port: int, to: int, heard: list[bytes]) -> threading.Thread:
    """Stand between a worker and its coordinator, and write down what the worker says."""

    def pass_on(source: socket.socket, target: socket.socket, copy: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                copy.append(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        with listener, listener.accept()[0] as worker, connected(to) as coordinator:
            worker.settimeout(PATIENCE_S)
            back = threading.Thread(target=pass_on, args=(coordinator, worker, []), daemon=True)
            back.start()
            pass_on(worker, coordinator, heard)
            back.join(PATIENCE_S)

    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(PATIENCE_S)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_recorded_join_is_refused(cluster: Cluster) -> None:
    cluster.prepare({rank: [FINISHED] for rank in range(3)}, 3)
    cluster.start(0)
    coordinator, cluster.port = cluster.port, free_port()
    heard: list[bytes] = []
    between = recorded(cluster.port, coordinator, heard)
    cluster.start(1)
    until(lambda: b'"join"' in b"".join(heard), "the join")
    said = b"".join(heard)
    assert TOKEN.encode() not in said
    sent(coordinator, said)
    cluster.port = coordinator
    cluster.start(2)
    for node in range(3):
        assert cluster.end(node)["state"] == "ok"
    between.join(PATIENCE_S)
    log = (cluster.directory / "logs/agent0.log").read_text()
    assert f"rejected a connection from 127.0.0.1: {UNPROVEN}" in log


def test_a_false_coordinator_receives_nothing_and_is_not_followed(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    heard: list[bytes] = []

    def false_coordinator() -> None:
        with socket.create_server(("127.0.0.1", cluster.port)) as listener:
            listener.settimeout(PATIENCE_S)
            with listener.accept()[0] as worker:
                worker.settimeout(PATIENCE_S)
                heard.append(worker.recv(65536))
                worker.sendall(message("proof", number="0" * 32, proof="0" * 64))
                worker.sendall(message("start", rendezvous="tcp://evil:1"))
                with contextlib.suppress(ConnectionError):
                    while data := worker.recv(65536):
                        heard.append(data)

    thread = threading.Thread(target=false_coordinator, daemon=True)
    thread.start()
    with pytest.raises(AnygaugeError, match="the two agents belong to different jobs"):
        meet(
            Job.load(cluster.job),
            Outbox(),
            Hello(node_rank=1, nodes=2, devices_per_node=1, settings={"NAME": "digest"}),
            ("127.0.0.1", cluster.port),
        )
    thread.join(PATIENCE_S)
    said = json.loads(b"".join(heard)[4:])
    assert set(said) == {"kind", "number"} and TOKEN not in said["number"]


def test_a_job_without_a_token_does_not_meet(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2, token="")
    for node in (0, 1):
        cluster.start(node)
        assert (
            "it has no token, and nodes cannot authenticate each other without one"
            in cluster.end(node)["cause"]
        )
