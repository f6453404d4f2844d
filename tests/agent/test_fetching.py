"""A model of the hub is fetched on each node before any rank starts: real agents, fake ranks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import load_run_file, run_json
from tests.agent.cluster import Cluster
from tests.agent.fakes import FINISHED, until
from tests.helpers.runs import run_file
from tests.standins.hub import Hub, Repository

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"0" * 1000}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"somebody/model": Repository(files=FILES)}) as hub:
        yield hub


def prepare(cluster: Cluster, nodes: int) -> None:
    path = run_file(cluster.folder, model={"name": "somebody/model"})
    cluster.prepare({rank: [FINISHED] for rank in range(nodes)}, nodes, fetch=True)
    (cluster.job.parent / "run.yaml").write_text(run_json(load_run_file(path).run))


def start(cluster: Cluster, node: int, endpoint: str) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cluster.folder / f"hub{node}")}
    cluster.start(node, env={**without, **own})


def started(cluster: Cluster) -> list[Path]:
    return [*cluster.folder.glob("pid*"), *(cluster.job.parent / "logs").glob("rank*.log")]


def test_each_node_fetches_once_before_its_ranks(cluster: Cluster, hub: Hub) -> None:
    prepare(cluster, 2)
    for node in (0, 1):
        start(cluster, node, hub.address)
    assert cluster.end()["state"] == "ok"
    assert hub.files() == sorted([*FILES, *FILES]), "each file once on each node"
    kinds = [event["event"] for event in cluster.events]
    said = [event["text"] for event in cluster.events if event["event"] == "message"]
    assert sum(": fetching somebody/model: 3 files, 1 kB" in text for text in said) == 2
    lines = [number for number, kind in enumerate(kinds) if kind == "message"]
    assert max(lines) < kinds.index("rank_exited")
    assert cluster.end(1)["state"] == "ok"


@pytest.mark.parametrize("refused", [0, 1])
def test_where_one_node_cannot_have_it_no_rank_starts(
    cluster: Cluster, hub: Hub, refused: int
) -> None:
    gated = Repository(files=FILES, access="gated")
    prepare(cluster, 2)
    with Hub({"somebody/model": gated}) as other:
        for node in (0, 1):
            start(cluster, node, (other if node == refused else hub).address)
        ends = [cluster.end(node) for node in (0, 1)]
    for ended in ends:
        assert (ended["state"], ended["exit_status"]) == ("failed", 1)
        assert ended["cause"].startswith(f"node {socket.gethostname()}: model.name: 'somebody/mod")
        assert "is gated: accept its licence at" in ended["cause"]
    assert started(cluster) == []


def test_one_node_alone(cluster: Cluster, hub: Hub) -> None:
    prepare(cluster, 1)
    start(cluster, 0, hub.address)
    assert cluster.end()["state"] == "ok"
    hub.repositories.clear()
    prepare(cluster, 1)
    start(cluster, 0, hub.address)
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("failed", 1)
    assert ended["cause"].startswith("model.name: 'somebody/model' is not a folder here")


@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_meanwhile_ends_all(cluster: Cluster, asked: int) -> None:
    prepare(cluster, 2)
    calls: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for node in (0, 1):
            start(cluster, node, f"http://127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(60)
        calls += [silent.accept()[0] for node in (0, 1)]  # both ask, and nothing is answered
        cluster.agents[asked].send_signal(signal.SIGTERM)
        ends = [cluster.end(node) for node in (0, 1)]
    for call in calls:
        call.close()
    assert [ended["state"] for ended in ends] == ["cancelled", "cancelled"]
    assert {ended["exit_status"] for ended in ends} == {128 + signal.SIGTERM}
    assert started(cluster) == []
    until(lambda: all(agent.poll() is not None for agent in cluster.agents.values()), "the end")
