"""Kubernetes: one agent in each pod of a JobSet or a TrainJob, through kubectl.

The manifest holds names, but no values of yours: what belongs to the job is in a Secret, which is
made at submission and deleted with the job. Pods mount your own Secrets by their names.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, StringConstraints, model_validator

from anygauge.interface import (
    AnygaugeError,
    Job,
    JobState,
    LaunchProfile,
    Options,
    Plan,
    PlannedFile,
    PlannedProcess,
    RunFileError,
    variables_file,
)
from anygauge.util.clients import client_output, run_client
from anygauge_clouds.service_job import Service, ServiceLauncher
from anygauge_clouds.submission import (
    CloudOptions,
    Folder,
    Variable,
    fill,
    merge,
    read_template,
    relocate,
    service_name,
    submission_id,
)

Kind = Literal["JobSet", "TrainJob"]
_TEMPLATES = read_template("kubernetes.yaml")

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}$")]
"""A name as Kubernetes has it for namespaces, claims and volumes (RFC 1123 label)."""
Dotted = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253)]
"""A name of a Secret or class (RFC 1123 subdomain)."""
Quantity = Annotated[
    str, StringConstraints(pattern=r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")
]
Capability = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z_]*$")]
_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
Key = Annotated[str, StringConstraints(pattern=_KEY)]
"""A resource's key, with or without a domain in front."""

_NAME_LIMIT = 45
"""A pod's name and host name are made from the job's, and may have 63 characters."""

_JOB, _SECRETS, _SHM = "/anygauge/job", "/anygauge/secrets", "/dev/shm"
_RESERVED = (_JOB, _SECRETS, _SHM)
"""Where pods have what the launcher itself mounts."""


def _check_relative(path: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-][A-Za-z0-9._/-]*", path) or ".." in path.split("/"):
        raise ValueError("a folder of the claim is needed: a relative path without '..'")
    return path


class Claim(Options):
    """A PersistentVolumeClaim, and where pods have it.

    Attributes:
        claim: its name.
        path: where it is mounted.
        sub_path: a folder of it.
        read_only: pods cannot write to it.
    """

    claim: Dotted
    path: Folder
    sub_path: Annotated[str, AfterValidator(_check_relative)] | None = None
    read_only: bool = False


class Storage(Claim):
    """The claim that holds run directories; all pods write to it (ReadWriteMany)."""

    path: Folder = "/anygauge/runs"
    read_only: Literal[False] = False


class SecretRef(Options):
    """One entry of a Secret in the cluster.

    Attributes:
        secret: the Secret's name.
        key: of the entry.
    """

    secret: Dotted
    key: str = Field(pattern=r"^[-._a-zA-Z0-9]+$")


class KubernetesOptions(CloudOptions):
    """Options of the kubernetes launcher; `extra` is of the pod.

    Attributes:
        kind: of the object that the job is; a TrainJob makes a JobSet of itself.
        name: of the object; by default it is made from the run's name.
        namespace: of all that the job makes.
        context: kubectl's; its current one by default.
        storage: where run directories are.
        volumes: further claims, for data and models.
        secrets: variable -> the entry of a Secret that it gets its value from.
        resources: of each pod beyond its devices, as limit and as request: memory, cpu, network
            devices; the backend's own by default.
        device_resource: used instead of the backend's, such as a slice of a card.
        runtime_class: of pods with devices, instead of the backend's; ``none``: the cluster's.
        capabilities: that the container is given, beside the backend's.
        image_pull_policy: when a node fetches the image; the cluster's by default.
        shm: memory for /dev/shm; loaders and collectives of one machine need it.
        restarts: how often the cluster starts all pods again, from the newest checkpoint, after
            it lost or pre-empted one.
        keep_s: seconds after which an ended job is removed; a week by default.
        time_limit_s: seconds after which the cluster ends the job.
        runtime: of TrainJob.
        queue: of Kueue (label kueue.x-k8s.io/queue-name).
    """

    kind: Kind = "JobSet"
    name: str | None = Field(None, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
    namespace: Label = "default"
    context: str | None = None
    storage: Storage
    volumes: list[Claim] = Field(default_factory=list)
    secrets: dict[Variable, SecretRef] = Field(default_factory=dict)
    resources: dict[Key, Quantity] = Field(default_factory=dict)
    device_resource: Key | None = None
    runtime_class: Dotted | None = None
    # Loaders and collectives of one machine need it.
    shm: str = Field("16Gi", pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")
    capabilities: list[Capability] = Field(default_factory=list)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    restarts: int = Field(0, ge=0, le=100)
    time_limit_s: int | None = Field(None, ge=1)
    keep_s: int | None = Field(None, ge=0)
    runtime: Dotted | None = None
    queue: Label | None = None

    @property
    def claims(self) -> list[Claim]:
        """What pods mount of the user's."""
        return [self.storage, *self.volumes]

    @model_validator(mode="after")
    def _go_together(self) -> KubernetesOptions:
        paths = [*(claim.path for claim in self.claims), *_RESERVED]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            own = ", ".join(_RESERVED)
            raise ValueError(f"{twice[0]} is mounted twice, or the launcher mounts it ({own})")
        for key, quantity in self.resources.items():
            if "/" in key and not quantity.isdecimal():
                raise ValueError(
                    f"resources.{key}: {quantity!r}: devices are whole numbers (a quoted '4')"
                )
        huge = [key for key in self.resources if key.startswith("hugepages-")]
        if huge and not {"memory", "cpu"} & self.resources.keys():
            raise ValueError(f"resources.{huge[0]}: Kubernetes requires memory or cpu beside it")
        if self.kind == "TrainJob":
            for field in ("restarts", "image_pull_policy", "keep_s", "runtime_class"):
                if getattr(self, field) not in (0, None):
                    raise ValueError(
                        f"{field}: a TrainJob takes this only from its runtime; leave it out"
                    )
        elif self.runtime is not None:
            raise ValueError(f"runtime: belongs to kind TrainJob, and kind is {self.kind}")
        if self.name is not None and len(self.name) > _NAME_LIMIT:
            raise ValueError(
                f"name: {len(self.name)} characters; pods of a {self.kind} are named after it, "
                f"which leaves {_NAME_LIMIT}"
            )
        return self

    def check(self, job: Job, profile: LaunchProfile) -> None:
        """Refuse what does not go with the job (`RunFileError`)."""
        device = self.device_resource or profile.cluster_resource
        if device is not None and device in self.resources:
            raise RunFileError(
                f"launch.options.resources.{device}: launch.devices "
                f"({job.launch.devices}) says how many a pod gets"
            )
        wanted = profile.network_resource
        if wanted is not None and wanted not in self.resources:
            raise RunFileError(
                f"launch.options.resources: with launch.fabric: {job.launch.fabric}, pods must "
                f"ask for {wanted}; add it, with the number that each machine has"
            )

    def notes_for(self, profile: LaunchProfile) -> tuple[str, ...]:
        """What the user should know before."""
        wanted = profile.runtime_class
        if self.kind != "TrainJob" or wanted is None or self.runtime is not None:
            return super().notes_for(profile)
        return (
            *super().notes_for(profile),
            f"pods with devices need runtimeClassName: {wanted}, which a TrainJob takes from its "
            "runtime alone: name one that has it in launch.options.runtime",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesService(Service):
    """The object of one job in a cluster."""

    owner = "the cluster"
    gone = r"\(NotFound\)"

    kind: Kind
    name: str
    namespace: str
    context: str | None = None

    @property
    def title(self) -> str:
        """For humans."""
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def pods(self) -> str:
        """Selector of its pods; a TrainJob makes a JobSet of its name."""
        return f"jobset.sigs.k8s.io/jobset-name={self.name}"

    @property
    def coordinator(self) -> str:
        """Selector of the pod of the coordinator, whose output is about the whole job."""
        more = ",jobset.sigs.k8s.io/replicatedjob-name=node" if self.kind == "TrainJob" else ""
        return f"{self.pods},batch.kubernetes.io/job-completion-index=0{more}"

    @property
    def secret(self) -> str:
        """Name of the Secret with the job's files."""
        return f"{self.name}-anygauge"

    def kubectl(self, *words: str) -> tuple[str, ...]:
        """A command for this object's namespace."""
        context = () if self.context is None else ("--context", self.context)
        return ("kubectl", *context, "--namespace", self.namespace, *words)

    def state(self) -> JobState:
        """See `Service.state`."""
        found = self._get(self.kind.lower(), self.name)
        if isinstance(found, JobState):
            return found
        conditions = {
            one.get("type"): one
            for one in found.get("status", {}).get("conditions", [])
            if one.get("status") == "True"
        }
        pod = self._coordinator_pod()
        if "Failed" in conditions:
            text = _reason(conditions["Failed"]) + (_cause_left(pod) if pod else "")
            return JobState(phase="failed", text=f"{self.title} failed{text}")
        if {"Succeeded", "Complete", "Completed"} & conditions.keys():
            return JobState(phase="done", text=f"{self.title} is complete")
        if _has_begun(pod):
            return JobState(phase="running", text=f"{self.title} runs")
        if "Suspended" in conditions:
            return JobState(phase="waiting", text=f"{self.title} is suspended (in a queue)")
        return JobState(phase="waiting", text=f"{self.title} waits{_why_waiting(pod)}")

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`."""
        pod = self._coordinator_pod()
        if pod is None or not _has_begun(pod):
            return None
        return self.kubectl("logs", "-f", pod["metadata"]["name"])

    def stop(self, *, force: bool) -> None:
        """See `Service.stop`; the pods' grace is long enough for a checkpoint."""
        delete = ("delete", self.kind.lower(), self.name, "--ignore-not-found")
        # In the foreground: the object is there until its pods have ended.
        self.end("kubectl", self.kubectl(*delete, "--cascade=foreground", "--wait=false"))
        if force:
            # The object's own grace is not that of its pods.
            pods = ("delete", "pods", "-l", self.pods, "--grace-period=0", "--force")
            self.end("kubectl", self.kubectl(*pods, "--wait=false"))

    def _coordinator_pod(self) -> dict[str, Any] | None:
        found = self._get("pods", "-l", self.coordinator)
        pods = [] if isinstance(found, JobState) else found.get("items", [])
        made = [(pod["metadata"].get("creationTimestamp", ""), pod) for pod in pods]
        return max(made, key=lambda one: one[0])[1] if made else None

    def _get(self, *words: str) -> dict[str, Any] | JobState:
        out = self.answer(self.kubectl("get", *words, "-o", "json", "--request-timeout=20s"))
        if isinstance(out, JobState):
            return out
        try:
            return dict(json.loads(out))
        except ValueError:
            return JobState(phase="silent", text="kubectl printed no JSON")


class Kubernetes(ServiceLauncher):
    """Hands a job to a cluster by kubectl."""

    service = KubernetesService
    called = "a Kubernetes job"

    def render(self, job: Job, options: KubernetesOptions, profile: LaunchProfile) -> Plan:
        """The manifest, the job file, and the commands that take them."""
        options.check(job, profile)
        here = Path(job.run_directory)
        there = relocate(job, f"{options.storage.path}/{here.name}")
        service = KubernetesService(
            kind=options.kind,
            name=options.name or service_name(job, _NAME_LIMIT),
            namespace=options.namespace,
            context=options.context,
        )
        create = service.kubectl("create", "-f", str(here / "manifest.yaml"))
        manifest = yaml.safe_dump(_manifest(there, options, profile, service), sort_keys=False)
        return Plan(
            files=(
                PlannedFile(path=str(here / "job.json"), text=there.dump(), mode=0o600),
                variables_file(here),
                PlannedFile(path=str(here / "manifest.yaml"), text=manifest),
            ),
            processes=(
                PlannedProcess(node_rank=0, host=service.title, argv=(*create, "-o", "json")),
            ),
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": create,
                "secret": (
                    *service.kubectl("create", "secret", "generic", service.secret),
                    *(f"--from-file=job.json={here / 'job.json'}",),
                    *(f"--from-file=variables.json={here / 'variables.json'}",),
                ),
                "status": service.kubectl("get", options.kind.lower(), service.name),
                "logs": service.kubectl("logs", "-f", "-l", service.coordinator, "--tail=-1"),
                "cancel": service.kubectl("delete", options.kind.lower(), service.name),
            },
            folders=(*(claim.path for claim in options.claims), *options.in_image),
            notes=options.notes_for(profile),
            record=service.record,
        )

    def create(self, plan: Plan) -> None:
        """Create the Secret and the object, and have the object own the Secret; after a failure,
        nothing is left in the cluster."""
        plan.write_files()
        job_file, variables, manifest = (Path(file.path) for file in plan.files)
        service = KubernetesService(**plan.record)
        labels = yaml.safe_load(manifest.read_text())["metadata"]["labels"]
        metadata = {"name": service.secret, "namespace": service.namespace, "labels": labels}
        files = {file.name: file.read_text() for file in (job_file, variables)}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": files}
        try:
            _carry_out(service.kubectl("create", "-f", "-"), "the job's Secret", json.dumps(secret))
            made = json.loads(_carry_out(plan.processes[0].argv, "the job"))
            owner = {
                **{"apiVersion": made["apiVersion"], "kind": made["kind"]},
                **{"name": made["metadata"]["name"], "uid": made["metadata"]["uid"]},
            }
            # The cluster deletes it with the job.
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            _carry_out(service.kubectl("patch", "secret", service.secret, "-p", patch), "its owner")
        except BaseException as error:
            # Where kubectl did not answer, it may have created the object all the same. What has
            # this submission's label is deleted, and nothing else.
            kinds = ("delete", f"{service.kind.lower()},secret", "--wait=false")
            label = f"{_SUBMISSION_LABEL}={labels[_SUBMISSION_LABEL]}"
            with contextlib.suppress(AnygaugeError):
                run_client(service.kubectl(*kinds, "-l", label), timeout_s=30)
            if isinstance(error, (ValueError, KeyError, TypeError)):
                raise AnygaugeError(f"kubectl printed no {service.kind}: {error!r}") from error
            raise


def _carry_out(command: Sequence[str], what: str, stdin: str | None = None) -> str:
    done = run_client(command, stdin=stdin)
    if done.returncode:
        raise AnygaugeError(f"kubectl refused {what}: {client_output(done)}")
    return done.stdout


_SUBMISSION_LABEL = "anygauge.io/submission"
"""The label by which a submission finds what it has created."""


def _manifest(
    job: Job, own: KubernetesOptions, profile: LaunchProfile, service: KubernetesService
) -> dict[str, Any]:
    """The object that kubectl creates."""
    rank, coordinator = {
        "JobSet": ("$JOB_COMPLETION_INDEX", f"{service.name}-node-0-0.{service.name}"),
        "TrainJob": ("$PET_NODE_RANK", "$PET_MASTER_ADDR"),
    }[own.kind]
    # It holds no free text of the user's, which a cluster might interpret.
    command = [
        *(own.python, "-m", "anygauge.launch.agent", "--job", f"{_JOB}/job.json"),
        *("--node-rank", rank, "--coordinator", f"{coordinator}:{job.launch.port}"),
        *("--variables", f"{_JOB}/variables.json", "--grace", f"{own.grace_s:g}"),
        *(("--secrets", _SECRETS) if own.secrets else ()),
        *("--cause-file", "/dev/termination-log"),
    ]
    device = own.device_resource or profile.cluster_resource
    resources = {device: job.launch.devices} if device is not None else {}
    flags = [flag.partition("=") for flag in profile.container_flags]
    added = {value.upper() for name, _, value in flags if name == "--cap-add"}
    added |= {*profile.capabilities, *own.capabilities}
    labels = {_SUBMISSION_LABEL: submission_id(job), "kueue.x-k8s.io/queue-name": own.queue}
    runtime_class = own.runtime_class or profile.runtime_class
    mounts, volumes = _storage(own, service)
    values = {
        **{"name": service.name, "namespace": own.namespace},
        "labels": {name: value for name, value in labels.items() if value} or None,
        **{"nodes": job.launch.nodes, "devices": job.launch.devices, "command": command},
        **{"image": own.image_for(job, profile), "image_pull_policy": own.image_pull_policy},
        "resources": {**resources, **profile.node_resources, **own.resources},
        "security_context": {"capabilities": {"add": sorted(added)}} if added else None,
        **{"mounts": mounts, "volumes": volumes},
        "runtime_class": None if runtime_class == "none" else runtime_class,
        "runtime": own.runtime or "torch-distributed",
        **{"restarts": own.restarts, "time_limit_s": own.time_limit_s},
        "keep_s": 7 * 86400 if own.keep_s is None else own.keep_s,
        "grace_s": math.ceil(job.stop_grace_s + own.grace_s) + 10,
    }
    template = _TEMPLATES[own.kind]
    pod = merge(fill(template["pod"], values), own.extra)
    return dict(fill(template["object"], {**values, "pod": pod}))


def _storage(
    own: KubernetesOptions, service: KubernetesService
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The mounts of a container, and the volumes; a claim that is mounted twice has one volume."""
    names = {
        claim: f"claim{n}" for n, claim in enumerate(dict.fromkeys(c.claim for c in own.claims))
    }
    mounts: list[dict[str, Any]] = [{"name": "job", "mountPath": _JOB, "readOnly": True}]
    volumes: list[dict[str, Any]] = [{"name": "job", "secret": {"secretName": service.secret}}]
    if own.secrets:
        mounts.append({"name": "secrets", "mountPath": _SECRETS, "readOnly": True})
        sources = [
            {"secret": {"name": ref.secret, "items": [{"key": ref.key, "path": variable}]}}
            for variable, ref in own.secrets.items()
        ]
        volumes.append({"name": "secrets", "projected": {"sources": sources}})
    for claim in own.claims:
        sub_path = {} if claim.sub_path is None else {"subPath": claim.sub_path}
        read_only = {"readOnly": True} if claim.read_only else {}
        mount = {"name": names[claim.claim], "mountPath": claim.path}
        mounts.append({**mount, **sub_path, **read_only})
    for name, volume in names.items():
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": name}})
    mounts.append({"name": "shm", "mountPath": _SHM})
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": own.shm}})
    return mounts, volumes


def _has_begun(pod: Mapping[str, Any] | None) -> bool:
    return (pod or {}).get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _reason(condition: Mapping[str, Any]) -> str:
    text = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    return f" ({text})" if text else ""


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _cause_left(pod: Mapping[str, Any]) -> str:
    """The cause that the agent left as the container's termination message."""
    for container in _containers(pod):
        ended = container.get("state", {}).get("terminated") or {}
        if ended.get("message"):
            return f"\n{ended['message']}"
        if ended.get("reason") and ended.get("exitCode"):
            return f"\n{container.get('name')}: {ended['reason']}, exit status {ended['exitCode']}"
    return ""


def _why_waiting(pod: Mapping[str, Any] | None) -> str:
    if pod is None:
        return " for its pods"
    for condition in pod.get("status", {}).get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _reason(condition)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return _reason(waiting)
    return " for its first pod"
