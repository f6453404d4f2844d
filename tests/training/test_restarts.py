"""A rank is killed, and the run resumes by itself from the newest checkpoint; two machines, too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.launch.run_directory import write_run
from tests.helpers.child_processes import begin, begin_agents, end, until
from tests.helpers.jobs import make_job
from tests.helpers.runs import run_file

STEPS = 80


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    path = run_file(
        tmp_path,
        strategy={"name": "ddp"},
        train={"steps": STEPS},
        checkpoint={"every": 5},
        launch={"devices": 2, "max_restarts": 1},
    )
    run = tmp_path / "out" / "tiny"
    process = begin("train", path)
    until((run / "checkpoints" / "step-00000005").exists, "a checkpoint")
    log = (run / "logs" / "supervisor.log").read_text()
    pid = int(log.partition("rank 1 started, process ")[2].split()[0])
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}"
    assert "rank 1 on" in out and "was killed (signal 9, SIGKILL)" in out
    assert "starting again from the newest checkpoint (restart 1 of 1, launch.max_restarts)" in out
    assert "resumed: " in out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_ranks_meet_at_the_port_of_their_job_and_again_after_a_failure(tmp_path: Path) -> None:
    path = run_file(
        tmp_path,
        strategy={"name": "zero"},
        train={"steps": 12},
        checkpoint={"every": 3},
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    run = tmp_path / "run"
    run.mkdir()
    write_run(run / "run.json", load_run_file(path))
    job = make_job(
        name="two", run_directory=str(run), run_file=str(run / "run.json"), backend="cpu",
        strategy="zero", nodes=2, devices=1, rendezvous="file:///nowhere", token="of this job",
        max_restarts=1, environment={"GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    (run / "job.json").write_text(job.dump())
    agents = begin_agents(run / "job.json", 2)
    try:
        until((run / "checkpoints" / "step-00000003").exists, "a checkpoint")
        log = (run / "logs" / "agent0.log").read_text()
        pid = int(log.partition("rank 0 started, process ")[2].split()[0])
        os.kill(pid, signal.SIGKILL)
        out, err = agents[0].communicate(timeout=240)
        assert agents[0].returncode == 0, f"{out}\n{err}"
        assert agents[1].wait(timeout=60) == 0
    finally:
        end(*agents)
    assert "restart 1 of 1" in out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if "loss" in each] == list(range(1, 12 + 1))
