"""The local launcher: what it plans, and what it leaves behind when things die."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anygauge.interface import AnygaugeError, Job, Plan, RunFileError
from anygauge.launch.run_directory import claim
from anygauge_launchers.local import Local, LocalJob
from tests.helpers.jobs import make_job
from tests.helpers.options import render
from tests.helpers.processes import alive, until
from tests.launch.fake_cli import fake_plan
from tests.launch.fakes import FINISHED, FOREVER, read_pid, sends, write_script


def job(directory: Path, nodes: int = 1) -> Job:
    return make_job(run_directory=directory, nodes=nodes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a folder $HOME 'with' spaces"
    path.mkdir()
    return path


@pytest.fixture
def started() -> Iterator[list[LocalJob]]:
    jobs: list[LocalJob] = []
    yield jobs
    for one in jobs:
        for _ in range(3):
            one.cancel()
        one.wait()


def plan_of(folder: Path, ranks: dict[int, list[object]], grace_s: float = 0.5) -> Plan:
    script = write_script(folder, ranks)
    return fake_plan(str(script), str(folder / "run"), len(ranks), grace_s)


def test_rendering_writes_nothing_and_names_every_file_and_argument(folder: Path) -> None:
    run = folder / "run"
    plan = render("local", job(run), {})
    assert not run.exists()
    (file,) = plan.files
    assert file.path == str(run / "job.json")
    assert json.loads(file.text)["run_directory"] == str(run)
    (process,) = plan.processes
    assert process.host is None
    assert process.argv == (
        *(sys.executable, "-m", "anygauge.launch.agent"),
        *("--job", str(run / "job.json"), "--node-rank", "0", "--grace", "5"),
    )
    (process,) = render("local", job(run), {"grace_s": 1.5}).processes
    assert process.argv[-2:] == ("--grace", "1.5")
    with pytest.raises(RunFileError, match=r"launch\.nodes is 2"):
        render("local", job(run, nodes=2), {})


def test_a_job_runs_where_paths_have_spaces(folder: Path, started: list[LocalJob]) -> None:
    running = Local().submit(plan_of(folder, {0: [sends("step", step=1), FINISHED]}))
    started.append(running)
    events = [event["event"] for event in running.events()]
    assert events == ["step", "finished", "rank_exited", "ended"]
    assert running.wait() == 0
    assert Job.load(folder / "run" / "job.json").run_directory == str(folder / "run")
    assert [path.name for path in (folder / "run").glob(".*")] == [".lock"]


def test_the_agent_learns_which_lock_the_folder_had(folder: Path, started: list[LocalJob]) -> None:
    with claim(folder / "run") as lock:
        (folder / "run").rename(folder / "moved")
        with claim(folder / "run"):  # a start of the same name, before the agent begins
            running = Local().submit(replace(plan_of(folder, {0: [FINISHED]}), held=(lock,)))
            started.append(running)
            (ended,) = running.events()
    assert ended["state"] == "failed" and "another run was started under its name" in ended["cause"]


def test_lines_that_are_no_events_go_to_the_agents_log(
    folder: Path, started: list[LocalJob]
) -> None:
    script = folder / "agent.py"
    script.write_text("print('stray'); print('[1]'); print('{\"event\": \"message\"}')")
    plan = plan_of(folder, {0: []})
    (process,) = plan.processes
    stray = type(process)(node_rank=0, argv=(sys.executable, str(script)))
    running = Local().submit(Plan(files=plan.files, processes=(stray,)))
    started.append(running)
    assert [event["event"] for event in running.events()] == ["message"]
    assert (folder / "run" / "logs" / "agent0.log").read_text() == "stray\n[1]\n"


def test_a_killed_agent_ends_the_stream(folder: Path, started: list[LocalJob]) -> None:
    running = Local().submit(plan_of(folder, {0: [["touch", "up"], FOREVER]}))
    started.append(running)
    until((folder / "up").exists, "the rank")
    # Stopped, so that it cannot end by itself before the third.
    os.kill(running._agent.pid, signal.SIGSTOP)
    for _ in range(3):
        running.cancel()
    assert "ended" not in [event["event"] for event in running.events()]
    assert running.wait() == 128 + signal.SIGKILL
    until(lambda: not alive(read_pid(folder / "pid0")), "the end of the rank")


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    (folder / "run").write_text("a file, not a folder")
    with pytest.raises(AnygaugeError, match="cannot start the run in"):
        Local().submit(plan_of(folder, {0: []}))
