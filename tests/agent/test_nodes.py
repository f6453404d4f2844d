"""Several nodes: real agents and fake ranks on one machine, without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

import pytest

from anygauge.agent.__main__ import meet
from anygauge.agent.nodes import Outbox
from anygauge.interface import LOST, STOPPED, AnygaugeError, Job
from tests.agent.cluster import Cluster
from tests.agent.fakes import (
    FAKE_AGENT,
    FINISHED,
    FOREVER,
    PATIENCE_S,
    alive,
    sends,
    until,
)
from tests.helpers.processes import as_in_a_terminal


def test_all_nodes_finish_and_the_coordinator_reports_all_ranks(cluster: Cluster) -> None:
    cluster.run({rank: [sends("step", step=rank), FINISHED] for rank in range(6)}, nodes=3)
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"], ended["cause"]) == ("ok", 0, None)
    assert {e["rank"] for e in cluster.events if e["event"] == "step"} == set(range(6))
    assert {e["rank"] for e in cluster.events if e["event"] == "rank_exited"} == set(range(6))
    assert [cluster.end(node)["state"] for node in (1, 2)] == ["ok", "ok"]
    for rank in range(6):
        result = json.loads((cluster.job.parent / "ranks" / f"rank{rank}.json").read_text())
        assert (result["state"], result["local_rank"]) == ("ok", rank % 2)
    assert (cluster.job.parent / "logs" / "agent2.log").read_text().count("started") == 2


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failure_on_one_node_ends_the_others(cluster: Cluster, broken: int) -> None:
    failing = [["wait", "go"], sends("failed", error="E", message="oh", time=0), ["exit", 3]]
    cluster.run({broken: failing, 1 - broken: [FOREVER]})
    pids = cluster.started(0, 1)
    (cluster.folder / "go").touch()
    ends = [cluster.end(node) for node in (0, 1)]
    for ended in ends:
        assert (ended["state"], ended["exit_status"]) == ("failed", 1)
        assert f"rank {broken} on" in ended["cause"] and "E: oh" in ended["cause"]
    assert not any(map(alive, pids))


def test_the_earliest_is_named_though_its_node_reports_last(cluster: Cluster) -> None:
    # Rank 0 reports a broken connection; rank 1 had broken it by its death.
    cluster.run(
        {
            0: [["wait", "go"], sends("failed", error="E", message="connection closed"), FOREVER],
            1: [["ignore", signal.SIGTERM], FOREVER],
        }
    )
    _, killed = cluster.started(0, 1)
    time.sleep(0.5)
    os.kill(killed, signal.SIGKILL)
    # On a busy machine a killed process takes a moment to end, and its agent sees it alive.
    until(lambda: not alive(killed), "the end of a killed rank")
    (cluster.folder / "go").touch()
    ended = cluster.end()
    assert "rank 1 on" in ended["cause"] and "SIGKILL" in ended["cause"]


def test_a_killed_agent_is_a_lost_node_and_takes_its_ranks_along(cluster: Cluster) -> None:
    cluster.run({0: [FOREVER], 1: [FOREVER]})
    pids = cluster.started(0, 1)
    cluster.agents[1].kill()
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("lost", LOST)
    assert ended["cause"].startswith("node 1 (") and "ended without a report" in ended["cause"]
    until(lambda: not any(map(alive, pids)), "the end of all ranks")


def test_without_its_coordinator_a_node_ends(cluster: Cluster) -> None:
    cluster.run({0: [FOREVER], 1: [FOREVER]})
    pids = cluster.started(0, 1)
    cluster.agents[0].kill()
    ended = cluster.end(1)
    assert (ended["state"], ended["exit_status"]) == ("lost", LOST)
    assert "the coordinator is lost" in ended["cause"]
    until(lambda: not any(map(alive, pids)), "the end of all ranks")


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_lost(cluster: Cluster, silent: int) -> None:
    cluster.run({0: [FOREVER], 1: [FOREVER]}, lost_after_s=2.5)
    pids = cluster.started(0, 1)
    cluster.agents[silent].send_signal(signal.SIGSTOP)  # as behind a cut cable
    ended = cluster.end(1 - silent)
    assert (ended["state"], ended["exit_status"]) == ("lost", LOST)
    assert "nothing was heard" in ended["cause"]
    assert not alive(pids[1 - silent])
    cluster.agents[silent].send_signal(signal.SIGCONT)
    assert cluster.end(silent)["state"] == "lost"
    assert not alive(pids[silent])


@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_to_one_node_stops_all(cluster: Cluster, asked: int) -> None:
    stopping = [["on_term_stop", {"step": 4, "checkpoint": "/c"}], ["touch", "ready"], FOREVER]
    cluster.run({0: stopping, 1: [stopping[0], ["touch", "ready1"], FOREVER]})
    for name in ("ready", "ready1"):
        until((cluster.folder / name).exists, name)
    cluster.agents[asked].terminate()
    for node in (0, 1):
        ended = cluster.end(node)
        assert (ended["state"], ended["exit_status"]) == ("stopped", STOPPED)
        assert ended["cause"] == "stopped at request after step 4; checkpoint: /c"


def test_a_second_request_kills(cluster: Cluster) -> None:
    stubborn = [["ignore", signal.SIGTERM], ["touch", "ready"], FOREVER]
    cluster.run({0: stubborn, 1: [stubborn[0], ["touch", "ready1"], FOREVER]})
    for name in ("ready", "ready1"):
        until((cluster.folder / name).exists, name)
    cluster.agents[1].send_signal(signal.SIGINT)
    time.sleep(1)
    cluster.agents[1].send_signal(signal.SIGINT)
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("cancelled", 130)


def test_ranks_that_never_finish_are_ended_though_they_are_on_another_node(
    cluster: Cluster,
) -> None:
    cluster.run({0: [FINISHED], 1: [FOREVER]}, collective_timeout_s=1.0)
    ended = cluster.end()
    assert ended["state"] == "failed" and "rank 1" in ended["cause"]
    assert "did not finish within 1.5 s" in ended["cause"]


def test_who_joins_early_is_not_lost_for_waiting(cluster: Cluster) -> None:
    cluster.prepare({rank: [FINISHED] for rank in range(3)}, 3, lost_after_s=2.0)
    cluster.start(0)
    cluster.start(1)
    time.sleep(5)
    cluster.start(2)
    for node in range(3):
        assert cluster.end(node)["state"] == "ok"


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


def test_two_agents_of_one_number_are_refused(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED], 2: [FINISHED]}, 3)
    cluster.start(0)
    cluster.start(1)
    cluster.start(1, key=5)
    for key in (0, 1, 5):
        assert "two agents report that they are node 1" in cluster.end(key)["cause"]


def test_an_agent_of_another_job_is_turned_away(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    cluster.start(0)
    until((cluster.job.parent / "logs" / "agent0.log").exists, "the coordinator")
    own = cluster.job.read_text()
    other = cluster.folder / "other.json"
    other.write_text(own.replace("of this job", "of another"))
    cluster.job, mine = other, cluster.job
    cluster.start(1, key=7)
    assert "the two agents belong to different jobs" in cluster.end(7)["cause"]
    cluster.job = mine
    with socket.create_connection(("127.0.0.1", cluster.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # neither does noise disturb it
        cluster.start(1)
        assert cluster.end()["state"] == "ok"


def test_settings_that_all_must_share_are_compared(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    job = Job.load(cluster.job)
    causes: dict[int, str] = {}

    def join(node: int) -> None:
        settings = {"ALIKE": "1", "MODE": f"digest {node}"}
        silent = Outbox(os.open(os.devnull, os.O_WRONLY))
        try:
            meet(job, silent, node, f"host{node}", f"127.0.0.1:{cluster.port}", settings)
        except AnygaugeError as error:
            causes[node] = str(error)

    threads = [threading.Thread(target=join, args=(node,), daemon=True) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for node in (0, 1):
        differs = "MODE: the value on node 1 (host1) differs from that on the coordinator (host0)"
        assert differs in causes[node]
        assert "ALIKE" not in causes[node]


def test_other_numbers_are_refused(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    cluster.start(0)
    job = json.loads(cluster.job.read_text())
    other = cluster.folder / "other.json"
    other.write_text(json.dumps({**job, "launch": {**job["launch"], "devices": 2}}))
    cluster.job = other
    cluster.start(1)
    for node in (0, 1):
        cause = cluster.end(node)["cause"]
        assert (
            "launch.devices is 2 on node 1 (" in cause
            and "), but 1 on the coordinator (" in cause
            and "); all nodes must have the same" in cause
        )


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
    cluster.agents[0] = subprocess.Popen(
        [sys.executable, FAKE_AGENT, str(cluster.script), "--stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
        env={**os.environ, "TAKEN": "away"},
    )
    variables = {"MINE": 'a "b" $HOME\nü', "TAKEN": None}
    pipe = give(cluster.agents[0], ["--job", str(moved), "--grace", "0.5"], variables)
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
    for text, said in (("", "ended before the line"), ("[]\n", "cannot be read")):
        done = subprocess.run(
            [sys.executable, "-m", "anygauge.agent", "--stdin"],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
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
    cluster.start(0)
    given = {"NODE": "1", "FIRST": "127.0.0.1"}
    cluster.agents[1] = subprocess.Popen(
        [
            *(sys.executable, FAKE_AGENT, str(cluster.script), "--job", str(cluster.job)),
            *("--node-rank", "$NODE", "--coordinator", f"$FIRST:{cluster.port}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **given},
    )
    assert cluster.end()["state"] == "ok"


def test_a_variable_that_is_not_set_is_named(cluster: Cluster) -> None:
    cluster.prepare({0: [FINISHED], 1: [FINISHED]}, 2)
    cluster.start(0, "--node-rank", "$ABSENT_NUMBER")
    assert "the variable ABSENT_NUMBER is not set here" in cluster.end()["cause"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_failed_ranks_are_started_again(cluster: Cluster, nodes: int) -> None:
    ranks = {rank: [["wait", "go"], FINISHED] for rank in range(nodes)}
    ranks[nodes - 1] = [["once", "hit"], FINISHED]
    (cluster.folder / "go").touch()
    cluster.run(ranks, nodes=nodes, max_restarts=2)
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("ok", 0)
    (told,) = [e for e in cluster.events if e["event"] == "message"]
    assert "ended with exit status 7" in told["text"]
    assert "starting again from the newest checkpoint (restart 1 of 2" in told["text"]
    assert [e["code"] for e in cluster.events if e["event"] == "rank_exited"].count(7) == 1
    if nodes == 2:
        assert cluster.end(1)["state"] == "ok"


def test_restarts_come_to_an_end(cluster: Cluster) -> None:
    cluster.run({0: [FOREVER], 1: [["exit", 7]]}, max_restarts=2)
    ended = cluster.end()
    assert ended["state"] == "failed" and "exit status 7" in ended["cause"]
    assert len([e for e in cluster.events if e["event"] == "message"]) == 2
    assert [e["code"] for e in cluster.events if e["event"] == "rank_exited"].count(7) == 3


def test_an_error_of_the_user_is_not_tried_again(cluster: Cluster) -> None:
    failing = [sends("failed", message="no such file", for_user=True, exit_status=2), ["exit", 2]]
    cluster.run({0: [FOREVER], 1: failing}, max_restarts=5)
    ended = cluster.end()
    assert (ended["state"], ended["exit_status"]) == ("failed", 2)
    assert not [e for e in cluster.events if e["event"] == "message"]
