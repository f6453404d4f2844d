"""What ``launch.options`` may hold for Kubernetes, checked before anything is submitted."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from anygauge.interface import (
    Job,
    LaunchProfile,
    Options,
    RunFileError,
)
from anygauge_clouds.submission import CloudOptions, Folder, Variable

Kind = Literal["JobSet", "TrainJob"]

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
Label = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}$")]
"""A name as Kubernetes has it for namespaces, claims and volumes (RFC 1123 label)."""
JobName = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
Dotted = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253)]
"""A name of a Secret, class or account (RFC 1123 subdomain)."""
Quantity = Annotated[
    str, StringConstraints(pattern=r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")
]
Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]
Capability = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z_]*$")]


def _below(path: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-][A-Za-z0-9._/-]*", path) or ".." in path.split("/"):
        raise ValueError("a folder of the claim is needed: a relative path without '..'")
    return path


SubPath = Annotated[str, AfterValidator(_below)]
SecretKey = Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$")]

_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
Key = Annotated[str, StringConstraints(pattern=_KEY)]
"""A label's or resource's key, with or without a domain in front."""
Value = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]

NAME_LIMIT = 45
"""A pod's name and host name are made from the job's, and may have 63 characters."""


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
    sub_path: SubPath | None = None
    read_only: bool = False


class Storage(Claim):
    """The claim that holds run directories; all pods write to it (ReadWriteMany)."""

    path: Folder = "/anygauge/runs"
    read_only: Literal[False] = False


class SecretRef(Options):
    """One entry of a Secret in the cluster."""

    secret: Dotted
    key: SecretKey


class Toleration(Options):
    """A toleration in Kubernetes' own fields."""

    key: Key | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Value | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


Id = Annotated[int, Field(ge=0, lt=2**31)]


class KubernetesOptions(CloudOptions):
    """Options of the kubernetes launcher.

    Attributes:
        kind: of the object that the job is; a TrainJob makes a JobSet of itself.
        name: of the object; by default it is made from the run's name.
        context: kubectl's; its current one by default.
        storage: where run directories are.
        volumes: further claims, for data and models.
        secrets: variable -> the entry of a Secret that it gets its value from.
        resources: of each pod beyond its devices, as limit and as request: memory, cpu, network
            devices; the backend's own by default.
        device_resource: used instead of the backend's, such as a slice of a card.
        runtime_class: of pods with devices, instead of the backend's; ``none``: the cluster's.
        shm: memory for /dev/shm; loaders and collectives of one machine need it.
        restarts: how often the cluster starts all pods again, from the newest checkpoint, after
            it lost or pre-empted one.
        keep_s: seconds after which an ended job is removed; a week by default.
        time_limit_s: seconds after which the cluster ends the job.
        run_as_user: user id of pods, instead of the image's.
        run_as_group: their group id.
        fs_group: group that owns what claims hold, so that users other than root may write.
        runtime: of TrainJob.
        queue: of Kueue (label kueue.x-k8s.io/queue-name).
    """

    kind: Kind = "JobSet"
    name: JobName | None = None
    namespace: Label = "default"
    context: str | None = None
    storage: Storage
    volumes: list[Claim] = Field(default_factory=list)
    secrets: dict[Variable, SecretRef] = Field(default_factory=dict)
    resources: dict[Key, Quantity] = Field(default_factory=dict)
    device_resource: Key | None = None
    runtime_class: Dotted | None = None
    shm: Size = "16Gi"
    capabilities: list[Capability] = Field(default_factory=list)
    host_ipc: bool = False
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: list[Dotted] = Field(default_factory=list)
    node_selector: dict[Key, Value] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    service_account: Dotted | None = None
    priority_class: Dotted | None = None
    run_as_user: Id | None = None
    run_as_group: Id | None = None
    fs_group: Id | None = None
    restarts: Annotated[int, Field(ge=0, le=100)] = 0
    time_limit_s: Annotated[int, Field(ge=1)] | None = None
    keep_s: Annotated[int, Field(ge=0)] | None = None
    runtime: Dotted | None = None
    queue: Label | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """Where pods have files."""
        return (self.storage.path, *(volume.path for volume in self.volumes), *self.in_image)

    @model_validator(mode="after")
    def _go_together(self) -> KubernetesOptions:
        paths = [self.storage.path, *(volume.path for volume in self.volumes), *RESERVED]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            own = ", ".join(RESERVED)
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
            for field in (
                *("restarts", "host_ipc", "priority_class", "image_pull_policy", "keep_s"),
                "runtime_class",
            ):
                if getattr(self, field) not in (0, False, None):
                    raise ValueError(
                        f"{field}: a TrainJob takes this only from its runtime; leave it out"
                    )
        if self.kind != "TrainJob" and self.runtime is not None:
            raise ValueError(f"runtime: belongs to kind TrainJob, and kind is {self.kind}")
        if self.name is not None and len(self.name) > NAME_LIMIT:
            raise ValueError(
                f"name: {len(self.name)} characters; pods of a {self.kind} are named after it, "
                f"which leaves {NAME_LIMIT}"
            )
        return self

    def check(self, job: Job, profile: LaunchProfile) -> None:
        """What depends on the job.

        Raises:
            RunFileError: the options do not go with it.
        """
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

    def runtime_class_for(self, profile: LaunchProfile) -> str | None:
        """The RuntimeClass of pods with devices; None: the cluster's default."""
        found = self.runtime_class or profile.runtime_class
        return None if found == "none" else found

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

    def all_resources(self, devices: int, profile: LaunchProfile) -> dict[str, str | int]:
        """What each pod asks for: its devices, and the resources that belong to them."""
        device = self.device_resource or profile.cluster_resource
        wanted: dict[str, str | int] = {**profile.node_resources, **self.resources}
        return {**({} if device is None else {device: devices}), **wanted}


JOB, SECRETS, SHM = "/anygauge/job", "/anygauge/secrets", "/dev/shm"
RESERVED = (JOB, SECRETS, SHM)
"""Where pods have what the launcher itself mounts."""
