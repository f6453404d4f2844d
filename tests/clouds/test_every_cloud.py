"""What is said of every cloud: rendering is pure, mistakes are named, texts arrive as they are."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.interface import AnygaugeError, Job, Plan, RunFileError, UnsupportedError
from anygauge_clouds.azureml import Azureml, AzureService
from anygauge_clouds.container import unpack_job
from anygauge_clouds.kubernetes import Kubernetes, KubernetesService
from anygauge_clouds.sagemaker import Sagemaker, SagemakerService
from tests.clouds import test_azureml, test_kubernetes, test_sagemaker
from tests.clouds.helpers import CARDS, client_for, job
from tests.helpers.plans_from_options import render
from tests.helpers.sample_machines import assert_pure

# Launcher, service, the tests of what it alone does, its client, and what it is called.
CLOUDS: dict[str, tuple[Any, Any, Any, str, str]] = {
    "kubernetes": (Kubernetes, KubernetesService, test_kubernetes, "kubectl", "a Kubernetes job"),
    "azureml": (Azureml, AzureService, test_azureml, "az", "an Azure ML job"),
    "sagemaker": (Sagemaker, SagemakerService, test_sagemaker, "aws", "a SageMaker job"),
}
EVERY = pytest.mark.parametrize("name", CLOUDS)
IMAGELESS = {"profile": type(CARDS)()}


def rendered(name: str, change: dict[str, Any] | None = None, **fields: Any) -> Plan:
    plan: Plan = CLOUDS[name][2].rendered(change, **fields)
    return plan


@EVERY
def test_rendering_is_pure_and_the_token_is_in_a_file_for_your_eyes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in test_kubernetes.KINDS if name == "kubernetes" else [None]:
        assert_pure(lambda kind=kind: rendered(name, {"kind": kind}), monkeypatch)
        plan = rendered(name, {"kind": kind})
        held = {Path(file.path).name: file.mode for file in plan.files if "the token" in file.text}
        assert held == {"request.json" if name == "sagemaker" else "job.json": 0o600}
        assert "the token" not in json.dumps([process.argv for process in plan.processes])


BAD: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {
    "kubernetes": [
        ({"storage": None}, {}, "launch.options.storage: the kubernetes launcher needs it"),
        ({"namespace": "My_Team"}, {}, "launch.options.namespace: 'My_Team'"),
        ({"storage": {"claim": "runs", "path": "runs"}}, {}, "storage.path: 'runs': an absolute"),
        ({"volumes": [{"claim": "a", "path": "/anygauge/runs"}]}, {}, "mounted twice"),
        ({"volumes": [{"claim": "a", "path": "/dev/shm"}]}, {}, "/dev is the image's own"),
        (
            {"volumes": [{"claim": "a", "path": "/anygauge/job/"}]},
            {},
            "/anygauge/job is mounted",
        ),
        ({"secrets": {"HF-TOKEN": {"secret": "a", "key": "b"}}}, {}, "secrets.HF-TOKEN"),
        ({"volumes": [{"claim": "a", "path": "/a", "sub_path": "../b"}]}, {}, "without '..'"),
        ({"storage": {"claim": "a", "path": "/usr"}}, {}, "/usr is the image's own"),
        ({"storge": {"claim": "a"}}, {}, "did you mean 'storage'?"),
        ({"resources": {"memory": "64 GB"}}, {}, "resources.memory: '64 GB'"),
        ({"resources": {"rdma/ib": "1.5"}}, {}, "resources.rdma/ib: '1.5': devices are whole"),
        ({"resources": {"hugepages-2Mi": "1Gi"}}, {}, "Kubernetes requires memory or cpu beside"),
        ({"resources": {"example.com/card": "4"}}, {}, "launch.devices (8) says how many"),
        ({"shm": "64"}, {}, "launch.options.shm: '64'"),
        ({"image": "My Image"}, {}, "launch.options.image: 'My Image'"),
        ({"kind": "TrainJob", "restarts": 2}, {}, "a TrainJob takes this only from its runtime"),
        ({"runtime": "mine"}, {}, "runtime: belongs to kind TrainJob, and kind is JobSet"),
        ({"name": "a" * 50}, {}, "name: 50 characters; pods of a JobSet"),
        ({"name": "1st"}, {}, "launch.options.name: '1st'"),
        ({"kind": "Job"}, {}, "launch.options.kind: 'Job'"),
        ({}, IMAGELESS, "names no image of its own"),
    ],
    "azureml": [
        ({"compute": None}, {}, "launch.options.compute: the azureml launcher needs it"),
        ({"workspace": "a b"}, {}, "launch.options.workspace: 'a b'"),
        ({"compute": "azureml:x/y"}, {}, "launch.options.compute: 'azureml:x/y'"),
        ({"output": "/mnt/runs"}, {}, "launch.options.output: '/mnt/runs'"),
        ({"inputs": {"my-data": test_azureml.OPTIONS["inputs"]["data"]}}, {}, "inputs.my-data"),
        ({"inputs": {"data": {"path": "./here", "at": "/data"}}}, {}, "what Azure can mount"),
        ({"inputs": {"data": {"path": "azureml:a:1", "at": "data"}}}, {}, "an absolute folder"),
        ({"inputs": {"data": {"path": "azureml:a:1", "at": "/a;b"}}}, {}, "an absolute folder"),
        ({"inputs": {"a": {"path": "azureml:a:1", "at": "/anygauge/run"}}}, {}, "launcher's own"),
        ({"shm": "64gb"}, {}, "launch.options.shm: '64gb'"),
        ({"image": "a/b:1", "environment": "ours:4"}, {}, "image and environment: give one"),
        ({"identity": None}, {}, "needs an identity that may read them"),
        ({"python": "python3; rm"}, {}, "launch.options.python: 'python3; rm'"),
        ({"subscription": "mine"}, {}, "launch.options.subscription: 'mine'"),
        ({}, IMAGELESS, "names no image of its own"),
    ],
    "sagemaker": [
        ({"role": None}, {}, "launch.options.role: the sagemaker launcher needs it"),
        ({"role": "SageMakerRole"}, {}, "launch.options.role: 'SageMakerRole'"),
        ({"image": "pytorch/pytorch:2"}, {}, "launch.options.image: 'pytorch/pytorch:2'"),
        ({"image": None}, {}, "from Amazon ECR alone, and vendor/stack:1 is not there"),
        ({}, {"profile": CARDS}, "backend: cards needs example.com/card, which no machine of Sag"),
        ({"instance_type": "p5.48xlarge"}, {}, "launch.options.instance_type: 'p5.48xlarge'"),
        ({"instance_type": "ml.g6.xlarge"}, {}, "ml.g6.xlarge has 1 accelerators, and"),
        ({"output": "/tmp/runs"}, {}, "launch.options.output: '/tmp/runs'"),
        ({"channels": {"my data": "s3://bucket/x"}}, {}, "channels.my data"),
        ({"channels": {"data": {"id": "fs-1", "type": "EFS", "path": "/x"}}}, {}, "fs-1"),
        ({"extra": None}, {}, "SageMaker reaches a file system only through your subnets"),
        ({"spot": True}, {}, "max_wait_s: got None; spot: true needs it"),
        ({"spot": True, "max_wait_s": 10}, {}, "max_wait_s: got 10; spot: true needs it"),
        ({"max_wait_s": 90000}, {}, "max_wait_s: it works only with spot: true"),
        (
            {"extra": {"VpcConfig": {}, "EnableNetworkIsolation": True}}, {},
            "machines cannot reach Secrets Manager",
        ),
        ({"region": "Ireland"}, {}, "launch.options.region: 'Ireland'"),
        ({}, {"max_restarts": 2}, "launch.max_restarts: on several machines of SageMaker"),
        (
            {}, {"stop_grace_s": 300.0},
            "checkpoint.grace_s (300 s) and launch.options.grace_s (5 s) may have at most 110 s",
        ),
    ],
}  # fmt: skip
SECRET = ({"secrets": {"HF_TOKEN": "hf_abc"}}, {}, "secrets.HF_TOKEN: say where the secret is kept")


@pytest.mark.parametrize(
    ("name", "change", "fields", "said"),
    [(name, *row) for name, rows in BAD.items() for row in (*rows, SECRET)],
)
def test_bad_options_are_caught_before_anything_is_submitted(
    name: str, change: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunFileError) as caught:
        rendered(name, change, **fields)
    assert said in str(caught.value) and "Value error" not in str(caught.value), "in our own words"


# What kubectl refuses has more to it: test_kubernetes.py.
REFUSALS = {
    "azureml": ("create", "ERROR: Please run 'az login' to setup account."),
    "sagemaker": ("create-training-job", "An error occurred (ValidationException)"),
}


@EVERY
def test_refusals_of_a_client_are_quoted_and_its_absence_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, service, _, program, called = CLOUDS[name]
    client = client_for(program, service, tmp_path, monkeypatch)
    plan = rendered(name, folder=tmp_path / "r")
    if name in REFUSALS:
        word, said = REFUSALS[name]
        client.answer(word, status=1, err=f"\n{said}\n")
        with pytest.raises(AnygaugeError, match=f"refused the job: {re.escape(said)}"):
            launcher().submit(plan)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AnygaugeError, match=f"{program} is not installed here"):
        launcher().submit(plan)
    for record in ({"job": "42"}, {"kind": "Pod", "name": "a", "namespace": "b"}):
        with pytest.raises(UnsupportedError, match=f"is not a record of {called}"):
            launcher().attach(record, tmp_path)


MARK = "\N{SNOWMAN}mine"
# A variable cannot hold a NUL, and lone surrogates are not text.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)
ODD = ["$HOME", "$(HOME)", "$$(x)", "`id`", "${{inputs.a}}", "雪", "%s", "\\"]
WITH_ODD = st.one_of(TEXTS, st.sampled_from([*ODD, "a 'b' \"c\"", "\n"])).map(MARK.__add__)


def job_there(plan: Plan, name: str) -> Job:
    """What an agent reads on its machine."""
    if name == "sagemaker":
        request = json.loads(plan.files[0].text)
        text, _ = unpack_job(request["HyperParameters"])
    else:
        text = next(file.text for file in plan.files if file.path.endswith("job.json"))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return Job.load(file.name)


@EVERY
@settings(deadline=None, max_examples=60)
@given(value=WITH_ODD, text=WITH_ODD)
def test_a_job_arrives_as_it_was_written(name: str, value: str, text: str) -> None:
    there = job(environment={"V": value}, run_text=text)
    plan = render(name, there, CLOUDS[name][2].OPTIONS, test_sagemaker.GPUS)
    arrived = job_there(plan, name)
    assert (arrived.environment["V"], arrived.run_text) == (value, text)
    # Nowhere else: what a cluster or a shell would read has nothing of it.
    spoken = [p.argv for p in plan.processes] + list(plan.operations.values())
    assert MARK not in json.dumps(spoken, ensure_ascii=False)
    for file in plan.files:
        if file.mode & 0o077:
            assert MARK not in file.text and "mine" not in file.text


@settings(deadline=None, max_examples=30)
@given(value=WITH_ODD)
def test_variables_of_the_shell_arrive_as_they_are(value: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", value)
        there = job(Path(folder) / "run")
        render("kubernetes", there, test_kubernetes.OPTIONS, CARDS).write_files()
        path = Path(folder) / "run" / "variables.json"
        assert json.loads(path.read_text()) == {"HF_HOME": value}
