"""SageMaker: rendering, refusals, how a container becomes an agent, how a job is followed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anygauge.interface import AnygaugeError, Job, LaunchProfile, Plan, UnsupportedError
from anygauge_clouds import container
from anygauge_clouds.sagemaker import Sagemaker, SagemakerService
from anygauge_clouds.service_job import ServiceJob
from tests.clouds.helpers import CARDS, Client, client_for, events_text, job, merged
from tests.helpers.plans_from_options import render

SECRET = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf-AbCdEf"
VPC = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
OPTIONS: dict[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/SageMakerRole",
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/anygauge:1",
    "instance_type": "ml.p5.48xlarge",
    "output": "s3://bucket/runs",
    "channels": {
        "data": "s3://bucket/data/",
        "models": {"id": "fs-0123456789abcdef0", "type": "FSxLustre", "path": "/x/models"},
    },
    "extra": {"VpcConfig": VPC},
    "secrets": {"HF_TOKEN": SECRET},
    "region": "eu-west-1",
}
NAME = "tiny-run-1-d94772fd"


GPUS = replace(CARDS, cluster_resource="nvidia.com/gpu")


def rendered(
    change: dict[str, Any] | None = None, profile: LaunchProfile = GPUS, **fields: Any
) -> Plan:
    return render("sagemaker", job(**fields), merged(OPTIONS, change or {}), profile)


def request(plan: Plan) -> dict[str, Any]:
    (file,) = plan.files
    return dict(json.loads(file.text))


def test_machines_storage_and_time_are_as_asked_for() -> None:
    extra = {"VpcConfig": VPC, "ResourceConfig": {"VolumeSizeInGB": 500}}
    made = request(rendered({"spot": True, "max_wait_s": 90000, "extra": extra}))
    assert made["ResourceConfig"] == {
        "InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 500,
    }  # fmt: skip
    how = made["AlgorithmSpecification"]
    assert how["ContainerEntrypoint"] == ["python3", "-m", "anygauge_clouds.container"]
    assert how["ContainerArguments"] == ["sagemaker", "--grace", "5"]
    assert made["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/runs/Tiny_Run.1", "LocalPath": "/opt/ml/checkpoints",
    }  # fmt: skip
    assert made["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 90000,
    }  # fmt: skip
    assert made["EnableManagedSpotTraining"] is True
    data, models = made["InputDataConfig"]
    assert data["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/data/"
    assert models["DataSource"]["FileSystemDataSource"]["FileSystemAccessMode"] == "ro"
    assert made["VpcConfig"] == VPC


def test_each_submission_has_a_name_of_its_own() -> None:
    names = {request(rendered(token=token))["TrainingJobName"] for token in ("a", "b", "c")}
    assert len(names) == 3 and all(name.startswith("tiny-run-1-") for name in names)
    assert request(rendered(token=""))["TrainingJobName"] == "tiny-run-1"
    long = request(rendered(folder="/runs/" + "x" * 90))["TrainingJobName"]
    assert len(long) == 63


def test_a_job_travels_in_pieces_that_the_service_takes() -> None:
    text = "name: '雪 \"quoted\" $HOME'\n" * 500
    made = request(rendered(run_text=text))
    pieces = made["HyperParameters"]
    assert len(pieces) > 3
    for piece in pieces.values():
        assert len(piece) <= 2500 and "\n" not in piece and piece.isascii()
    job_text, secrets = container.unpack_job(dict(reversed(pieces.items())))
    assert json.loads(job_text)["run_text"] == text
    assert json.loads(job_text)["run_directory"] == "/opt/ml/checkpoints"
    assert secrets == {"HF_TOKEN": SECRET}
    with pytest.raises(UnsupportedError, match="a request to SageMaker may have at most 100"):
        rendered(run_text=text * 20)


class TestSageMakerContainer:
    """What the entry point does on a machine."""

    @pytest.fixture
    def config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(container, "CONFIG", str(tmp_path))
        monkeypatch.setattr(container, "FAILURE", str(tmp_path / "output" / "failure"))
        monkeypatch.setattr(container, "JOB_FILE", str(tmp_path / "job.json"))
        made = request(rendered({"secrets": None}))
        (tmp_path / "hyperparameters.json").write_text(json.dumps(made["HyperParameters"]))
        self.of(tmp_path, "algo-2", ["algo-1", "algo-2"])
        return tmp_path

    def of(self, folder: Path, name: str, hosts: list[str]) -> None:
        where = {"current_host": name, "hosts": hosts, "network_interface_name": "eth0"}
        (folder / "resourceconfig.json").write_text(json.dumps(where))

    def test_it_becomes_the_agent_of_its_machine(self, config: Path) -> None:
        command, variables = container.sagemaker_agent(["--grace", "5"])
        assert command[1:] == [
            *("-m", "anygauge.launch.agent", "--job", str(config / "job.json"), "--node-rank", "1"),
            *("--coordinator", "algo-1:4711", "--cause-file", str(config / "output" / "failure")),
            *("--grace", "5"),
        ]
        assert variables == {}
        assert Job.load(config / "job.json").token == "the token"
        assert (config / "job.json").stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize(
        ("name", "hosts", "said"),
        [
            ("algo-3", ["algo-1", "algo-2"], "does not say which machine this is"),
            ("algo-1", ["algo-1"], "SageMaker started 1 machines, and the job has 2"),
        ],
    )
    def test_what_is_wrong_stands_where_sagemaker_looks_for_it(
        self, config: Path, name: str, hosts: list[str], said: str
    ) -> None:
        self.of(config, name, hosts)
        assert container.main("sagemaker") == 1
        assert said in (config / "output" / "failure").read_text()

    def test_a_piece_that_is_missing_is_noticed(self, config: Path) -> None:
        (config / "hyperparameters.json").write_text(json.dumps({"anygauge.001": "}"}))
        with pytest.raises(AnygaugeError, match="the hyperparameters hold no job of anygauge"):
            container.sagemaker_agent([])

    def test_secrets_come_from_secrets_manager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The packages are stand-ins; the real client was run against a simulated service."""

        class Client:
            def get_secret_value(self, SecretId: str) -> dict[str, str]:
                return {"SecretString": f"value of {SecretId[-6:]}"}

        asked = []
        boto3, exceptions = ModuleType("boto3"), ModuleType("botocore.exceptions")
        vars(boto3)["client"] = lambda name, region_name: (
            asked.append((name, region_name)) or Client()
        )
        vars(exceptions).update(BotoCoreError=OSError, ClientError=OSError)
        monkeypatch.setitem(sys.modules, "boto3", boto3)
        monkeypatch.setitem(sys.modules, "botocore.exceptions", exceptions)
        assert container.manager_secrets({"HF_TOKEN": SECRET}) == {"HF_TOKEN": "value of AbCdEf"}
        assert asked == [("secretsmanager", "eu-west-1")]


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("HF_HOME", "/cache")
    return client_for("aws", SagemakerService, tmp_path, monkeypatch)


def submitted(client: Client, folder: Path) -> ServiceJob:
    client.answer("create-training-job", out={"TrainingJobArn": "arn:x"})
    return Sagemaker().submit(rendered(folder=folder / "Tiny_Run.1"))


def state(word: str, second: str, **more: str) -> dict[str, str]:
    return {"TrainingJobStatus": word, "SecondaryStatus": second, **more}


def test_a_job_is_submitted_and_found_again(aws: Client, tmp_path: Path) -> None:
    running = submitted(aws, tmp_path)
    path = tmp_path / "Tiny_Run.1" / "request.json"
    argv = aws.asked[0][0]
    assert argv[:4] == ["sagemaker", "create-training-job", "--cli-input-json", f"file://{path}"]
    assert argv[4:] == ["--region", "eu-west-1"]
    sent = json.loads(path.read_text())
    assert sent["Environment"] == {"HF_HOME": "/cache"}
    assert path.stat().st_mode & 0o777 == 0o600
    aws.answer("describe-training-job", running.record["name"], out=state("InProgress", "Starting"))
    again = Sagemaker().attach(json.loads(json.dumps(running.record)), path.parent)
    assert again.state().text.endswith(": Starting")
    aws.answer("stop-training-job", running.record["name"])
    again.cancel()
    assert aws.asked[-1][0][1] == "stop-training-job"


def test_a_job_that_has_just_ended_need_not_be_stopped(aws: Client, tmp_path: Path) -> None:
    running = submitted(aws, tmp_path)
    said = "ValidationException: The request was rejected because the training job is in status "
    aws.answer("stop-training-job", status=254, err=said + "Completed.")
    running.cancel()
    aws.forget()
    aws.answer("stop-training-job", status=254, err="AccessDeniedException")
    with pytest.raises(AnygaugeError, match="cannot end SageMaker training job"):
        running.cancel()


def test_a_variable_that_the_service_would_refuse_is_named(
    aws: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "x" * 513)
    said = "a longer value of HF_HOME, but SageMaker takes at most 100 variables of up to 512"
    with pytest.raises(AnygaugeError, match=said):
        submitted(aws, tmp_path)


def test_a_job_is_followed_through_the_log_of_its_first_machine(
    aws: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SagemakerService, "log_delay_s", 60.0)
    running = submitted(aws, tmp_path)
    said = events_text(
        {"event": "step", "time": 1.0, "step": 1},
        {"event": "ended", "time": 2.0, "state": "ok", "exit_status": 0, "cause": ""},
    ).splitlines()
    page = {"events": [
        {"eventId": str(n), "timestamp": 1000 + n, "message": m} for n, m in enumerate(said)
    ]}  # fmt: skip
    aws.answer("describe-training-job", out=state("InProgress", "Downloading"))
    aws.answer("describe-training-job", out=state("InProgress", "Training"))
    aws.answer("describe-training-job", out=state("Completed", "Completed"))
    prefix = f"{running.record['name']}/algo-1-"
    aws.answer("filter-log-events", prefix, out=page)
    events = [event for event in running.events() if event["event"] != "message"]
    assert [(event["event"], event.get("time")) for event in events] == [
        ("step", 1.0), ("ended", 2.0),
    ]  # fmt: skip
    assert events[-1]["exit_status"] == 0


def test_the_log_is_asked_again_and_nothing_is_told_twice(aws: Client, tmp_path: Path) -> None:
    first = {"events": [{"eventId": "a", "timestamp": 90_000, "message": "one"}]}
    both = {"events": [*first["events"], {"eventId": "b", "timestamp": 99_000, "message": "two\n"}]}
    aws.answer("filter-log-events", out=first)
    aws.answer("filter-log-events", out=both)
    aws.answer("filter-log-events", status=255, err="ExpiredToken")
    script = (
        "import sys; from anygauge_clouds import sagemaker; sagemaker.LOG_POLL_S = 0.05; "
        "sys.exit(sagemaker.follow_log(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "aws", "logs", "filter-log-events"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (255, "one\ntwo\n", "ExpiredToken\n")
    starts = [argv[argv.index("--start-time") + 1] for argv, _ in aws.asked]
    assert starts == ["0", "30000", "39000"]


REASON = "AlgorithmError: rank 3 on algo-1 failed with KeyError, exit code: 1"


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        (state("Failed", "Failed", FailureReason=REASON), "failed", REASON),
        (state("Stopped", "MaxRuntimeExceeded"), "lost", "was stopped (MaxRuntimeExceeded)"),
    ],
)
def test_without_a_log_the_service_says_how_it_ended(
    aws: Client, tmp_path: Path, answer: dict[str, str], outcome: str, said: str
) -> None:
    running = submitted(aws, tmp_path)
    aws.answer("describe-training-job", out=answer)
    aws.answer("filter-log-events", status=255, err="AccessDenied")
    final = list(running.events())[-1]
    assert final["state"] == outcome and said in final["cause"]
