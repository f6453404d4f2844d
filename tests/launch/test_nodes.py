"""Several nodes: real agents and fake ranks. The order of failures: `test_any_order.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import IO, Any

import pytest

from anygauge.interface import LOST, AnygaugeError
from anygauge.launch.hello import Hello, check_hello
from tests.helpers.child_processes import PATIENCE_S, alive, begin, until
from tests.launch.cluster import Cluster
from tests.launch.fakes import FAKE_AGENT, FINISHED, FOREVER, sends


def test_all_nodes_finish_and_the_coordinator_reports_all_ranks(cluster: Cluster) -> None:
    ended = cluster.run({r: [sends("step", step=r), FINISHED] for r in range(6)}, nodes=3)
    assert (ended["state"], ended["exit_status"], ended["cause"]) == ("ok", 0, None)
    assert {e["rank"] for e in cluster.events if e["event"] == "step"} == set(range(6))
    assert {e["rank"] for e in cluster.events if e["event"] == "rank_exited"} == set(range(6))
    assert [cluster.end(node)["state"] for node in (1, 2)] == ["ok", "ok"]
    results = map(cluster.result, range(6))
    assert [(one["state"], one["local_rank"]) for one in results] == [("ok", 0), ("ok", 1)] * 3
    assert (cluster.directory / "logs" / "agent2.log").read_text().count("started") == 2


def test_a_killed_agent_is_a_lost_node_and_takes_its_ranks_along(cluster: Cluster) -> None:
    cluster.begin({0: [FOREVER], 1: [FOREVER]}, nodes=2)
    pids = cluster.started(0, 1)
    cluster.agents[1].kill()
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("lost", LOST)
    assert ended["cause"].startswith("node 1 (") and "ended without a report" in ended["cause"]
    until(lambda: not any(map(alive, pids)), "the end of all ranks")


def test_a_missing_node_is_named(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED], 2: [FINISHED]}, 3, join_timeout_s=2.0)
    cluster.start(0)
    cluster.start(2)
    for node in (0, 2):
        ended = cluster.end(node)
        assert ended["state"] == "failed"
        assert "1 of 3 nodes did not join within 2 s (launch.join_timeout_s)" in ended["cause"]
        assert "node 1 missing; node 2 (" in ended["cause"]
    assert not (cluster.folder / "pid0").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"devices_per_node": 2},
            "launch.devices is 2 on node 1 (host1), but 1 on the coordinator",
        ),
        (
            {"nodes": 3},
            "launch.nodes is 3 on node 1 (host1), but 2 on the coordinator (host0); all",
        ),
        ({"version": "0"}, "the version of anygauge is 0 on node 1 (host1), but "),
        ({"fabric": "efa"}, "launch.fabric is efa on node 1 (host1), but what its library finds"),
        ({"settings": {"A": "1", "B": "3"}}, "B: the value on node 1 (host1) differs from that on"),
        ({"settings": {"A": "1"}}, "B: the value on node 1 (host1) differs"),
        ({"node_rank": 2}, "node 2 (host1): the job has nodes 0 to 1"),
        ({"node_rank": 0}, "two agents report that they are node 0: host0 and host1. Give each"),
    ],
)
def test_a_node_that_differs_is_refused(changes: dict[str, Any], said: str) -> None:
    settings = {"A": "1", "B": "2"}
    own = Hello(node_rank=0, host="host0", nodes=2, devices_per_node=1, settings=settings)
    check_hello(own, other := replace(own, node_rank=1, host="host1"), {0: "host0"})
    with pytest.raises(AnygaugeError) as caught:
        check_hello(own, replace(other, **changes), {0: "host0"})
    assert str(caught.value).startswith(said)


def test_all_are_refused_where_two_have_one_number(cluster: Cluster) -> None:
    cluster.prepare({rank: [FINISHED] for rank in range(3)}, 3)
    for key, node in enumerate((0, 1, 1)):
        cluster.start(node, key=key)
    for key in range(3):
        assert "two agents report that they are node 1: " in cluster.end(key)["cause"]
    assert not (cluster.folder / "pid0").exists()


def test_a_taken_port_is_named(cluster: Cluster) -> None:
    with socket.create_server(("", cluster.port)):
        cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
        cluster.start(0)
        cause = cluster.end()["cause"]
    assert f"cannot listen at port {cluster.port}" in cause and "launch.port" in cause


def test_the_end_of_standard_input_ends_the_job(cluster: Cluster) -> None:
    cluster.prepare({0: [FOREVER], 1: [FOREVER]}, 2)
    cluster.start(0)
    cluster.start(1, "--stdin", stdin=subprocess.PIPE)
    pipe = give(cluster.agents[1], [])
    cluster.started(0, 1)
    pipe.close()
    cluster.agents[1].stdin = None
    assert cluster.end()["state"] == "cancelled"
    assert cluster.end(1)["state"] == "cancelled"


def test_standard_input_brings_arguments_variables_and_signals(cluster: Cluster) -> None:
    folder = cluster.folder / "a \"b\" $HOME 'c'\nü"
    folder.mkdir()
    cluster.prepare({0: [["environment", "seen"], ["touch", "ready"], FOREVER]}, 1)
    moved = folder / "job.json"
    moved.write_text(cluster.job.read_text())
    program, taken = (sys.executable, FAKE_AGENT, cluster.script), {"TAKEN": "away"}
    agent = begin("--stdin", program=program, stdin=subprocess.PIPE, environment=taken)
    cluster.agents[0] = agent
    variables = {"MINE": 'a "b" $HOME\nü', "TAKEN": None}
    pipe = give(agent, ["--job", str(moved), "--grace", "0.5"], variables)
    until((cluster.folder / "ready").exists, "the rank")
    seen = json.loads((cluster.folder / "seen").read_text())
    assert seen["MINE"] == variables["MINE"] and "TAKEN" not in seen
    (pid,) = cluster.started(0)
    pipe.write("SIGINT\n")
    pipe.flush()
    until(lambda: not alive(pid), "the end of the rank")  # the end of the pipe is a signal, too
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("cancelled", 130)


def test_standard_input_without_arguments_is_refused(cluster: Cluster) -> None:
    agent = [sys.executable, "-m", "anygauge.launch.agent", "--stdin"]
    for text, said in (("", "ended before the line"), ("[]\n", "cannot be read")):
        done = subprocess.run(
            agent, input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 1 and said in json.loads(done.stdout)["cause"]


def give(
    agent: subprocess.Popen[str], arguments: list[str], variables: dict[str, Any] | None = None
) -> IO[str]:
    assert agent.stdin is not None
    agent.stdin.write(json.dumps({"arguments": arguments, "environment": variables or {}}) + "\n")
    agent.stdin.flush()
    return agent.stdin


def test_a_node_may_be_given_by_variables(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    cluster.start(0, "--attempt", "$ABSENT_ATTEMPT")
    given = {**os.environ, "NODE": "1", "FIRST": "127.0.0.1"}
    named = ("--node-rank", "$NODE", "--coordinator", f"$FIRST:{cluster.port}")
    cluster.start(1, *named, env=given)
    assert cluster.end()["state"] == "ok"
    cluster.start(0, "--node-rank", "$ABSENT_NUMBER")
    assert "the variable ABSENT_NUMBER is not set here" in cluster.end()["cause"]


def test_failed_ranks_are_started_again(cluster: Cluster) -> None:
    cluster.begin(
        {0: [["wait", "hit"], FINISHED], 1: [["once", "hit"], FINISHED]}, 2, max_restarts=2
    )
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("ok", 0)
    _, told = [e for e in cluster.events if e["event"] == "message"]  # after that of the network
    assert "ended with exit status 7" in told["text"]
    assert "starting again from the newest checkpoint (restart 1 of 2" in told["text"]
    assert [e["code"] for e in cluster.events if e["event"] == "rank_exited"].count(7) == 1
    assert cluster.end(1)["state"] == "ok"
