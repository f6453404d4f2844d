"""Runs of this machine: the command starts and supervises the ranks itself."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import AnygaugeError, Job, Plan, RunFileError
from anygauge.launch.local_run import LOG, LocalRun
from anygauge.launch.run_directory import lock_folder
from anygauge.util.processes import REPEATED_SIGNAL_S
from tests.helpers.child_processes import alive, until
from tests.helpers.jobs import make_job
from tests.helpers.plans_from_options import render
from tests.launch.fake_cli import FAKE_RANK
from tests.launch.fakes import FINISHED, FOREVER, read_pid, sends, write_script

Start = Callable[..., LocalRun]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a folder $HOME 'with' spaces"
    path.mkdir()
    return path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[LocalRun] = []

    def begin(lock: int, *actions: Any) -> LocalRun:
        script = write_script(folder, {0: list(actions)})
        argv = (sys.executable, FAKE_RANK, str(script))
        job = make_job(run_directory=folder / "run")
        started.append(LocalRun(job, lock=lock, grace_s=0.5, argv_of_rank=lambda *_: argv))
        return started[-1]

    yield begin
    for one in started:
        one.cancel()
        one.wait()


def test_there_is_nothing_to_write_and_nothing_to_submit(folder: Path) -> None:
    job = make_job(run_directory=folder / "run")
    assert render("local", job, {"grace_s": 1.5}) == Plan(grace_s=1.5)
    with pytest.raises(RunFileError, match=r"launch\.nodes is 2"):
        render("local", make_job(run_directory=folder / "run", nodes=2), {})


def test_a_job_runs_where_paths_have_spaces(folder: Path, start: Start) -> None:
    with lock_folder(folder / "run") as lock:
        running = start(lock, sends("step", step=1), FINISHED)
        events = [event["event"] for event in running.events()]
        assert events == ["step", "finished", "rank_exited", "ended"]
        assert running.wait() == 0 and running.state().has_ended
    home = folder / "run"
    assert Job.load(home / "job.json").run_directory == str(home)
    assert json.loads((home / "ranks" / "rank0.json").read_text())["state"] == "ok"
    log = (home / "logs" / LOG).read_text()
    assert "rank 0 started" in log and "rank 0 ended with code 0" in log


def test_a_folder_that_was_moved_before_the_ranks_started_is_told(
    folder: Path, start: Start
) -> None:
    with lock_folder(folder / "run") as lock:
        (folder / "run").rename(folder / "moved")
        with lock_folder(folder / "run"):  # a start of the same name
            (ended,) = start(lock, FINISHED).events()
    assert ended["state"] == "failed" and "another run was started under its name" in ended["cause"]


def test_a_run_that_is_asked_twice_kills_its_ranks(folder: Path, start: Start) -> None:
    with lock_folder(folder / "run") as lock:
        running = start(lock, ["ignore", 15], ["touch", "up"], FOREVER)
        until((folder / "up").exists, "the rank")
        running.cancel()
        time.sleep(2 * REPEATED_SIGNAL_S)
        assert not running.state().has_ended, "the rank is deaf, and its grace time long"
        running.cancel()
        (*_, ended) = running.events()
    assert ended["state"] == "cancelled" and running.wait() == 128 + 15
    assert not alive(read_pid(folder / "pid0"))


def test_a_folder_that_cannot_be_written_is_said(folder: Path, start: Start) -> None:
    with lock_folder(folder / "run") as lock:
        (folder / "run" / "logs").write_text("a file, not a folder")
        with pytest.raises(AnygaugeError, match="cannot start the run in"):
            start(lock)
