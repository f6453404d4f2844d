"""What the clouds' own models say of rendered jobs, and the real aws client on a simulated service.

Their packages are in an environment of their own, ``.venv-clouds``, which ``make test-launchers``
makes. None of it needs a network, a cluster or credentials.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import Plan
from anygauge_clouds import service_job
from anygauge_clouds.sagemaker import LOG_GROUP, Sagemaker
from tests.clouds import test_azureml, test_kubernetes, test_sagemaker
from tests.clouds.helpers import events_text, job

pytestmark = pytest.mark.launchers

REPOSITORY = Path(__file__).parents[2]
CLOUDS = REPOSITORY / ".venv-clouds" / "bin"
SCRIPT = Path(__file__).with_name("published_models.py")


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not (CLOUDS / "python").exists():
        pytest.skip(f"{CLOUDS.parent} is not there: make test-launchers makes it")


def problems(kind: str, file: Path) -> str:
    """What the models find wrong; empty for nothing. Without a network to ask anybody."""
    done = subprocess.run(
        ["unshare", "--net", str(CLOUDS / "python"), str(SCRIPT), kind, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert bool(done.stdout.strip()) is bool(done.returncode)
    return done.stdout.strip()


def written(plan: Plan, folder: Path) -> Path:
    """The plan's files, as a submission writes them; returns the last one."""
    home = Path(job().run_directory)
    for file in plan.files:
        path = folder / Path(file.path).relative_to(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    return path


FULL_POD: dict[str, Any] = {
    "resources": {"memory": "64Gi", "hugepages-2Mi": "5120Mi", "vpc.amazonaws.com/efa": "4"},
    "capabilities": ["IPC_LOCK"],
    "time_limit_s": 3600,
    "queue": "team-a",
}
PLACED = {
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "trainer",
    "nodeSelector": {"pool": "cards"},
    "tolerations": [{"key": "cards", "operator": "Exists", "effect": "NoSchedule"}],
    "securityContext": {"runAsUser": 10002, "fsGroup": 10001},
}
FULL_JOBSET = {
    **FULL_POD,
    **{"image_pull_policy": "Always", "keep_s": 60, "runtime_class": "habana", "restarts": 2},
    "extra": {**PLACED, "hostIPC": True, "priorityClassName": "high"},
}
AZURE = {
    "image": None,
    "environment": "ours:4",
    "extra": {
        **{"limits": {"timeout": 3600}, "experiment_name": "tuning", "tags": {"team": "a"}},
        "queue_settings": {"job_tier": "spot", "priority": "high"},
        "resources": {"instance_type": "gpu-large"},
    },
}
SPOT = {
    **{"spot": True, "max_wait_s": 90000},
    "extra": {
        "VpcConfig": test_sagemaker.VPC,
        **{"RetryStrategy": {"MaximumRetryAttempts": 2}, "Tags": [{"Key": "a", "Value": "b"}]},
        "ResourceConfig": {"VolumeSizeInGB": 500},
    },
}
RENDERED = {
    "kubernetes": test_kubernetes.rendered,
    "azureml": test_azureml.rendered,
    "sagemaker": test_sagemaker.rendered,
}


@pytest.mark.parametrize(
    ("service", "change"),
    [
        ("kubernetes", {"kind": "JobSet"}),
        ("kubernetes", {"kind": "JobSet", **FULL_JOBSET}),
        ("kubernetes", {"kind": "TrainJob"}),
        ("kubernetes", {"kind": "TrainJob", **FULL_POD, "extra": PLACED}),
        *(("azureml", change) for change in ({}, AZURE)),
        *(("sagemaker", change) for change in ({}, SPOT)),
    ],
)
def test_a_rendered_job_passes_the_published_models(
    service: str, change: dict[str, Any], tmp_path: Path
) -> None:
    assert problems(service, written(RENDERED[service](change), tmp_path)) == ""


@pytest.mark.parametrize(
    ("service", "kind", "change", "said"),
    [
        ("kubernetes", "JobSet", lambda m: m["spec"].update(replicas=2), "JobSet.spec.replicas: u"),
        (
            *("kubernetes", "TrainJob"),
            *(lambda m: m["spec"]["trainer"].update(numProcPerNode="many"), "numProcPerNode"),
        ),
        ("azureml", None, lambda m: m.update(sekrets={}), "Unknown field"),
        ("azureml", None, lambda m: m.update(command="train ${{inputs.nothing}}"), "nothing"),
        (
            *("sagemaker", None),
            *(lambda r: r["ResourceConfig"].update(InstanceType="ml.p99.huge"), "is none of"),
        ),
        ("sagemaker", None, lambda r: r["HyperParameters"].update(a="x" * 2501), "is not within"),
        ("sagemaker", None, lambda r: r.update(Foo=1), "Unknown parameter"),
    ],
)
def test_those_models_do_find_mistakes(
    service: str,
    kind: str | None,
    change: Callable[[dict[str, Any]], Any],
    said: str,
    tmp_path: Path,
) -> None:
    path = written(RENDERED[service]({"kind": kind}), tmp_path)
    made = yaml.safe_load(path.read_text())
    change(made)
    path.write_text(json.dumps(made))  # which YAML holds as well
    assert said in problems(service, path)


class TestRealAwsClient:
    """The real aws client against moto, which simulates the service: a job completes at once."""

    @pytest.fixture
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        server = subprocess.Popen(
            [str(CLOUDS / "moto_server"), "-p", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert server.stdout is not None
        line = next(line for line in server.stdout if "Running on http://127.0.0.1:" in line)
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.rpartition(" ")[2].strip())
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("PATH", f"{CLOUDS}:{os.environ['PATH']}")
        monkeypatch.setattr(service_job, "POLL_S", 0.5)
        yield
        server.kill()
        server.wait()

    def aws(self, *words: str) -> str:
        done = subprocess.run(
            ["aws", *words, "--region", "eu-west-1"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_a_job_is_submitted_followed_and_known(self, service: None, tmp_path: Path) -> None:
        running = Sagemaker().submit(test_sagemaker.rendered(folder=tmp_path / "Tiny_Run.1"))
        name = running.record["name"]
        stream = f"{name}/algo-1-1700000000"
        self.aws("logs", "create-log-group", "--log-group-name", LOG_GROUP)
        place = ("--log-group-name", LOG_GROUP, "--log-stream-name")
        now = int(time.time() * 1000)
        said = {
            stream: {"event": "ended", "time": 1.0, "state": "ok", "exit_status": 0, "cause": ""},
            f"{name}/algo-2-1700000000": {
                "event": "message",
                "time": 1.0,
                "text": "not the coordinator",
            },
        }
        for where, event in said.items():
            self.aws("logs", "create-log-stream", *place, where)
            entry = [{"timestamp": now, "message": events_text(event)}]
            self.aws("logs", "put-log-events", *place, where, "--log-events", json.dumps(entry))
        found = json.loads(
            self.aws("sagemaker", "describe-training-job", "--training-job-name", name)
        )
        assert found["ResourceConfig"]["InstanceCount"] == 2
        assert len(found["HyperParameters"]) >= 1
        events = [event for event in running.events() if event["event"] != "message"]
        assert [(event["event"], event.get("time")) for event in events] == [("ended", 1.0)]
        assert running.state().text == f"SageMaker training job {name} is complete"

    def test_a_refusal_and_an_unknown_job_are_told(self, service: None, tmp_path: Path) -> None:
        gone = Sagemaker().attach({"name": "nobodys", "region": "eu-west-1"}, tmp_path)
        assert gone.state().text == "SageMaker training job nobodys is gone"

    def test_secrets_are_read_with_the_real_library(self, service: None, tmp_path: Path) -> None:
        made = json.loads(
            self.aws("secretsmanager", "create-secret", "--name", "hf", "--secret-string", "hf_xyz")
        )
        script = (
            "import sys; from anygauge_clouds.container import manager_secrets; "
            "print(manager_secrets({'HF_TOKEN': sys.argv[1]}))"
        )
        done = subprocess.run(
            [CLOUDS / "python", "-c", script, made["ARN"]],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'launchers'}"},
        )  # fmt: skip
        assert done.stdout == "{'HF_TOKEN': 'hf_xyz'}\n", done.stderr
