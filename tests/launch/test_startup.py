"""Before ranks start: the run file is placed, the model fetched, and no other run overwritten."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.resolved import run_json
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, Job
from anygauge.launch.startup import OWNER, claim_run_directory, place_run_file, read_secrets
from anygauge.training.setup import accept_start
from tests.helpers.child_processes import until
from tests.helpers.jobs import make_job
from tests.helpers.runs import run_file
from tests.launch.cluster import Cluster
from tests.launch.fakes import FINISHED
from tests.standins.hub import Hub, Repository


def text(name: str) -> str:
    run = {"name": name, "model": {"name": "org/m"}, "data": {"train": {"path": "/rows.jsonl"}}}
    return run_json(RunFile.model_validate(run))


OURS, OTHER = text("ours"), text("other")


def job(folder: Path, **fields: Any) -> Job:
    own = {"run_file": str(folder / "run" / "run.json"), "token": "one", "run_text": OURS}
    return make_job(run_directory=folder / "run", **{**own, **fields})


def test_the_coordinator_claims_and_every_machine_has_the_run_file(tmp_path: Path) -> None:
    claim_run_directory(job(tmp_path), 1)
    assert list((tmp_path / "run").iterdir()) == []
    claim_run_directory(job(tmp_path), 0)
    assert (tmp_path / "run" / "run.json").read_text() == OURS
    assert load_run_file(tmp_path / "run" / "run.yaml").name == "ours", "for people, too"
    mark = (tmp_path / "run" / OWNER).read_text()
    assert len(mark.strip()) == 64 and "one" not in mark
    # Where the storage is not shared, the others bring their own.
    (tmp_path / "run" / "run.json").unlink()
    place_run_file(job(tmp_path))
    assert (tmp_path / "run" / "run.json").read_text() == OURS


@pytest.mark.parametrize("left", ["claim", "metrics.jsonl", "checkpoints"])
def test_the_run_of_another_job_is_not_written_over(tmp_path: Path, left: str) -> None:
    if left == "claim":
        claim_run_directory(job(tmp_path, token="other", run_text=OTHER), 0)
        with pytest.raises(AnygaugeError, match="holds another job's run"):
            claim_run_directory(job(tmp_path), 1)
    else:
        (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(AnygaugeError, match="holds another job's run: give this one another"):
        claim_run_directory(job(tmp_path), 0)
    assert left != "claim" or (tmp_path / "run" / "run.json").read_text() == OTHER
    claim_run_directory(job(tmp_path, takes_over=True), 0)  # --resume auto
    claim_run_directory(job(tmp_path), 0)  # it is its own now


def test_what_another_job_has_left_stays_until_the_ranks_accept(tmp_path: Path) -> None:
    home = tmp_path / "run"
    claim_run_directory(job(tmp_path, token="other", run_text=OTHER), 0)
    new = job(tmp_path, takes_over=True, id="1").as_attempt()
    for node_rank in (1, 0, 1):
        claim_run_directory(new, node_rank)
        assert new.start_directory == home / "attempts/1", "logs of every machine go there"
    place_run_file(new)
    claim_run_directory(new, 0)  # the cluster starts it again before they do
    assert (home / "run.json").read_text() == OTHER
    assert new.resolved_run.read_text() == OURS
    accept_start(new)
    for node_rank in (1, 0):  # and afterwards
        claim_run_directory(new, node_rank)
        place_run_file(new)
        assert new.start_directory == home / "attempts/1"
    assert (home / "run.json").read_text() == OURS


def test_a_run_without_a_mark_is_left_likewise(tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    (home / "run.yaml").write_text("mine")
    claim_run_directory(job(tmp_path, takes_over=True, id="1").as_attempt(), 0)
    assert (home / "run.yaml").read_text() == "mine"
    assert (home / "attempts/1/run.json").read_text() == OURS


def test_where_nothing_was_before_nothing_waits(tmp_path: Path) -> None:
    home = tmp_path / "run"
    new = job(tmp_path, takes_over=True, id="1").as_attempt()
    for node_rank in (1, 0, 1):
        claim_run_directory(new, node_rank)
        assert new.start_directory == home
    place_run_file(new)
    assert sorted(path.name for path in home.iterdir()) == [OWNER, "run.json", "run.yaml"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(AnygaugeError, match=r"run cannot be written: .* storage that the job moun"):
        claim_run_directory(job(tmp_path), 0)


def test_secrets_are_read_as_a_cluster_mounts_them(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "HF_TOKEN").write_text("hf $x\n雪")
    (tmp_path / "HF_TOKEN").symlink_to("..data/HF_TOKEN")
    assert read_secrets(str(tmp_path)) == {"HF_TOKEN": "hf $x\n雪"}


FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"0" * 1000}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"somebody/model": Repository(files=FILES)}) as hub:
        yield hub


def prepare(cluster: Cluster, nodes: int) -> None:
    path = run_file(cluster.folder, model={"name": "somebody/model"})
    cluster.prepare({rank: [FINISHED] for rank in range(nodes)}, nodes, prepare=True)
    (cluster.directory / "run.yaml").write_text(run_json(load_run_file(path)))


def start(cluster: Cluster, node: int, endpoint: str) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cluster.folder / f"hub{node}")}
    cluster.start(node, env={**without, **own})


def started(cluster: Cluster) -> list[Path]:
    return [*cluster.folder.glob("pid*"), *(cluster.directory / "logs").glob("rank*.log")]


def test_each_node_fetches_once_before_its_ranks(cluster: Cluster, hub: Hub) -> None:
    prepare(cluster, 2)
    for node in (0, 1):
        start(cluster, node, hub.address)
    assert cluster.end()["state"] == "ok"
    assert hub.files() == sorted([*FILES, *FILES]), "each file once on each node"
    kinds = [event["event"] for event in cluster.events]
    said = [event["text"] for event in cluster.events if event["event"] == "message"]
    assert sum(": fetching somebody/model: 3 files, " in text for text in said) == 2
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
        assert (ended["state"], ended["exit_status"]) == ("failed", 2)
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
    assert (ended["state"], ended["exit_status"]) == ("failed", 2)
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
