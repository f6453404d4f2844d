"""``anygauge launch`` and ``anygauge job``: plans to read, and jobs that go on by themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anygauge.interface import Job
from tests.helpers.runs import called, run_file

# Stand-ins for Slurm's commands: they keep a job's state in a file. What Slurm itself does is
# tested on an emulated cluster.
SBATCH = '#!/bin/sh\necho "$@" > "$SLURM_TEST/asked"; echo PENDING > "$SLURM_TEST/state"; echo 42\n'
SCONTROL = '#!/bin/sh\necho "JobId=42 JobState=$(cat "$SLURM_TEST/state") Reason=Resources"\n'
SCANCEL = '#!/bin/sh\necho "$@" >> "$SLURM_TEST/cancelled"; echo CANCELLED > "$SLURM_TEST/state"\n'


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_TEST": str(tmp_path)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run file for two machines of Slurm."""
    return run_file(tmp_path, launch={"launcher": "slurm", "nodes": 2})


@pytest.fixture
def folder(path: Path, slurm: dict[str, str]) -> Path:
    """Of a job that was submitted and left."""
    done = called(["launch", path, "--detach"], environment=slurm)
    assert done.returncode == 0, done.stderr
    assert f"anygauge job follow {path.parent / 'out' / 'tiny'}" in done.stdout
    return path.parent / "out" / "tiny"


def test_a_plan_is_written_for_reading_without_secrets(tmp_path: Path) -> None:
    path = run_file(
        tmp_path,
        launch={"launcher": "ssh", "nodes": 2, "options": {"hosts": ["node1", "node2"]}},
        environment={"HF_TOKEN": "hf_xyz"},
    )
    folder = tmp_path / "plan"
    done = called(["launch", path, "--render", folder])
    assert done.returncode == 0, done.stderr
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"job.json", "run.json", "run.yaml", "plan.json"}
    assert not any("hf_xyz" in entry.read_text() for entry in folder.iterdir())
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["launcher"], plan["tested_on"]) == ("ssh", "real")
    assert [process["argv"][0] for process in plan["processes"]] == ["ssh", "ssh"]
    assert "the same command without --render" in done.stdout
    job = Job.load(folder / "job.json")
    assert (job.launch.nodes, job.token, job.environment) == (2, "", {})
    assert job.launch.pass_environment == ["HF_TOKEN"]
    assert not (tmp_path / "out").exists()


def test_jobs_elsewhere_need_the_name_of_their_backend(tmp_path: Path) -> None:
    path = run_file(tmp_path, backend="auto", launch={"launcher": "slurm", "nodes": 2})
    done = called(["launch", path, "--dry-run"])
    assert done.returncode == 2
    assert "backend: auto looks at this machine" in done.stderr and "--backend" in done.stderr
    assert called(["launch", path, "--dry-run", "--backend", "cpu"]).returncode == 0


def test_a_job_is_submitted_left_seen_again_and_cancelled(
    tmp_path: Path, slurm: dict[str, str], folder: Path
) -> None:
    assert str(folder / "slurm.sh") in (tmp_path / "asked").read_text()
    assert (folder / "job.json").stat().st_mode & 0o777 == 0o600
    assert len(Job.load(folder / "job.json").token) == 32

    assert called(["job", "cancel", folder], environment=slurm).returncode == 0
    assert (tmp_path / "cancelled").read_text() == "42\n"
    followed = called(["job", "follow", folder], environment=slurm)
    assert followed.returncode == 143, followed.stdout + followed.stderr
    assert "slurm job 42: the job was cancelled (Resources)" in followed.stdout + followed.stderr


def test_what_the_coordinator_wrote_is_what_is_followed(
    tmp_path: Path, slurm: dict[str, str], folder: Path
) -> None:
    (tmp_path / "state").write_text("COMPLETED")
    events = [
        {"event": "message", "text": "hello from rank 0", "level": "info"},
        {"event": "ended", "state": "lost", "exit_status": 69, "cause": "node 1 is lost"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    followed = called(["job", "follow", folder], environment=slurm)
    assert "hello from rank 0" in followed.stdout
    assert followed.returncode == 69 and "node 1 is lost" in followed.stderr


GONE = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
AWAY = "#!/bin/sh\necho 'no contact' >&2; exit 1\n"


@pytest.mark.parametrize(
    ("scontrol", "event", "status", "said"),
    [
        (SCONTROL, None, 0, "slurm job 42: pending (Resources)\n"),
        (GONE, None, 1, "slurm job 42: Slurm does not know it (any more)\n"),
        (GONE, {"event": "ended", "state": "ok"}, 0, "slurm job 42: ended (ok); Slurm has "),
        (GONE, {"event": "message", "text": "began"}, 1, "slurm job 42: Slurm does not know"),
        (AWAY, None, 1, "slurm job 42: unreachable (no contact)\n"),
    ],
)
def test_the_status_of_a_job_that_may_be_gone(
    scontrol: str, event: dict[str, str] | None, status: int, said: str,
    tmp_path: Path, slurm: dict[str, str], folder: Path,
) -> None:  # fmt: skip
    (tmp_path / "bin" / "scontrol").write_text(scontrol)
    if event is not None:
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    done = called(["job", "status", folder], environment=slurm)
    assert done.returncode == status and done.stdout.startswith(said)
    assert ("no agent reported how the job ended" in done.stderr) == ("does not know" in said)


def test_a_refusal_of_sbatch_is_quoted(tmp_path: Path, slurm: dict[str, str], path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpuu' >&2; exit 1\n"
    )
    done = called(["launch", path], environment=slurm)
    assert done.returncode == 1
    assert "sbatch refused the job: sbatch: error: invalid partition" in done.stderr


def test_without_slurm_its_absence_is_named(tmp_path: Path, path: Path) -> None:
    done = called(["launch", path], environment={"PATH": str(tmp_path)})
    assert done.returncode == 1 and "sbatch is not installed here" in done.stderr


def test_logs_are_shown(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("one\ntwo\nthree\n")
    done = called(["job", "logs", tmp_path, "--lines", "2"])
    shown = f"==> {tmp_path}/logs/rank0.log\ntwo\nthree\n"
    assert done.stdout == shown
    (tmp_path / "logs" / "rank1.log").touch()  # nothing was printed
    record = {"launcher": "far", "record": {}, "logs": "far logs 7"}
    (tmp_path / "launched.json").write_text(json.dumps(record))
    elsewhere, _, here = called(["job", "logs", tmp_path, "--lines", "2"]).stdout.partition("\n")
    assert elsewhere.endswith("what the first machine printed: far logs 7") and here == shown
