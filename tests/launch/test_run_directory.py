"""Which folder a run gets: a start that never took a step has no claim to its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.cli import run as command
from anygauge.interface import ATTEMPTS, AnygaugeError, Job
from anygauge.launch.request import read_request
from anygauge.launch.run_directory import (
    choose_run_directory,
    clear_for_start,
    lock_folder,
    logs_of,
    remove_unaccepted,
    took_no_step,
)
from anygauge.registry import Registry
from anygauge.training.checkpoints.identity import identity_of_file
from anygauge.training.setup import accept_start
from tests.helpers.checkpoints import RECORD, write
from tests.helpers.jobs import make_job
from tests.helpers.plans_from_options import render
from tests.helpers.runs import anygauge, hashes, run_file

TIMEOUT_S = 200


def failed_start(folder: Path) -> Path:
    """What is left of a run that failed while its ranks started."""
    for name in (
        *("run.yaml", "run.json", "job.json", "environment-node0.json", "versions.json"),
        *("rendezvous", "logs/agent0.log", "logs/rank0.log", "ranks/rank0.json"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("why it failed" if "/" in name else "{}")
    (folder / ".lock").touch()
    (folder / "metrics.jsonl").write_text(
        '{"time": 1, "system": {}}\n{"step": 0, "eval_loss": 2}\n'
    )
    return folder


def test_a_start_without_a_step_is_used_again(tmp_path: Path) -> None:
    folder = failed_start(tmp_path / "my-run")
    assert took_no_step(folder)
    for resume in (False, True):
        assert choose_run_directory(folder, resume=resume) == folder
    assert (folder / "logs/rank0.log").exists(), "looking removes nothing"
    with lock_folder(folder):
        clear_for_start(folder)
        assert [path.name for path in folder.iterdir()] == [".lock"]


LAUNCHED = '{"launcher": "kubernetes", "record": {}, "logs": "kubectl logs"}'
MORE: dict[str, Callable[[Path], object]] = {
    "a step": lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n'),
    "half a line": lambda folder: (folder / "metrics.jsonl").write_text('{"step": '),
    "a checkpoint": lambda folder: (folder / "checkpoints").mkdir(),
    "a result": lambda folder: (folder / "adapter").mkdir(),
    "a report": lambda folder: (folder / "report.json").write_text("{}"),
    "notes": lambda folder: (folder / "notes.txt").write_text("mine"),
    "a link": lambda folder: (folder / "tensorboard").symlink_to(folder.parent),
    "a link to a file": lambda folder: (folder / "variables.json").symlink_to("/etc/hostname"),
    "a job elsewhere": lambda folder: (folder / "launched.json").write_text(LAUNCHED),
    "an unknown job": lambda folder: (folder / "launched.json").write_text("[]"),
}


@pytest.mark.parametrize("more", MORE)
def test_a_folder_that_may_hold_more_is_left(more: str, tmp_path: Path) -> None:
    folder = failed_start(tmp_path / "my-run")
    MORE[more](folder)
    before = sorted(folder.rglob("*"))
    assert not took_no_step(folder)
    assert choose_run_directory(folder, resume=False) == tmp_path / "my-run-2"
    with lock_folder(folder), pytest.raises(AnygaugeError, match="taken by another run"):
        clear_for_start(folder)
    (folder / "rendezvous").touch()  # which the claim takes away
    assert sorted(folder.rglob("*")) == before


def test_a_run_that_is_starting_keeps_its_name(tmp_path: Path) -> None:
    folder = failed_start(tmp_path / "my-run")
    with lock_folder(folder):
        assert choose_run_directory(folder, resume=False) == tmp_path / "my-run-2"
        assert took_no_step(folder, locked=True)
    assert choose_run_directory(folder, resume=False) == folder


def resuming_job(folder: Path, number: int = 1) -> Job:
    return make_job(
        run_directory=folder, id=str(number), run_file=f"{folder}/run.json"
    ).as_attempt()


def test_a_start_that_resumes_changes_nothing_before_it_is_accepted(tmp_path: Path) -> None:
    folder = failed_start(tmp_path / "my-run")
    MORE["a step"](folder)
    before = hashes(folder)
    for number in (1, 2):  # the first of them is refused
        job = resuming_job(folder, number)
        assert job.start_directory == folder
        clear_for_start(folder, job)
        assert job.start_directory == folder / ATTEMPTS / str(number)
        (job.start_directory / "run.json").write_text("new")
    assert [path.name for path in (folder / ATTEMPTS).iterdir()] == ["2"]
    assert {name: found for name, found in hashes(folder).items() if name in before} == before
    accept_start(job)
    remove_unaccepted(folder)
    assert (folder / "run.json").read_text() == "new" == job.resolved_run.read_text()
    assert (folder / "logs/rank0.log").read_text() == "why it failed"


def test_the_logs_of_a_refused_start_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = failed_start(tmp_path / "my-run")
    assert logs_of(folder) == folder / "logs"
    refused = folder / ATTEMPTS / "1" / "logs"
    refused.mkdir(parents=True)
    (refused / "rank0.log").write_text("belongs to another run")
    (folder / "logs/slurm.log").write_text("srun: ended")
    assert logs_of(folder) == refused
    assert command(["job", "logs", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"==> {refused / 'rank0.log'}\nbelongs to another run\n" in shown
    assert "srun: ended" in shown and "why it failed" not in shown


@pytest.mark.slow
def test_after_a_start_that_failed_the_next_run_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of which one bit has turned: ranks alone sum its files."""
    single = {"strategy": {"name": "single"}}
    file = run_file(tmp_path, train={"steps": 1}, **single)
    identity = identity_of_file(read_request(file, [], {}, need_device=False).run)
    monkeypatch.setitem(RECORD, "identity", identity)
    turned = write(tmp_path / "old/checkpoints/step-00000003")
    content = bytearray((turned / "state-00001.safetensors").read_bytes())
    content[-1] ^= 1
    (turned / "state-00001.safetensors").write_bytes(content)
    failed = anygauge(["train", file, "--resume", turned], timeout_s=TIMEOUT_S)
    folder = tmp_path / "out" / "tiny"
    assert failed.returncode != 0
    assert f"run: {folder}\n" in failed.stdout
    assert f"logs: {folder / 'logs'}" in failed.stderr and (folder / "logs/rank0.log").exists()
    good = anygauge(["train", file], timeout_s=TIMEOUT_S)
    assert good.returncode == 0, good.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert "SHA-256" in failed.stderr
    assert "SHA-256" not in (folder / "logs/rank0.log").read_text()


REMOTE = {"hosts": ["one"], "python": "/usr/bin/python3"}


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        *(("ssh", REMOTE), ("mpi", REMOTE)),
        *(("slurm", {"allocation": where}) for where in ("new", "current")),
    ],
)
def test_launchers_write_to_the_folder_of_the_start(
    launcher: str, options: dict[str, object], tmp_path: Path
) -> None:
    job = resuming_job(tmp_path)
    plan = render(launcher, job, options)
    (job_file,) = [Path(file.path) for file in plan.files if file.path.endswith("job.json")]
    assert job_file == Path(job.run_file).with_name("job.json")
    (process,) = plan.processes
    assert str(job_file) in (*process.argv, *process.arguments)


def test_a_submission_to_slurm_replaces_nothing_that_ranks_have_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = failed_start(tmp_path / "my-run")
    MORE["a step"](folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    job = resuming_job(folder)
    with lock_folder(folder):
        clear_for_start(folder, job)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        launcher = Registry.load().launcher("slurm")()
        running = launcher.submit(render("slurm", job, {"allocation": "new"}))
    assert running.record == {"job": "7", "offset": 0}
    assert {path: path.read_bytes() for path in before} == before
    new = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    new -= {str(path.relative_to(folder)) for path in before}
    assert new == {f"{ATTEMPTS}/1/job.json", "slurm.sh", "variables.json"}
