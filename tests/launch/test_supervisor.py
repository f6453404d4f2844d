"""One node's ranks under an agent: real processes. The order of failures: `test_any_order.py`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from anygauge.launch.attempt import Requests
from anygauge.launch.nodes import Instruction, Nodes
from anygauge.launch.outbox import Outbox
from anygauge.launch.supervisor import Supervisor
from anygauge.util.processes import END_AT_ONCE
from tests.helpers.child_processes import PATIENCE_S, alive, until
from tests.helpers.jobs import make_job
from tests.launch.cluster import Cluster
from tests.launch.fakes import FINISHED, FOREVER, read_pid, sends


def test_all_ranks_finish(cluster: Cluster) -> None:
    count = 300
    steps = [sends("step", step=step) for step in range(count)]
    no_events = [
        ["raw", each + "\n"] for each in ("oops", "[1]", "[" * 200_000, '{"event":' * 60_000)
    ]
    actions = [["print", "chatter"], *no_events, *steps, FINISHED]
    ended = cluster.run(dict.fromkeys(range(3), actions))
    assert (ended["state"], ended["exit_status"], ended["cause"]) == ("ok", 0, None)
    for rank in range(3):
        assert cluster.result(rank)["state"] == "ok"
        own = [e["step"] for e in cluster.events if e["event"] == "step" and e["rank"] == rank]
        assert own == list(range(count)), "in their order"
        assert (cluster.directory / "logs" / f"rank{rank}.log").read_text() == "chatter\n"
    assert {event["event"] for event in cluster.events} == {
        *("step", "finished", "rank_exited", "ended")
    }


def test_a_rank_knows_who_it_is_and_nothing_of_another_launcher(cluster: Cluster) -> None:
    stale = {
        "RANK": "17",
        "MASTER_ADDR": "elsewhere",
        "OMPI_COMM_WORLD_RANK": "17",
        "SLURM_PROCID": "17",
        "TORCHELASTIC_RUN_ID": "old",
        "KEPT": "yes",
    }
    cluster.prepare({0: [["environment", "env0"], FINISHED], 1: [FINISHED]})
    cluster.start(env={**os.environ, **stale})
    cluster.end()
    seen = json.loads((cluster.folder / "env0").read_text())
    identity = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert {name: seen[name] for name in identity} == identity
    assert seen["KEPT"] == "yes"
    assert not set(stale) & set(seen) - {"RANK", "KEPT"}


def test_a_rank_that_exits_takes_the_others_along_and_is_named(cluster: Cluster) -> None:
    last = [["print", "last words"], ["helper", "helper1"], ["wait", "helper0"], ["exit", 7]]
    ended = cluster.run({0: [["helper", "helper0"], FOREVER], 1: last})
    assert (ended["state"], ended["exit_status"]) == ("failed", 1)
    for words in ("rank 1", "exit status 7", "last words", f"{cluster.directory}/logs/rank1.log"):
        assert words in ended["cause"]
    assert cluster.result(1)["code"] == 7
    assert (cluster.result(0)["state"], cluster.result(0)["signal"]) == ("stopped", END_AT_ONCE)
    assert not alive(*cluster.started(0))
    helpers = [read_pid(cluster.folder / name) for name in ("helper0", "helper1")]
    until(lambda: not any(map(alive, helpers)), "the end of helpers")


def test_a_rank_that_closes_its_events_is_still_watched(cluster: Cluster) -> None:
    ended = cluster.run({0: [["close_events", None], ["sleep", 0.5], ["exit", 4]]})
    assert "exit status 4" in ended["cause"]


def test_a_follower_that_has_gone_does_not_stop_the_run(cluster: Cluster) -> None:
    cluster.begin({0: [["wait", "go"], *[sends("step", step=1)] * 10, FINISHED]})
    agent = cluster.agents[0]
    assert agent.stdout is not None
    agent.stdout.close()
    (cluster.folder / "go").touch()
    assert agent.wait(timeout=PATIENCE_S) == 0
    assert cluster.result(0)["state"] == "ok"


def test_a_signal_is_heard_while_the_follower_does_not_read(cluster: Cluster) -> None:
    text = "x" * 10_000
    cluster.begin({0: [*[sends("message", text=text)] * 50, ["touch", "sent"], FOREVER]})
    cluster.wait("sent")  # more than a pipe holds, and nobody has read it
    cluster.agents[0].terminate()
    until(lambda: not alive(*cluster.started(0)), "the end of the rank")
    assert cluster.end()["state"] == "cancelled"


def test_an_agent_does_not_make_a_moved_folder_again(cluster: Cluster) -> None:
    stale = cluster.directory / "ranks" / "rank0.json"
    stale.parent.mkdir(parents=True)
    stale.write_text('{"state": "ok"}')
    cluster.begin({0: [["touch", "up"], ["wait", "moved"], FINISHED]})
    cluster.wait("up")
    assert not stale.exists(), "the result of an earlier run is not taken for this one's"
    cluster.directory.rename(cluster.folder / "elsewhere")
    (cluster.folder / "moved").touch()
    assert cluster.end()["state"] == "ok"
    assert not cluster.directory.exists() and "is not this run's folder any more" in cluster.err


def test_the_time_of_a_request_does_not_follow_a_clock_that_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000, 0, -10))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    requests = Requests()
    for _ in range(2):
        requests.add(signal.SIGUSR1)
    (_, first), (_, second) = requests.received
    assert 0 <= second - first < 5


def test_an_invalid_job_file_is_reported_as_an_event(cluster: Cluster) -> None:
    cluster.directory.mkdir()
    cluster.job.write_text("{}")
    cluster.start()
    ended = cluster.end()
    assert ended["state"] == "failed" and str(cluster.job) in ended["cause"]


def test_a_request_that_came_before_the_ranks_starts_none(tmp_path: Path) -> None:
    job, events, asked = make_job(run_directory=tmp_path, devices=2), Outbox(), Requests()
    asked.add(signal.SIGTERM)
    supervisor = Supervisor(
        job,
        Nodes(job, events),
        rank_argv=lambda *_: ("/nowhere/program",),
        rank_environment=lambda local_rank: {},
        requests=asked,
    )
    assert supervisor.run() == 128 + signal.SIGTERM
    events.close()
    assert [json.loads(line)["state"] for line in events] == ["cancelled"]


def test_each_signal_by_which_jobs_are_ended_is_a_request() -> None:
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in ends}
    requests = Requests()
    try:
        requests.collect_signals()
        for number in ends:
            signal.raise_signal(number)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert [number for number, _ in requests.received] == [*ends]


class Listening(Nodes):
    """Keeps what the other nodes would be told."""

    def broadcast(self, instruction: Instruction, signum: int | None = None) -> None:
        told.append(instruction)


told: list[Instruction] = []


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_who_asks_again_kills_and_a_warning_or_a_closed_terminal_adds_nothing(
    again: signal.Signals, tmp_path: Path
) -> None:
    told.clear()
    asked, now = Requests(), time.monotonic()
    asked.received += [(signal.SIGTERM, now - 2), (again, now - 1)]
    job, events = make_job(run_directory=tmp_path), Outbox()
    Supervisor(
        job,
        Listening(job, events),
        rank_argv=lambda *_: ("/nowhere/program",),
        rank_environment=lambda local_rank: {},
        requests=asked,
    ).run()
    events.close()
    kills = again in (signal.SIGTERM, signal.SIGINT)
    assert told == [Instruction.STOP, *[Instruction.KILL] * kills]
