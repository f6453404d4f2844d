"""Kubernetes' objects: pods that run agents, and the two kinds that make one job of several.

Sources: kubernetes-sigs/jobset 0.12, kubeflow/trainer 2.3 (TrainJob).
"""

from __future__ import annotations

import math
from typing import Any

from anygauge.interface import Job, LaunchProfile
from anygauge_clouds.kubernetes_options import JOB, SECRETS, SHM, Claim, KubernetesOptions
from anygauge_clouds.submission import submission_id

Object = dict[str, Any]

MANAGER = "anygauge.io/launcher"
"""Who makes a TrainJob's patches."""

SUBMISSION_LABEL = "anygauge.io/submission"
"""The label by which a submission finds what it has created."""


def manifest_of(job: Job, own: KubernetesOptions, profile: LaunchProfile, name: str) -> Object:
    """The object that kubectl creates."""
    make = {"JobSet": _jobset, "TrainJob": _trainjob}
    api, spec = make[own.kind](job, own, profile, name)
    metadata: Object = {"name": name, "namespace": own.namespace}
    labels = {
        **({SUBMISSION_LABEL: submission_id(job)} if submission_id(job) else {}),
        **({} if own.queue is None else {"kueue.x-k8s.io/queue-name": own.queue}),
    }
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": api, "kind": own.kind, "metadata": metadata, "spec": spec}


def secret_of(name: str) -> str:
    """The Secret that holds a job's files."""
    return f"{name}-anygauge"


def _agent(job: Job, own: KubernetesOptions, node_rank: str, coordinator: str) -> list[str]:
    """The agent's command: it holds no free text of the user's, which a cluster might interpret."""
    return [
        *(own.python, "-m", "anygauge.launch.agent", "--job", f"{JOB}/job.json"),
        *("--node-rank", node_rank, "--coordinator", f"{coordinator}:{job.launch.port}"),
        *("--variables", f"{JOB}/variables.json", "--grace", f"{own.grace_s:g}"),
        *(("--secrets", SECRETS) if own.secrets else ()),
        *("--cause-file", "/dev/termination-log"),
    ]


def _container(
    job: Job, own: KubernetesOptions, profile: LaunchProfile, command: list[str]
) -> Object:
    resources = own.all_resources(job.launch.devices, profile)
    added = sorted({*_capabilities(profile), *profile.capabilities, *own.capabilities})
    return {
        "name": "node",
        "image": own.image_for(job, profile),
        **({} if own.image_pull_policy is None else {"imagePullPolicy": own.image_pull_policy}),
        "command": command,
        "resources": {"limits": resources, "requests": dict(resources)},
        **({"securityContext": {"capabilities": {"add": added}}} if added else {}),
        "volumeMounts": _mounts(own),
    }


def _claims(own: KubernetesOptions) -> list[tuple[str, Claim]]:
    """Each mount with its volume's name; a claim that is mounted twice has one volume."""
    mounts = [own.storage, *own.volumes]
    names = list(dict.fromkeys(mount.claim for mount in mounts))
    return [(f"claim{names.index(mount.claim)}", mount) for mount in mounts]


def _mounts(own: KubernetesOptions) -> list[Object]:
    return [
        {"name": "job", "mountPath": JOB, "readOnly": True},
        *([{"name": "secrets", "mountPath": SECRETS, "readOnly": True}] if own.secrets else []),
        *(
            {
                "name": volume,
                "mountPath": mount.path,
                **({} if mount.sub_path is None else {"subPath": mount.sub_path}),
                **({"readOnly": True} if mount.read_only else {}),
            }
            for volume, mount in _claims(own)
        ),
        {"name": "shm", "mountPath": SHM},
    ]


def _volumes(own: KubernetesOptions, name: str) -> list[Object]:
    secrets = [
        {"secret": {"name": ref.secret, "items": [{"key": ref.key, "path": variable}]}}
        for variable, ref in own.secrets.items()
    ]
    claims = {volume: mount.claim for volume, mount in _claims(own)}
    return [
        {"name": "job", "secret": {"secretName": secret_of(name)}},
        *([{"name": "secrets", "projected": {"sources": secrets}}] if secrets else []),
        *(
            {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
            for volume, claim in claims.items()
        ),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": own.shm}},
    ]


def _placement(own: KubernetesOptions) -> Object:
    """Where pods run and as whom."""
    found: Object = {}
    if own.node_selector:
        found["nodeSelector"] = dict(own.node_selector)
    if own.tolerations:
        found["tolerations"] = [t.model_dump(exclude_none=True) for t in own.tolerations]
    if own.service_account is not None:
        found["serviceAccountName"] = own.service_account
    if own.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in own.image_pull_secrets]
    ids = {
        "runAsUser": own.run_as_user,
        "runAsGroup": own.run_as_group,
        "fsGroup": own.fs_group,
    }
    if any(value is not None for value in ids.values()):
        found["securityContext"] = {key: one for key, one in ids.items() if one is not None}
    return found


def _pod(
    job: Job, own: KubernetesOptions, profile: LaunchProfile, name: str, container: Object
) -> Object:
    """The pods that have devices."""
    runtime_class = own.runtime_class_for(profile)
    return {
        "restartPolicy": "Never",
        **_placement(own),
        **({} if runtime_class is None else {"runtimeClassName": runtime_class}),
        **_priority(own),
        **({"hostIPC": True} if own.host_ipc else {}),
        "terminationGracePeriodSeconds": _grace_s(job, own),
        "containers": [container],
        "volumes": _volumes(own, name),
    }


def _kept_s(own: KubernetesOptions) -> int:
    return 7 * 86400 if own.keep_s is None else own.keep_s


def _priority(own: KubernetesOptions) -> Object:
    return {} if own.priority_class is None else {"priorityClassName": own.priority_class}


def _grace_s(job: Job, own: KubernetesOptions) -> int:
    """Seconds for the checkpoint of ranks that are asked to end, then for ranks that do not end."""
    return math.ceil(job.stop_grace_s + own.grace_s) + 10


def _limit(own: KubernetesOptions) -> Object:
    return {} if own.time_limit_s is None else {"activeDeadlineSeconds": own.time_limit_s}


def _capabilities(profile: LaunchProfile) -> list[str]:
    """Those that the backend's container flags name."""
    return [
        flag.partition("=")[2].upper()
        for flag in profile.container_flags
        if flag.startswith("--cap-add=")
    ]


# Exit statuses after which another attempt would fail as well: a rank failed, or the run file is
# wrong. A machine that was lost, a request to end and a kill have others.
_FINAL: Object = {
    "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2]}}]
}


def _jobset(
    job: Job, own: KubernetesOptions, profile: LaunchProfile, name: str
) -> tuple[str, Object]:
    command = _agent(job, own, "$JOB_COMPLETION_INDEX", f"{name}-node-0-0.{name}")
    pod = _pod(job, own, profile, name, _container(job, own, profile, command))
    work = {
        **{
            "parallelism": job.launch.nodes,
            "completions": job.launch.nodes,
            "completionMode": "Indexed",
        },
        **{"backoffLimit": 0, **_limit(own), "podFailurePolicy": _FINAL},
        "template": {"spec": pod},
    }
    return "jobset.x-k8s.io/v1alpha2", {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": own.restarts,
            # Nor does another attempt help when the time is over.
            "rules": [
                {
                    "name": "final",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["DeadlineExceeded", "PodFailurePolicy"],
                }
            ],
        },
        "ttlSecondsAfterFinished": _kept_s(own),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": work}}],
    }


def _trainjob(
    job: Job, own: KubernetesOptions, profile: LaunchProfile, name: str
) -> tuple[str, Object]:
    command = _agent(job, own, "$PET_NODE_RANK", "$PET_MASTER_ADDR")
    container = _container(job, own, profile, command)
    patch = {
        **_placement(own),
        "terminationGracePeriodSeconds": _grace_s(job, own),
        "containers": [
            {
                key: value
                for key, value in container.items()
                if key in ("name", "volumeMounts", "securityContext")
            }
        ],
        "volumes": _volumes(own, name),
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    spec: Object = {
        "runtimeRef": {
            "name": own.runtime or "torch-distributed",
            "kind": "ClusterTrainingRuntime",
            "apiGroup": "trainer.kubeflow.org",
        },
        "trainer": {
            "numNodes": job.launch.nodes,
            "numProcPerNode": job.launch.devices,
            "image": container["image"],
            "command": command,
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }
        ],
        **_limit(own),
    }
    return "trainer.kubeflow.org/v1alpha1", spec
