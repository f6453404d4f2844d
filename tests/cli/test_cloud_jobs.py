"""Jobs that are handed to a service: refused, shown, submitted, and found again."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import Job
from anygauge.util.processes import REPEATED_SIGNAL_S
from tests.clouds.helpers import Client, events_text
from tests.helpers.child_processes import as_in_a_terminal, begin, end, running, until
from tests.helpers.runs import called, run_file

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


RUNS: dict[str, Any] = {"status": {"conditions": []}}
POD = {"items": [{"metadata": {"name": "p"}, "status": {"phase": "Running"}}]}


def willing(folder: Path) -> Client:
    """A stand-in for kubectl that takes a job."""
    client = Client("kubectl", folder, sys.executable)
    client.answer("create", "-")
    client.answer("create", "json", out=MADE)
    client.answer("patch", "secret")
    return client


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


SECRET = ("HF_TOKEN looks like a secret", "launch.options.secrets")
EFA = ("--set", "launch.fabric=efa")


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        (
            {"data": {"train": {"path": "/home/me/rows.jsonl"}}}, (),
            (
                "data.train.path: /home/me/rows.jsonl is not on the job's machines",
                "which have only /anygauge/runs, /data", "tiny.yaml:",
            ),
        ),
        ({"environment": {"HF_TOKEN": "hf_xyz"}}, (), ("environment: ", *SECRET)),
        (
            {"environment": {"PROXY": "http://ann:hf_xyz@proxy:3128"}}, (),
            ("environment: PROXY looks like a secret",),
        ),
        (
            {"launch": {**LAUNCH, "pass_environment": ["HF_TOKEN"]}}, (),
            ("launch.pass_environment: ", *SECRET),
        ),
        ({}, EFA, ("launch.fabric: 'efa': this backend has auto, ethernet",)),
        (
            {}, ("--backend", "cuda", *EFA),
            ("with launch.fabric: efa, pods must ask for vpc.amazonaws.com/efa",),
        ),
    ],
    ids=[
        *("a path", "a secret", "a secret in a value", "a secret by name", "a network"),
        "what a network needs",
    ],
)  # fmt: skip
def test_what_machines_cannot_have_is_refused(
    changes: dict[str, Any], options: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    done = called(["launch", there(tmp_path, **changes), "--dry-run", *options])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(words in done.stderr for words in said), done.stderr
    assert "hf_xyz" not in done.stdout + done.stderr


def test_a_dry_run_shows_the_manifest_and_how_it_was_tested(tmp_path: Path) -> None:
    done = called(["launch", there(tmp_path), "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "launcher kubernetes; tested: emulated (rendered jobs pass" in done.stdout
    assert "    | kind: JobSet\n" in done.stdout
    assert "by hand, cancel: kubectl --namespace default delete jobset tiny" in done.stdout
    known = {**LAUNCH, "options": {**OPTIONS, "in_image": ["/home/me"]}}
    path = there(tmp_path, data={"train": {"path": "/home/me/rows.jsonl"}}, launch=known)
    assert called(["launch", path, "--dry-run"]).returncode == 0
    assert not (tmp_path / "out").exists()


def test_a_plan_for_git_stands_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    done = called(["launch", there(tmp_path), "--render", folder])
    assert done.returncode == 0, done.stderr
    assert {entry.name for entry in folder.iterdir()} == {
        *("job.json", "variables.json", "manifest.yaml", "run.json", "run.yaml", "plan.json")
    }
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["operations"]["submit"][-1] == "manifest.yaml"
    assert "--from-file=job.json=job.json" in plan["operations"]["secret"]
    job = Job.load(folder / "job.json")
    assert (job.token, job.run_directory) == ("", "/anygauge/runs/tiny")
    assert json.loads(job.run_text)["model"]["name"] == "/data/model"


def test_a_job_is_submitted_left_followed_and_its_logs_are_found(tmp_path: Path) -> None:
    client = willing(tmp_path)
    shell = {"PATH": client.path}
    folder = tmp_path / "out" / "tiny"
    done = called(["launch", there(tmp_path), "--detach"], environment=shell)
    assert done.returncode == 0, done.stderr
    assert f"anygauge job follow {folder}" in done.stdout
    logs = called(["job", "logs", folder], environment=shell)
    assert (
        "on the job's storage, in the run directory (logs/rankN.log); to see what the first"
        in logs.stdout
    )
    assert "printed: kubectl --namespace default logs -f -l " in logs.stdout
    client.answer("get", "jobset", out=RUNS)
    client.answer("get", "pods", out=POD)
    name = json.loads((folder / "launched.json").read_text())["record"]["name"]
    assert name.startswith("tiny-")
    seen = called(["job", "status", folder], environment=shell)
    assert seen.stdout == f"JobSet default/{name} runs\n"
    said = events_text(
        {"event": "message", "time": 1.0, "text": "hello from rank 0", "level": "info"},
        {"event": "ended", "time": 2.0, "state": "failed", "exit_status": 1, "cause": "rank 1 ..."},
    )
    client.forget()
    client.answer("logs", "p", out=said)
    client.answer("get", "pods", out=POD)
    client.answer("get", "jobset", out=RUNS)
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs"}
    client.answer("get", "jobset", out={"status": {"conditions": [failed]}})
    followed = called(["job", "follow", folder], environment=shell)
    assert followed.returncode == 1
    assert "hello from rank 0" in followed.stdout and "rank 1 ..." in followed.stderr


def submitted(folder: Path) -> tuple[Path, Client]:
    """The folder of a job whose pods do not exist yet."""
    client = willing(folder)
    client.answer("get", "pods", out={"items": []})
    client.answer("get", "jobset", out=RUNS)
    done = called(["launch", there(folder), "--detach"], environment={"PATH": client.path})
    assert done.returncode == 0, done.stderr
    return folder / "out" / "tiny", client


def test_a_second_cancel_leaves_no_time_and_an_ended_job_needs_none(tmp_path: Path) -> None:
    folder, client = submitted(tmp_path)
    shell = {"PATH": client.path}
    client.answer("delete", "--cascade=foreground")
    client.answer("delete", "pods", "--force")
    first = called(["job", "cancel", folder], environment=shell)
    assert first.stdout.startswith("requested: the ranks write a checkpoint if they can")
    assert not any("--force" in argv for argv, _ in client.asked)
    second = called(["job", "cancel", folder], environment=shell)
    assert second.stdout == "requested: the job ends at once\n"
    assert any("--force" in argv for argv, _ in client.asked)
    client.forget()
    client.answer("get", "pods", out={"items": []})
    complete = {"type": "Completed", "status": "True"}
    client.answer("get", "jobset", out={"status": {"conditions": [complete]}})
    over = called(["job", "cancel", folder], environment=shell)
    assert over.returncode == 1 and "is complete: there is nothing to end" in over.stderr


def test_a_run_has_one_job_at_a_time(tmp_path: Path) -> None:
    folder, client = submitted(tmp_path)
    shell = {"PATH": client.path}
    again = called(["launch", there(tmp_path), "--resume", "auto"], environment=shell)
    assert again.returncode == 1
    assert f"{folder} has a job already: JobSet default/tiny-" in again.stderr
    assert f"anygauge job cancel {folder}" in again.stderr
    client.forget()
    gone = 'Error from server (NotFound): jobsets "tiny" not found'
    client.answer("get", "jobset", status=1, err=gone)
    client.answer("create", "-")
    client.answer("create", "json", out=MADE)
    client.answer("patch", "secret")
    command = ["launch", there(tmp_path), "--resume", "auto", "--detach"]
    done = called(command, environment=shell)
    assert done.returncode == 0 and str(folder) in done.stdout


def test_a_submission_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    done = called(["launch", there(tmp_path)], environment={"PATH": str(tmp_path)})
    assert done.returncode == 1 and "kubectl is not installed here" in done.stderr
    assert not (tmp_path / "out" / "tiny").exists()


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_during_submission_waits_until_the_job_is_known(
    tmp_path: Path, signum: int
) -> None:
    client = willing(tmp_path)
    client.answer("get", "pods", out={"items": []})
    client.answer("get", "jobset", out=RUNS)
    client.answer("delete", "--cascade=foreground")
    client.slow("json", 1.0)
    shell = {"PATH": client.path}
    process = begin("launch", there(tmp_path), environment=shell, start_new_session=True)
    try:
        until(lambda: client.has_asked("create", "json"), "the submission")
        time.sleep(0.5)
        os.killpg(process.pid, signum)  # as a terminal does
        until(lambda: client.has_asked("delete"), "the cancellation")
        launched = json.loads((tmp_path / "out" / "tiny" / "launched.json").read_text())
        assert launched["record"]["kind"] == "JobSet"
    finally:
        end(process)


def read_until(terminal: int, text: bytes, shown: bytes = b"") -> bytes:
    """What a terminal shows, until it has shown a text."""
    end = time.monotonic() + 60
    while text not in shown:
        left = end - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], shown.decode()
        shown += os.read(terminal, 4096)
    return shown


def take_the_terminal() -> None:
    """For `preexec_fn`: standard input becomes the terminal that sends the process its signals."""
    as_in_a_terminal()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_at_the_question_another_ctrl_c_cancels_and_the_end_of_input_leaves(tmp_path: Path) -> None:
    folder, client = submitted(tmp_path)
    client.answer("delete", "--cascade=foreground")
    for keys, cancels in ((b"\x04", False), (b"\x03", True)):
        primary, secondary = os.openpty()
        process = begin(
            *("job", "follow", folder), environment={"PATH": client.path, "TERM": "dumb"},
            stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True,
            preexec_fn=take_the_terminal,
        )  # fmt: skip
        os.close(secondary)
        try:
            shown = read_until(primary, b"waits for its pods")
            os.write(primary, b"\x03")
            read_until(primary, b"Enter to keep following", shown)
            time.sleep(2 * REPEATED_SIGNAL_S)  # one that comes sooner is the same
            os.write(primary, keys)
            if cancels:
                until(lambda: client.has_asked("delete"), "the cancellation")
            else:
                assert process.wait(timeout=60) == 0
                assert not client.has_asked("delete")
        finally:
            end(process)
            os.close(primary)


def test_launchers_are_listed_with_what_they_can_and_their_proof() -> None:
    listed = json.loads(called(["launchers", "--json"]).stdout)
    # This machine first, then those that share its files, then the others.
    assert [(one["name"], one["tested_on"]) for one in listed] == [
        *((name, "real") for name in ("local", "ssh", "slurm", "mpi")),
        *((name, "emulated") for name in ("kubernetes", "azureml", "sagemaker")),
    ]
    text = called(["launchers"]).stdout
    assert "ssh\n    ranks on other machines; files are shared with this machine\n" in text
    assert "    a job ends with the command that started it\n" in text
    assert "    tested: emulated (rendered jobs pass the target's models, and" in text


def test_who_leaves_leaves_no_process_behind(tmp_path: Path) -> None:
    folder, client = submitted(tmp_path)
    client.forget()
    client.answer("get", "jobset", out=RUNS)
    client.answer("get", "pods", out=POD)
    client.answer("logs", "p")
    client.slow("logs", 300.0)
    process = begin("job", "follow", folder, environment={"PATH": client.path})
    program = f"{client.path.partition(':')[0]}/kubectl".encode()

    try:
        until(lambda: client.has_asked("logs"), "a reader")
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 0 and "to follow it again: anygauge job follow" in out
    until(
        lambda: not running(lambda entry: program in (entry / "cmdline").read_bytes()),
        "the end of the reader",
    )
