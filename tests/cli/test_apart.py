"""Jobs on machines with files of their own: refused, shown, submitted, and found again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import Job
from tests.helpers.runs import anygauge, run_file
from tests.launchers.apart import Client, events_text

OPTIONS: dict[str, Any] = {
    "image": "x/y:1",
    "storage": {"claim": "runs"},
    "volumes": [{"claim": "data", "path": "/data"}],
}
LAUNCH = {"launcher": "kubernetes", "nodes": 2, "options": OPTIONS}
MADE = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "tiny", "namespace": "default", "uid": "u"},
}


def there(folder: Path, **changes: Any) -> Path:
    """A run file whose paths are those of the machines."""
    return run_file(
        folder,
        **{
            "data": {"train": {"path": "/data/rows.jsonl"}, "cache": "off"},
            "model": {"name": "/data/model"},
            "launch": LAUNCH,
            **changes,
        },
    )


def test_a_path_that_the_machines_do_not_have_is_named_with_its_line(tmp_path: Path) -> None:
    path = there(tmp_path, data={"train": {"path": "/home/me/rows.jsonl"}})
    done = anygauge(["launch", path, "--dry-run"])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "data.train.path: /home/me/rows.jsonl is not on the machines of the job" in done.stderr
    assert "which have /anygauge/runs, /data" in done.stderr and "tiny.yaml:" in done.stderr
    known = {**LAUNCH, "options": {**OPTIONS, "in_image": ["/home/me"]}}
    path = there(tmp_path, data={"train": {"path": "/home/me/rows.jsonl"}}, launch=known)
    assert anygauge(["launch", path, "--dry-run"]).returncode == 0


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"environment": {"HF_TOKEN": "hf_xyz"}}, "environment"),
        ({"launch": {**LAUNCH, "pass_environment": ["HF_TOKEN"]}}, "launch.pass_environment"),
    ],
)
def test_secrets_are_named_by_where_the_cluster_keeps_them(
    changes: dict[str, Any], where: str, tmp_path: Path
) -> None:
    done = anygauge(["launch", there(tmp_path, **changes), "--dry-run"])
    assert done.returncode == 2 and "hf_xyz" not in done.stdout + done.stderr
    assert f"{where}: HF_TOKEN looks like a secret" in done.stderr
    assert "launch.options.secrets" in done.stderr


def test_a_dry_run_shows_the_manifest_and_how_far_it_was_proven(tmp_path: Path) -> None:
    done = anygauge(["launch", there(tmp_path), "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "launcher kubernetes; proven: emulated (rendered jobs pass" in done.stdout
    assert "    | kind: JobSet\n" in done.stdout
    assert "by hand, cancel: kubectl --namespace default delete jobset tiny" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_plan_for_git_stands_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    done = anygauge(["launch", there(tmp_path), "--render", folder])
    assert done.returncode == 0, done.stderr
    assert {entry.name for entry in folder.iterdir()} == {
        *("job.json", "variables.json", "manifest.yaml", "run.yaml", "plan.json")
    }
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["operations"]["submit"][-1] == "manifest.yaml"
    assert "--from-file=job.json=job.json" in plan["operations"]["secret"]
    job = Job.load(folder / "job.json")
    assert (job.token, job.run_directory) == ("", "/anygauge/runs/tiny")
    assert yaml.safe_load(job.run_text)["model"]["name"] == "/data/model"


def test_a_network_that_the_backend_does_not_have_is_refused(tmp_path: Path) -> None:
    done = anygauge(["launch", there(tmp_path), "--dry-run", "--set", "launch.fabric=efa"])
    assert done.returncode == 2
    assert "launch.fabric: 'efa': this backend has auto, ethernet" in done.stderr
    pods = anygauge(
        ["launch", there(tmp_path), "--dry-run", "--backend", "cuda", "--set", "launch.fabric=efa"]
    )
    assert pods.returncode == 2
    assert "launch.fabric is efa, for which pods ask for vpc.amazonaws.com/efa" in pods.stderr


def test_a_job_is_submitted_left_followed_and_its_logs_are_found(tmp_path: Path) -> None:
    client = Client("kubectl", tmp_path, sys.executable)
    client.answer("create", "-")
    client.answer("create", "json", out=MADE)
    client.answer("patch", "secret")
    shell = {"PATH": client.path}
    folder = tmp_path / "out" / "tiny"
    done = anygauge(["launch", there(tmp_path), "--detach"], environment=shell)
    assert done.returncode == 0, done.stderr
    assert f"anygauge job follow {folder}" in done.stdout
    logs = anygauge(["job", "logs", folder], environment=shell)
    assert "on the job's own storage (logs/rankN.log); what the first machine pr" in logs.stdout
    assert "printed: kubectl --namespace default logs -f -l " in logs.stdout
    client.answer("get", "jobset", out={"status": {"conditions": []}})
    pod = {"metadata": {"name": "p"}, "status": {"phase": "Running"}}
    client.answer("get", "pods", out={"items": [pod]})
    name = json.loads((folder / "launched.json").read_text())["record"]["name"]
    assert name.startswith("tiny-")
    seen = anygauge(["job", "status", folder], environment=shell)
    assert seen.stdout == f"JobSet default/{name} runs\n"
    said = events_text(
        {"event": "message", "time": 1.0, "text": "hello from rank 0", "level": "info"},
        {"event": "ended", "time": 2.0, "state": "failed", "exit_status": 1, "cause": "rank 1 ..."},
    )
    client.forget()
    client.answer("logs", "p", out=said)
    client.answer("get", "pods", out={"items": [pod]})
    client.answer("get", "jobset", out={"status": {"conditions": []}})
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs"}
    client.answer("get", "jobset", out={"status": {"conditions": [failed]}})
    followed = anygauge(["job", "follow", folder], environment=shell)
    assert followed.returncode == 1
    assert "hello from rank 0" in followed.stdout and "rank 1 ..." in followed.stderr


def test_launchers_are_listed_with_what_they_can_and_their_proof() -> None:
    listed = json.loads(anygauge(["launchers", "--json"]).stdout)
    proven = {one["name"]: one["proven"] for one in listed}
    assert proven == {
        **dict.fromkeys(("local", "ssh", "slurm", "mpi"), "real"),
        **dict.fromkeys(("kubernetes", "azureml", "sagemaker"), "emulated"),
    }
    text = anygauge(["launchers"]).stdout
    assert "ssh\n    ranks on other machines; files are shared with this machine\n" in text
    assert "    a job ends with the command that started it\n" in text
    assert "    proven: emulated (rendered jobs pass the target's models, and" in text
