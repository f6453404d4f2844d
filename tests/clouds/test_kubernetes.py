"""Kubernetes: what is rendered, what is refused, and how a job is followed through kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import (
    LOST,
    AnygaugeError,
    Backend,
    Fabric,
    Job,
    LaunchProfile,
    Plan,
    RunFileError,
)
from anygauge_clouds.kubernetes import Kubernetes, KubernetesService
from anygauge_clouds.service_job import ServiceJob
from anygauge_clouds.submission import relocate
from anygauge_hpu.backend import HpuBackend
from tests.clouds.helpers import CARDS, Client, client_for, events_text, job, merged
from tests.helpers.plans_from_options import render

OPTIONS: dict[str, Any] = {
    "namespace": "train",
    "storage": {"claim": "runs"},
    "volumes": [
        {"claim": "data", "path": "/data", "read_only": True},
        {"claim": "runs", "path": "/models", "sub_path": "models"},
    ],
    "secrets": {"HF_TOKEN": {"secret": "hf", "key": "token"}},
    "extra": {"nodeSelector": {"pool": "cards"}, "securityContext": {"fsGroup": 10001}},
}
NAME = "tiny-run-1-d94772fd"
KINDS = ("JobSet", "TrainJob")


def rendered(
    change: dict[str, Any] | None = None, profile: LaunchProfile = CARDS, **fields: Any
) -> Plan:
    return render("kubernetes", job(**fields), merged(OPTIONS, change or {}), profile)


def manifest(plan: Plan) -> dict[str, Any]:
    (text,) = (file.text for file in plan.files if file.path.endswith("manifest.yaml"))
    return dict(yaml.safe_load(text))


def find(tree: Any, key: str) -> list[Any]:
    """All values of a key, however deep."""
    if isinstance(tree, list):
        return [found for part in tree for found in find(part, key)]
    if not isinstance(tree, dict):
        return []
    below = [found for value in tree.values() for found in find(value, key)]
    return [*([tree[key]] if key in tree else []), *below]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_devices_memory_storage_and_secrets_by_name(kind: str) -> None:
    made = manifest(rendered({"kind": kind, "resources": {"memory": "64Gi", "rdma/ib": "1"}}))
    assert made["metadata"] == {
        "name": NAME, "namespace": "train", "labels": {"anygauge.io/submission": "d94772fd"},
    }  # fmt: skip
    wanted = {"example.com/card": 8, "memory": "64Gi", "rdma/ib": "1"}
    limits = find(made, "limits")
    assert limits and all(limit == wanted for limit in limits + find(made, "requests"))
    assert {"add": ["SYS_NICE"]} in find(made, "capabilities")
    mounts = {m["mountPath"]: m for m in find(made, "volumeMounts")[0]}
    assert set(mounts) == {
        *("/anygauge/job", "/anygauge/secrets", "/anygauge/runs", "/data", "/models", "/dev/shm")
    }
    assert mounts["/data"]["readOnly"] and mounts["/models"]["subPath"] == "models"
    # A claim that is mounted twice is one volume.
    assert mounts["/models"]["name"] == mounts["/anygauge/runs"]["name"]
    volumes = {v["name"]: v for v in find(made, "volumes")[0]}
    assert volumes["job"]["secret"]["secretName"] == f"{NAME}-anygauge"
    assert find(volumes["secrets"], "items") == [[{"key": "token", "path": "HF_TOKEN"}]]
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert find(made, "nodeSelector") == [{"pool": "cards"}]
    assert {"fsGroup": 10001} in find(made, "securityContext")
    # For the checkpoint at a request to end.
    assert find(made, "terminationGracePeriodSeconds")[0] == 75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("image_pull_policy", "Always", "imagePullPolicy"),
        ("extra", {"priorityClassName": "high"}, "priorityClassName"),
        ("time_limit_s", 77, "activeDeadlineSeconds"),
        ("restarts", 3, None),
        ("queue", "team-a", "kueue.x-k8s.io/queue-name"),
        ("keep_s", 7, "ttlSecondsAfterFinished"),
        ("runtime_class", "cards", "runtimeClassName"),
    ],
)
def test_an_option_shows_in_every_kind_or_is_refused(
    kind: str, option: str, value: Any, shown: str | None
) -> None:
    try:
        made = manifest(rendered({"kind": kind, option: value}))
    except RunFileError as refusal:
        assert f"{option}: a {kind} " in str(refusal)
        return
    plain = manifest(rendered({"kind": kind}))
    if shown is not None:
        assert find(made, shown) and find(made, shown) != find(plain, shown)
    assert made != plain


@pytest.mark.parametrize("kind", KINDS)
def test_pods_with_gaudi_cards_have_their_runtime_class(kind: str) -> None:
    plan = rendered({"kind": kind}, profile=HpuBackend.launch)
    found = find(manifest(plan), "runtimeClassName")
    # A TrainJob's patch has no such field.
    pods = {"JobSet": 1, "TrainJob": 0}[kind]
    assert found == ["habana"] * pods
    notes = [note for note in plan.notes if "need runtimeClassName: habana" in note]
    assert bool(notes) is (kind == "TrainJob")
    change = {"runtime": "gaudi"} if kind == "TrainJob" else {"runtime_class": "none"}
    without = rendered({"kind": kind, **change}, profile=HpuBackend.launch)
    assert not find(manifest(without), "runtimeClassName")
    assert not [note for note in without.notes if "runtimeClassName" in note]


@pytest.mark.parametrize(
    ("kind", "rank", "coordinator"),
    [
        ("JobSet", "$JOB_COMPLETION_INDEX", f"{NAME}-node-0-0.{NAME}:4711"),
        ("TrainJob", "$PET_NODE_RANK", "$PET_MASTER_ADDR:4711"),
    ],
)
def test_each_kind_tells_the_agent_who_it_is(kind: str, rank: str, coordinator: str) -> None:
    command = find(manifest(rendered({"kind": kind})), "command")[0]
    assert command[command.index("--node-rank") + 1] == rank
    assert command[command.index("--coordinator") + 1] == coordinator
    assert command[command.index("--secrets") + 1] == "/anygauge/secrets"


def test_machines_and_restarts_are_those_of_the_job() -> None:
    jobset = manifest(rendered({"restarts": 3, "time_limit_s": 60}))["spec"]
    work = jobset["replicatedJobs"][0]["template"]["spec"]
    assert (work["parallelism"], work["completions"], work["backoffLimit"]) == (2, 2, 0)
    assert jobset["failurePolicy"]["maxRestarts"] == 3
    # What another attempt would meet again is not tried again.
    (rule,) = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["DeadlineExceeded", "PodFailurePolicy"]
    assert work["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    assert find(jobset, "activeDeadlineSeconds") == [60]
    train = manifest(rendered({"kind": "TrainJob"}))["spec"]
    assert (train["trainer"]["numNodes"], train["trainer"]["numProcPerNode"]) == (2, 8)


def test_a_network_that_was_asked_for_brings_what_pods_need() -> None:
    class Networked(Backend):
        device_type = "cpu"
        launch = CARDS
        fabrics = (
            Fabric(name="f", what="F", resource="example.com/f", capabilities=("IPC_LOCK",)),
        )

    profile = Networked().launch_profile("f")
    said = "with launch.fabric: f, pods must ask for example.com/f"
    with pytest.raises(RunFileError, match=said):
        rendered(profile=profile, fabric="f")
    change = {"resources": {"example.com/f": "4"}}
    added = find(manifest(rendered(change, profile, fabric="f")), "add")
    assert added and all("IPC_LOCK" in each for each in added)
    assert not any("IPC_LOCK" in each for each in find(manifest(rendered(change)), "add"))


def test_the_job_is_described_as_its_machines_see_it() -> None:
    plan = rendered()
    text = next(file.text for file in plan.files if file.path.endswith("job.json"))
    there = json.loads(text)
    assert there["run_directory"] == "/anygauge/runs/Tiny_Run.1"
    assert there["run_file"] == "/anygauge/runs/Tiny_Run.1/run.json"
    resumed = relocate(job(takes_over=True), "/runs/x")
    assert resumed == resumed.as_attempt(), "for the ranks to accept"
    assert (there["run_text"], there["working_directory"], there["resume"]) == (
        "name: t\n", "", True,
    )  # fmt: skip
    assert there["rendezvous"].startswith("file:///tmp/anygauge-")
    assert not {"profile", "network"} & set(there)
    assert plan.folders == ("/anygauge/runs", "/data", "/models")


MADE = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": NAME, "namespace": "train", "uid": "u-1"},
}
HEAD = f"jobset.sigs.k8s.io/jobset-name={NAME},batch.kubernetes.io/job-completion-index=0"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("HF_HOME", "/a 'folder' $HOME")
    return client_for("kubectl", KubernetesService, tmp_path, monkeypatch)


@pytest.fixture
def running(kubectl: Client, tmp_path: Path) -> ServiceJob:
    """A job that was handed over."""
    kubectl.answer("create", "-")
    kubectl.answer("create", "json", out=MADE)
    kubectl.answer("patch", "secret")
    return Kubernetes().submit(rendered(folder=tmp_path / "Tiny_Run.1"))


def pod(phase: str, **status: Any) -> dict[str, Any]:
    metadata = {"name": f"{NAME}-node-0-0-x", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def jobset(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"conditions": [{"status": "True", **one} for one in conditions]}}


def test_what_belongs_to_a_job_goes_into_a_secret_that_the_job_owns(
    kubectl: Client, running: ServiceJob, tmp_path: Path
) -> None:
    (_, given), (create, _), (patch, _) = kubectl.asked
    assert create[:4] == ["--namespace", "train", "create", "-f"]
    made = json.loads(given)
    assert (made["kind"], made["metadata"]["name"]) == ("Secret", f"{NAME}-anygauge")
    assert json.loads(patch[-1])["metadata"]["ownerReferences"] == [
        {"apiVersion": MADE["apiVersion"], "kind": "JobSet", "name": NAME, "uid": "u-1"}
    ]
    assert json.loads(made["stringData"]["variables.json"]) == {"HF_HOME": "/a 'folder' $HOME"}
    (tmp_path / "job.json").write_text(made["stringData"]["job.json"])
    assert Job.load(tmp_path / "job.json").token == "the token"
    assert running.record == {
        "kind": "JobSet", "name": NAME, "namespace": "train", "context": None,
    }  # fmt: skip
    assert Kubernetes().attach(running.record, tmp_path).record == running.record


def test_a_job_is_followed_from_the_queue_to_its_end(
    kubectl: Client, running: ServiceJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KubernetesService, "log_delay_s", 60.0)
    unschedulable = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes have enough example.com/card",
    }  # fmt: skip
    kubectl.answer("get", "jobset", out=jobset())
    kubectl.answer("get", "jobset", out=jobset())
    kubectl.answer("get", "jobset", out=jobset())
    kubectl.answer("get", "jobset", out=jobset({"type": "Completed"}))
    kubectl.answer("get", "pods", HEAD, out={"items": [pod("Pending", conditions=[unschedulable])]})
    kubectl.answer("get", "pods", HEAD, out={"items": [pod("Pending", conditions=[unschedulable])]})
    kubectl.answer("get", "pods", HEAD, out={"items": [pod("Running")]})
    kubectl.answer(
        *("logs", f"{NAME}-node-0-0-x"),
        out="a greeting of the image\n" + events_text(
            {"event": "step", "time": 1.0, "step": 1},
            {"event": "ended", "time": 2.0, "state": "ok", "exit_status": 0, "cause": ""},
        ),
    )  # fmt: skip
    events = list(running.events())
    texts = [event["text"] for event in events if event["event"] == "message"]
    assert texts[0] == (
        f"JobSet train/{NAME} waits (Unschedulable: 0/3 nodes have enough example.com/card)"
    )
    assert texts[-1] == f"JobSet train/{NAME} is complete"
    # The log is read again after each end of its stream, and nothing of it is told twice.
    assert [event["event"] for event in events if event["event"] != "message"] == ["step", "ended"]
    assert events[-1]["exit_status"] == 0
    assert (tmp_path / "Tiny_Run.1/logs/coordinator.log").read_text() == "a greeting of the image\n"


def test_a_failure_is_told_in_the_words_that_the_agent_left(
    kubectl: Client, running: ServiceJob
) -> None:
    failed = {"type": "Failed", "reason": "FailedJobs", "message": "jobset failed"}
    left = {"terminated": {"exitCode": 1, "message": "rank 3 on node-b failed with KeyError"}}
    kubectl.answer("get", "jobset", out=jobset(failed))
    kubectl.answer("get", "pods", out={"items": [
        pod("Failed", containerStatuses=[{"name": "node", "state": left}])
    ]})  # fmt: skip
    kubectl.answer("logs", status=1, err="the node is gone")
    final = list(running.events())[-1]
    assert (final["event"], final["state"], final["exit_status"]) == ("ended", "failed", 1)
    assert "jobset failed" in final["cause"]
    assert "rank 3 on node-b failed with KeyError" in final["cause"]


def test_an_image_that_cannot_be_pulled_is_named_while_it_waits(
    kubectl: Client, running: ServiceJob
) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling x:1"}}
    kubectl.answer("get", "jobset", out=jobset())
    kubectl.answer("get", "pods", out={"items": [
        pod("Pending", containerStatuses=[{"name": "node", "state": waiting}])
    ]})  # fmt: skip
    assert running.state().text == (
        f"JobSet train/{NAME} waits (ImagePullBackOff: Back-off pulling x:1)"
    )


def test_cancelling_gives_pods_time_for_a_checkpoint_and_then_none(
    kubectl: Client, running: ServiceJob
) -> None:
    kubectl.answer("delete")
    running.cancel()
    running.cancel()
    first, second, pods = (argv for argv, _ in kubectl.asked[-3:])
    assert first[2:4] == second[2:4] == ["delete", "jobset"]
    assert "--cascade=foreground" in first and "--grace-period=0" not in first
    # An object's own grace is not that of its pods.
    assert pods[2:4] == ["delete", "pods"] and "--grace-period=0" in pods and "--force" in pods
    assert f"jobset.sigs.k8s.io/jobset-name={NAME}" in pods
    gone = f'Error from server (NotFound): jobsets "{NAME}" not found'
    kubectl.answer("get", "jobset", status=1, err=gone)
    kubectl.answer("get", "pods", out={"items": []})
    final = list(running.events())[-1]
    assert (final["state"], final["exit_status"]) == ("cancelled", 143)


def test_a_job_that_someone_else_removed_is_lost(kubectl: Client, running: ServiceJob) -> None:
    kubectl.answer("get", "jobset", status=1, err="Error from server (NotFound): gone")
    kubectl.answer("get", "pods", out={"items": []})
    final = list(running.events())[-1]
    assert (final["state"], final["exit_status"]) == ("lost", LOST)


def test_a_cancellation_that_fails_while_following_is_told_and_goes_on(
    kubectl: Client, running: ServiceJob, tmp_path: Path
) -> None:
    kubectl.answer("get", "jobset", out=jobset())
    kubectl.answer("get", "pods", out={"items": []})
    kubectl.answer("delete", status=1, err="Unable to connect to the server")
    events = running.events()
    assert "waits for its pods" in next(events)["text"]
    running.cancel()
    told = next(events)
    assert told["level"] == "warning" and "kubectl cannot end JobSet" in told["text"]
    events.close()
    with pytest.raises(AnygaugeError, match="kubectl cannot end JobSet"):
        Kubernetes().attach(running.record, tmp_path).cancel()


@pytest.mark.parametrize(
    "said",
    [
        "Unable to connect to the server: timeout",
        # Only what the server reports as not found is gone.
        "exec: executable auth-plugin not found",
    ],
)
def test_a_cluster_that_does_not_answer_is_no_end(
    kubectl: Client, running: ServiceJob, said: str
) -> None:
    kubectl.answer("get", "jobset", status=1, err=said)
    kubectl.answer("get", "jobset", out=jobset({"type": "Completed"}))
    kubectl.answer("get", "pods", out={"items": []})
    events = list(running.events())
    assert events[0]["text"] == f"the cluster does not answer: {said}"
    assert events[-1]["state"] == "ok"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"status": 1, "err": 'error: no matches for kind "JobSet"\n'},
            'refused the job: error: no matches for kind "Job',
        ),
        ({"out": "warning: no JSON"}, "kubectl printed no JobSet"),
    ],
)
def test_a_refusal_of_kubectl_is_quoted_and_leaves_nothing(
    kubectl: Client, tmp_path: Path, answer: dict[str, Any], said: str
) -> None:
    kubectl.answer("create", "-")
    kubectl.answer("create", "json", **answer)
    kubectl.answer("delete", "jobset,secret")
    with pytest.raises(AnygaugeError, match=said):
        Kubernetes().submit(rendered(folder=tmp_path / "Tiny_Run.1"))
    # By this submission's mark: another job of the same name is not ours to remove.
    assert "anygauge.io/submission=d94772fd" in kubectl.asked[-1][0]
