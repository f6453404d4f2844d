"""One node's ranks under an agent: real processes, without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.agent.nodes import Nodes, Outbox
from anygauge.agent.supervisor import SIGNALS, Supervisor, collect_signals
from anygauge.interface import STOPPED
from anygauge.util.processes import END_AT_ONCE
from tests.agent.fakes import (
    FAKE_AGENT,
    FINISHED,
    FOREVER,
    PATIENCE_S,
    alive,
    read_pid,
    sends,
    until,
    write_script,
)
from tests.helpers.jobs import make_job
from tests.helpers.processes import as_in_a_terminal


class AgentRun:
    """One agent and what it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "run directory"
        self.agent: subprocess.Popen[str] | None = None
        self.events: list[dict[str, Any]] = []
        self.err = ""

    def start(
        self,
        ranks: dict[int, list[Any]],
        *,
        grace: float = 0.5,
        timeout: float = 600,
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        script = write_script(self.folder, ranks)
        self.directory.mkdir(exist_ok=True)
        job = make_job(
            name="t",
            run_directory=str(self.directory),
            run_file=str(self.directory / "run.yaml"),
            backend="cpu",
            strategy="single",
            devices=len(ranks),
            rendezvous="file:///nowhere",
            collective_timeout_s=timeout,
        )
        job_file = self.directory / "job.json"
        job_file.write_text(job.dump())
        self.agent = subprocess.Popen(
            [
                *(sys.executable, FAKE_AGENT, str(script), "--job", str(job_file)),
                *("--grace", str(grace)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=as_in_a_terminal,
            env={**os.environ, **(environment or {})},
        )
        return self.agent

    def end(self) -> dict[str, Any]:
        """Wait for the agent; its last event."""
        assert self.agent is not None
        out, self.err = self.agent.communicate(timeout=PATIENCE_S)
        self.events = [json.loads(line) for line in out.splitlines()]
        assert self.events, self.err
        assert self.events[-1]["event"] == "ended"
        assert self.events[-1]["exit_status"] == self.agent.returncode
        return self.events[-1]

    def __call__(self, ranks: dict[int, list[Any]], **options: Any) -> dict[str, Any]:
        self.start(ranks, **options)
        return self.end()

    def pid(self, name: str) -> int:
        return read_pid(self.folder / name)

    def wait(self, name: str) -> None:
        until((self.folder / name).exists, name)

    def result(self, rank: int) -> dict[str, Any]:
        return json.loads((self.directory / "ranks" / f"rank{rank}.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AgentRun]:
    one = AgentRun(tmp_path)
    yield one
    if one.agent is not None and one.agent.poll() is None:
        one.agent.kill()
        one.agent.wait()


def test_all_ranks_finish(run: AgentRun) -> None:
    ended = run({0: [sends("step", step=1, loss=2.5), FINISHED], 1: [FINISHED]})
    assert (ended["state"], ended["exit_status"], ended["cause"]) == ("ok", 0, None)
    assert [run.result(rank)["state"] for rank in (0, 1)] == ["ok", "ok"]
    steps = [event for event in run.events if event["event"] == "step"]
    assert [(step["rank"], step["loss"]) for step in steps] == [(0, 2.5)]


def test_the_events_of_a_rank_keep_their_order_among_those_of_others(run: AgentRun) -> None:
    count = 300
    actions = [sends("step", step=step) for step in range(count)]
    run({rank: [*actions, FINISHED] for rank in range(3)})
    for rank in range(3):
        own = [e["step"] for e in run.events if e["event"] == "step" and e["rank"] == rank]
        assert own == list(range(count))


def test_what_a_rank_prints_is_in_its_log_alone(run: AgentRun) -> None:
    run({0: [["print", "chatter"], FINISHED]})
    assert (run.directory / "logs" / "rank0.log").read_text() == "chatter\n"
    assert "chatter" not in json.dumps(run.events)


def test_lines_that_are_no_events_are_kept_from_the_stream(run: AgentRun) -> None:
    agent = run.start({0: [["raw", "oops\n[1]\n"], sends("message", text="hello"), FINISHED]})
    out, err = agent.communicate(timeout=PATIENCE_S)
    assert [json.loads(line)["event"] for line in out.splitlines()] == [
        *("message", "finished", "rank_exited", "ended")
    ]
    assert "oops" in err


def test_a_line_of_brackets_does_not_end_the_agent(run: AgentRun) -> None:
    deep = "[" * 200_000 + "\n"
    run({0: [["raw", deep], ["raw", '{"event":' * 60_000 + "\n"], FINISHED]})
    assert run.events[-1]["state"] == "ok"


def test_a_rank_knows_who_it_is_and_nothing_of_another_launcher(run: AgentRun) -> None:
    stale = {
        "RANK": "17",
        "MASTER_ADDR": "elsewhere",
        "OMPI_COMM_WORLD_RANK": "17",
        "SLURM_PROCID": "17",
        "TORCHELASTIC_RUN_ID": "old",
        "KEPT": "yes",
    }
    run({0: [["environment", "env0"], FINISHED], 1: [FINISHED]}, environment=stale)
    seen = json.loads((run.folder / "env0").read_text())
    identity = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert {name: seen[name] for name in identity} == identity
    assert seen["KEPT"] == "yes"
    assert not set(stale) & set(seen) - {"RANK", "KEPT"}


def test_a_rank_that_exits_takes_the_others_along_and_is_named(run: AgentRun) -> None:
    ended = run({0: [FOREVER], 1: [["print", "last words"], ["wait", "pid0"], ["exit", 7]]})
    assert (ended["state"], ended["exit_status"]) == ("failed", 1)
    assert "rank 1" in ended["cause"]
    assert "exit status 7" in ended["cause"]
    assert "last words" in ended["cause"]
    assert str(run.directory / "logs" / "rank1.log") in ended["cause"]
    assert run.result(1)["code"] == 7
    assert (run.result(0)["state"], run.result(0)["signal"]) == ("stopped", END_AT_ONCE)
    assert not alive(run.pid("pid0"))


def test_a_rank_that_exits_with_0_before_its_work_is_done_has_failed(run: AgentRun) -> None:
    ended = run({0: [FOREVER], 1: [["exit", 0]]})
    assert ended["state"] == "failed"
    assert "rank 1" in ended["cause"]
    assert "not finished" in ended["cause"]


def test_a_crash_after_the_work_is_a_failure(run: AgentRun) -> None:
    ended = run({0: [FINISHED, ["die", signal.SIGSEGV]]})
    assert ended["state"] == "failed"
    assert "SIGSEGV" in ended["cause"]
    assert "after it had finished" in ended["cause"]


def test_a_killed_rank_wins_over_a_peer_that_reports_the_broken_connection(run: AgentRun) -> None:
    os.mkfifo(run.folder / "connection")
    ended = run(
        {
            0: [
                ["wait_for_disconnection", "connection"],
                sends("failed", error="RuntimeError", message="Connection closed by peer"),
                ["exit", 1],
            ],
            1: [["connect", "connection"], ["die", signal.SIGKILL]],
        }
    )
    assert "rank 1" in ended["cause"]
    assert "out of memory" in ended["cause"]
    assert "signal 9" in ended["cause"]


def test_the_rank_that_reports_first_wins_over_one_that_aborts_after_it(run: AgentRun) -> None:
    ended = run(
        {
            0: [["wait", "reported"], ["die", signal.SIGABRT]],
            1: [
                sends("failed", error="ValueError", message="bad row"),
                ["touch", "reported"],
                ["sleep", 0.2],
                ["exit", 1],
            ],
        }
    )
    assert ended["cause"].startswith("rank 1 on ")
    assert "ValueError: bad row" in ended["cause"]


def test_of_two_reports_the_earlier_is_named_whatever_order_they_arrive_in(run: AgentRun) -> None:
    ended = run(
        {
            0: [sends("failed", error="Late", message="x", time=2000.0), ["exit", 1]],
            1: [sends("failed", error="Early", message="x", time=1000.0), ["exit", 1]],
        },
        grace=5,
    )
    # Rank 1 may have been ended before it could report: then rank 0 is all that is known.
    reported = {event["rank"] for event in run.events if event["event"] == "failed"}
    assert f"rank {max(reported)}" in ended["cause"]


def test_an_error_for_the_user_is_shown_as_it_is_with_its_exit_status(run: AgentRun) -> None:
    failed = sends(
        "failed", error="DataError", message="row 3 is empty", for_user=True, exit_status=2
    )
    ended = run({0: [["print", "noise"], failed, ["exit", 2]]})
    assert (ended["cause"], ended["exit_status"]) == ("row 3 is empty", 2)


def test_a_rank_that_does_not_end_at_once_is_killed(run: AgentRun) -> None:
    ended = run(
        {
            0: [["ignore", END_AT_ONCE], ["touch", "deaf"], FOREVER],
            1: [["wait", "deaf"], ["exit", 3]],
        },
        grace=0.3,
    )
    assert "rank 1" in ended["cause"]
    assert (run.result(0)["state"], run.result(0)["signal"]) == ("stopped", signal.SIGKILL)


def test_a_rank_that_reported_its_failure_but_hangs_is_killed(run: AgentRun) -> None:
    failed = sends("failed", error="RuntimeError", message="hung teardown")
    ended = run({0: [failed, FOREVER]}, grace=0.3)
    assert "hung teardown" in ended["cause"]
    assert run.result(0)["signal"] == signal.SIGKILL


def test_helpers_of_a_rank_end_with_it(run: AgentRun) -> None:
    run({0: [["helper", "helper0"], FINISHED], 1: [["helper", "helper1"], ["wait", "helper0"]]})
    until(lambda: not alive(run.pid("helper0")), "the end of the helper of a finished rank")
    until(lambda: not alive(run.pid("helper1")), "the end of the helper of a failed rank")


def test_a_rank_that_stays_behind_is_ended_after_the_collective_timeout(run: AgentRun) -> None:
    ended = run({0: [FINISHED], 1: [FOREVER]}, timeout=0.4, grace=0.2)
    assert ended["state"] == "failed"
    assert "rank 1" in ended["cause"]
    assert "collective_timeout_s" in ended["cause"]
    assert not alive(run.pid("pid1"))


def at(doing: str) -> list[Any]:
    return sends("progress", doing=doing)


def test_a_stopped_rank_ends_the_run_and_each_ranks_doing_is_named(run: AgentRun) -> None:
    ended = run(
        {0: [at("step 3, update"), FOREVER], 1: [at("step 2, update"), ["die", signal.SIGSTOP]]},
        timeout=2.8,
        grace=0.2,
    )
    assert ended["state"] == "failed"
    assert "neither worked nor reported anything for 3 s" in ended["cause"]
    assert "launch.collective_timeout_s" in ended["cause"]
    assert "rank 0: step 3, update" in ended["cause"]
    assert "rank 1: step 2, update; stopped (state T in /proc)" in ended["cause"]
    assert not alive(run.pid("pid0"))
    assert not alive(run.pid("pid1"))
    assert "progress" not in {event["event"] for event in run.events}


def test_a_rank_that_fails_because_another_is_stopped_names_both(run: AgentRun) -> None:
    failed = sends("failed", error="RuntimeError", message="Timed out waiting for recv")
    ended = run(
        {
            0: [at("step 3, update"), ["wait_for_stop", "pid1"], failed, FOREVER],
            1: [at("step 2, update"), ["die", signal.SIGSTOP]],
        },
        grace=0.5,
    )
    assert "rank 0 on " in ended["cause"]
    assert "Timed out waiting for recv" in ended["cause"]
    assert "rank 1: step 2, update; stopped (state T in /proc)" in ended["cause"]


def test_ranks_that_report_or_work_may_take_their_time(run: AgentRun) -> None:
    """One saves, one has a single micro-batch for longer than the limit; both go on."""
    ended = run(
        {
            0: [at("start-up"), ["report", 4], FINISHED],
            1: [at("step 1, forward and backward"), ["work", 4], FINISHED],
        },
        timeout=2.8,
        grace=0.2,
    )
    assert ended["state"] == "ok", ended["cause"]


def test_a_rank_that_closes_its_events_is_still_watched(run: AgentRun) -> None:
    ended = run({0: [["close_events", None], ["sleep", 0.5], ["exit", 4]]})
    assert "exit status 4" in ended["cause"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_agent_cancels_the_run(run: AgentRun, signum: int, status: int) -> None:
    agent = run.start(
        {0: [["touch", "up0"], FOREVER], 1: [["on_term_exit", 0], ["touch", "up1"], FOREVER]}
    )
    run.wait("up0")
    run.wait("up1")
    agent.send_signal(signum)
    ended = run.end()
    assert (ended["state"], ended["exit_status"]) == ("cancelled", status)
    assert [run.result(rank)["state"] for rank in (0, 1)] == ["cancelled", "cancelled"]
    assert not alive(run.pid("pid0"))
    assert not alive(run.pid("pid1"))


def stops(step: int) -> list[object]:
    return ["on_term_stop", {"step": step, "checkpoint": "/run/checkpoints/step-00000007"}]


def test_ranks_that_stop_with_a_checkpoint_end_the_run_with_a_status_of_its_own(
    run: AgentRun,
) -> None:
    agent = run.start({rank: [stops(7), ["touch", f"up{rank}"], FOREVER] for rank in (0, 1)})
    run.wait("up0")
    run.wait("up1")
    agent.send_signal(signal.SIGTERM)
    ended = run.end()
    assert (ended["state"], ended["exit_status"]) == ("stopped", STOPPED)
    assert "step 7" in ended["cause"]
    assert "/run/checkpoints/step-00000007" in ended["cause"]
    assert [run.result(rank)["state"] for rank in (0, 1)] == ["stopped", "stopped"]


def test_a_rank_that_fails_while_others_stop_is_the_cause(run: AgentRun) -> None:
    agent = run.start(
        {
            0: [["ignore", signal.SIGTERM], ["touch", "up0"], FOREVER],
            1: [["on_term_exit", 9], ["touch", "up1"], FOREVER],
        },
        grace=60,
    )
    run.wait("up0")
    run.wait("up1")
    agent.send_signal(signal.SIGTERM)
    ended = run.end()
    assert (ended["state"], ended["exit_status"]) == ("cancelled", 143)
    assert run.result(1)["code"] == 9
    assert run.result(0)["signal"] == END_AT_ONCE


def test_a_second_signal_kills_without_waiting_for_the_grace_time(run: AgentRun) -> None:
    agent = run.start({0: [["ignore", signal.SIGTERM], ["touch", "up"], FOREVER]}, grace=3600)
    run.wait("up")
    agent.send_signal(signal.SIGTERM)
    time.sleep(0.8)  # two signals in one moment count as one
    assert alive(run.pid("pid0"))
    agent.send_signal(signal.SIGTERM)
    assert run.end()["state"] == "cancelled"
    assert run.result(0)["signal"] == signal.SIGKILL


def test_a_signal_after_a_failure_does_not_hide_it(run: AgentRun) -> None:
    agent = run.start(
        {
            0: [["ignore", END_AT_ONCE], ["touch", "deaf"], FOREVER],
            1: [["wait", "deaf"], ["exit", 3]],
        },
        grace=2,
    )
    until(lambda: not alive(run.pid("pid1")) and (run.folder / "deaf").exists(), "the failure")
    time.sleep(0.3)
    agent.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended["state"] == "failed"
    assert "exit status 3" in ended["cause"]


def test_an_agent_that_is_killed_leaves_no_rank(run: AgentRun) -> None:
    agent = run.start(
        {0: [["touch", "up0"], FOREVER], 1: [["ignore", signal.SIGTERM], ["touch", "up1"], FOREVER]}
    )
    run.wait("up0")
    run.wait("up1")
    agent.kill()
    agent.wait()
    until(lambda: not alive(run.pid("pid0")) and not alive(run.pid("pid1")), "the ranks' end")


def test_a_follower_that_has_gone_does_not_stop_the_run(run: AgentRun) -> None:
    agent = run.start({0: [["wait", "go"], *[sends("step", step=1)] * 10, FINISHED]})
    assert agent.stdout is not None
    agent.stdout.close()
    (run.folder / "go").touch()
    assert agent.wait(timeout=PATIENCE_S) == 0
    assert run.result(0)["state"] == "ok"


def test_a_signal_is_heard_while_the_follower_does_not_read(run: AgentRun) -> None:
    text = "x" * 10_000
    agent = run.start({0: [*[sends("message", text=text)] * 50, ["touch", "sent"], FOREVER]})
    run.wait("sent")  # more than a pipe holds, and nobody has read it
    agent.send_signal(signal.SIGTERM)
    until(lambda: not alive(run.pid("pid0")), "the end of the rank")
    assert run.end()["state"] == "cancelled"


def test_results_of_an_earlier_run_are_not_mistaken_for_this_one(run: AgentRun) -> None:
    stale = run.directory / "ranks" / "rank0.json"
    stale.parent.mkdir(parents=True)
    stale.write_text('{"state": "ok"}')
    run.start({0: [["touch", "up"], FOREVER]})
    run.wait("up")
    assert not stale.exists()


def test_an_agent_does_not_make_a_moved_folder_again(run: AgentRun) -> None:
    run.start({0: [["touch", "up"], ["wait", "moved"], FINISHED]})
    run.wait("up")
    run.directory.rename(run.folder / "elsewhere")
    (run.folder / "moved").touch()
    assert run.end()["state"] == "ok"
    assert not run.directory.exists() and "is not this run's folder any more" in run.err


def test_the_time_of_a_signal_does_not_follow_a_clock_that_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000, 0, -10))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    received: list[tuple[int, float]] = []
    collect_signals(received)
    try:
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    (_, first), (_, second) = received
    assert 0 <= second - first < 5


def test_an_invalid_job_file_is_reported_as_an_event(run: AgentRun, tmp_path: Path) -> None:
    job_file = tmp_path / "job.json"
    job_file.write_text("{}")
    run.agent = subprocess.Popen(
        [sys.executable, FAKE_AGENT, "unused", "--job", str(job_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended = run.end()
    assert ended["state"] == "failed"
    assert str(job_file) in ended["cause"]


def test_a_request_that_came_before_the_ranks_starts_none(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    job = make_job(
        name="t", run_directory=str(tmp_path), run_file="", backend="cpu", strategy="single",
        devices=2, rendezvous="file:///nowhere",
    )  # fmt: skip
    outbox = Outbox(writer)
    asked = [(int(signal.SIGTERM), time.monotonic())]
    supervisor = Supervisor(
        job, node_rank=0, hostname="here", rank_argv=("/nowhere/program",),
        rank_environment=lambda local_rank: {}, nodes=Nodes(job, outbox), signals=asked,
    )  # fmt: skip
    assert supervisor.run() == 128 + signal.SIGTERM
    outbox.close()
    os.close(writer)
    with os.fdopen(reader) as events:
        assert [json.loads(line)["state"] for line in events] == ["cancelled"]
