"""``anygauge launch --render``: a plan for Slurm that ``sbatch`` takes as it stands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.cli import run
from anygauge.interface import Job, RunFileError
from tests.helpers.runs import run_file

SLURM = {"launcher": "slurm", "nodes": 2, "pass_environment": ["HF_HOME"]}
OPTIONS = {
    **{"partition": "a b", "time": "1:00:00", "account": "it's #1", "gpus_per_node": 4},
    "extra": ["--mail-type", "END"],
}
LONG_OPTIONS = {
    *("job-name", "nodes", "ntasks-per-node", "chdir", "output", "export", "signal", "no-requeue"),
    *("requeue", "partition", "account", "time", "gpus-per-node", "exclusive", "mail-type"),
}

# In place of srun: which arguments it had, and which variables.
SRUN = (
    '#!/bin/sh\nfor word; do echo "$word"; done > "$OUT/asked"; env > "$OUT/environment"\nexit 0\n'
)
SCONTROL = "#!/bin/sh\necho node1\n"


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def rendered(folder: Path, plan: str = "plan", *more: str, **changes: Any) -> Path:
    path = run_file(folder, launch={**SLURM, "options": OPTIONS}, **changes)
    assert run(["launch", str(path), "--render", str(folder / plan), *more]) == 0
    return folder / plan


def directives(script: Path) -> list[str]:
    """The words of the ``#SBATCH`` lines, read as Slurm does: up to the first other command."""
    words: list[str] = []
    first, *lines = script.read_text().splitlines()
    assert first == "#!/bin/sh"
    for line in lines:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            words += shlex.split(line.removeprefix("#SBATCH "), comments=True)
    return words


def test_its_directives_are_sbatch_options(tmp_path: Path) -> None:
    words = directives(rendered(tmp_path) / "job.sbatch")
    assert {
        *("--job-name=tiny", "--nodes=2", "--partition=a b", "--time=1:00:00"),
        *("--account=it's #1", "--gpus-per-node=4", "--export=HF_HOME", "--exclusive"),
    } <= set(words)
    assert words[-2:] == ["--mail-type", "END"]
    for word in words[:-1]:
        assert word.startswith("--") and word[2:].split("=")[0] in LONG_OPTIONS, word


def test_all_that_it_needs_is_there_and_the_command_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rendered(tmp_path, "a plan's")
    names = {entry.name for entry in plan.iterdir()}
    assert names == {"job.json", "job.sbatch", "run.json", "run.yaml", "plan.json", ".gitignore"}
    submit = ["sbatch", str(plan / "job.sbatch")]
    assert f"to submit it: {shlex.join(submit)}\n" in capsys.readouterr().out
    described = json.loads((plan / "plan.json").read_text())
    assert described["operations"]["submit"] == described["processes"][0]["argv"] == submit
    for file in described["files"]:
        assert (plan / file["text"]).is_file(), file
    job = Job.load(plan / "job.json")
    assert len(job.token) == 32 and job.run_directory == str(tmp_path / "out" / "tiny")
    assert (plan / "job.json").stat().st_mode & 0o777 == 0o600
    assert job.token not in "".join(
        path.read_text() for path in plan.iterdir() if path.name != "job.json"
    )


def test_secrets_stay_in_the_shell_that_submits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rendered(tmp_path, environment={"GITHUB_PAT": "hush-hush", "LEVEL": "3"})
    assert "environment.GITHUB_PAT looks like a secret" in capsys.readouterr().out
    assert not any("hush-hush" in path.read_text() for path in plan.iterdir())
    assert "--export=HF_HOME,GITHUB_PAT" in directives(plan / "job.sbatch")
    job, written = Job.load(plan / "job.json"), yaml.safe_load((plan / "run.yaml").read_text())
    assert job.environment == written["environment"] == {"LEVEL": "3"}
    assert list(job.launch.pass_environment) == written["launch"]["pass_environment"]
    assert job.launch.pass_environment == ["HF_HOME", "GITHUB_PAT"]


def test_a_folder_that_is_taken_here_does_not_rename_the_job(tmp_path: Path) -> None:
    taken = tmp_path / "out" / "tiny"
    taken.mkdir(parents=True)
    (taken / "something").touch()
    job = Job.load(rendered(tmp_path) / "job.json")
    assert (job.run_directory, job.run_file) == (str(taken), str(taken / "run.json"))
    assert "tiny-2" not in job.dump()


def executed(script: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script as Slurm runs it on the first node, with stand-ins for Slurm's programs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        **{"PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(folder), "HF_HOME": "a b"},
        **{"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", **variables},
    }
    return subprocess.run(
        ["sh", str(script)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_batch_file_starts_the_agents_that_the_launcher_would(tmp_path: Path) -> None:
    odd = tmp_path / "it's $(odd)"
    odd.mkdir()
    plan = rendered(odd)
    done = executed(plan / "job.sbatch", odd)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    home = odd / "out" / "tiny"
    assert (home / "job.json").read_bytes() == (plan / "job.json").read_bytes()
    assert (home / "job.json").stat().st_mode & 0o777 == 0o600
    for name in ("run.json", "run.yaml"):
        assert (home / name).read_bytes() == (plan / name).read_bytes()
    words = (odd / "asked").read_text().splitlines()
    assert words[:2] == ["--nodes=2", "--ntasks=2"]
    assert "--export=ANYGAUGE_COORDINATOR,HF_HOME" in words and "--cpu-bind=none" in words
    begin = words.index("-m")
    assert words[begin + 1] == "anygauge.launch.agent"
    told = dict(zip(words[begin + 2 :: 2], words[begin + 3 :: 2], strict=False))
    assert told["--job"] == str(home / "job.json")
    assert (told["--node-rank"], told["--coordinator"]) == (
        "$SLURM_NODEID",
        "$ANYGAUGE_COORDINATOR:29400",
    )
    assert "ANYGAUGE_COORDINATOR=node1\n" in (odd / "environment").read_text()

    again = executed(plan / "job.sbatch", odd)
    assert again.returncode == 2
    assert f"{home} holds a run already" in (plan / "slurm.log").read_text()
    assert executed(plan / "job.sbatch", odd, SLURM_RESTART_COUNT="1").returncode == 0
    resumed = rendered(odd, "resumed", "--resume", "auto")
    assert executed(resumed / "job.sbatch", odd).returncode == 0
    staged = Path(Job.load(resumed / "job.json").run_file)
    assert staged.parent.parent == home / "attempts"
    words = (odd / "asked").read_text().splitlines()
    job_file = words[words.index("--job") + 1]
    assert job_file == str(staged.with_name("job.json"))
    assert Job.load(job_file).run_file == str(staged), "for the ranks to accept"
    assert (home / "job.json").read_bytes() == (plan / "job.json").read_bytes()
    for path in (staged, staged.with_name("run.yaml")):
        assert path.read_bytes() == (resumed / path.name).read_bytes()
    for name in ("run.json", "run.yaml"):
        assert (home / name).read_bytes() == (plan / name).read_bytes()
    assert executed(resumed / "job.sbatch", odd, SLURM_RESTART_COUNT="1").returncode == 0
    assert Job.load(job_file).token == Job.load(resumed / "job.json").token


def test_what_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    plan = rendered(tmp_path)
    with pytest.raises(RunFileError, match="line break"):
        rendered(tmp_path, "other", "--set", r'launch.options.partition="a\nb"')
    assert plan.is_dir() and not (tmp_path / "other").exists()
