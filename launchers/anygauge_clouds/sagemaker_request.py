"""What ``launch.options`` may hold for SageMaker, and the request that the service gets for it.

Patterns, limits and fields: the service's own model, CreateTrainingJob.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from anygauge.interface import (
    REPOSITORY_VARIABLE,
    Job,
    Options,
    RunFileError,
)
from anygauge_clouds.submission import CloudOptions, Variable

Role = Annotated[
    str, StringConstraints(pattern=r"^arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+$")
]
S3 = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$")]
SecretArn = Annotated[
    str, StringConstraints(pattern=r"^arn:aws[a-z\-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:\S+$")
]
Channel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_ECR = r"^\d{12}\.dkr\.ecr(-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/\S+$"

Registry = Annotated[str, StringConstraints(pattern=_ECR, max_length=255)]

FABRICS = ("efa", "ethernet")
"""Networks between machines that instance types have."""

STOP_S = 120
"""Seconds from SIGTERM to SIGKILL."""

CARDS = {
    "ml.p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "ml.p3dn": {"24xlarge": 8},
    "ml.p4d": {"24xlarge": 8},
    "ml.p4de": {"24xlarge": 8},
    "ml.p5": {"4xlarge": 1, "48xlarge": 8},
    "ml.p5e": {"48xlarge": 8},
    "ml.p5en": {"48xlarge": 8},
    "ml.p6-b200": {"48xlarge": 8},
    "ml.g4dn": {
        "xlarge": 1,
        "2xlarge": 1,
        "4xlarge": 1,
        "8xlarge": 1,
        "16xlarge": 1,
        "12xlarge": 4,
    },
    **{
        family: {
            **{f"{n}xlarge": 1 for n in ("", "2", "4", "8", "16")},
            **{"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
        }
        for family in ("ml.g5", "ml.g6", "ml.g6e")
    },
}
"""Accelerators of an instance type, as AWS publishes them; others are not counted."""


class FileSystem(Options):
    """A file system as a channel; it is shared by all machines.

    Attributes:
        id: ``fs-...``.
        path: folder in it.
    """

    id: Annotated[str, StringConstraints(pattern=r"^fs-[0-9a-f]{8,17}$")]
    type: Literal["EFS", "FSxLustre"]
    path: Annotated[str, StringConstraints(pattern=r"^/\S*$", max_length=4096)]
    access: Literal["ro", "rw"] = "ro"


class SagemakerOptions(CloudOptions):
    """Options of the sagemaker launcher.

    Attributes:
        image: in Amazon ECR.
        output: where in S3 run directories are kept, each under its name; SageMaker copies there
            while the job runs, and back when it is started again.
        channels: name -> where it comes from: data that machines find in /opt/ml/input/data/NAME.
        channel_mode: of channels in S3: copied first, or read as they are needed.
        spot: spare capacity, which may be taken away; the job then resumes from its newest
            checkpoint.
        max_wait_s: with spot: seconds that waiting and running may take.
        restarts: after faults of the service.
        secrets: variable -> ARN in Secrets Manager, read by the role on each machine.
        region: of the aws client; its own by default.
        profile: of the aws client.
    """

    role: Role
    image: Registry | None = None
    instance_type: Annotated[
        str, StringConstraints(pattern=r"^ml\.[a-z0-9-]+\.(metal|[0-9]*x?large|medium)$")
    ]
    output: S3
    channels: dict[Channel, S3 | FileSystem] = Field(default_factory=dict, max_length=20)
    channel_mode: Literal["File", "FastFile"] = "File"
    volume_gb: Annotated[int, Field(ge=1, le=16384)] | None = None
    time_limit_s: Annotated[int, Field(ge=1, le=28 * 86400)] = 86400
    spot: bool = False
    max_wait_s: Annotated[int, Field(ge=1)] | None = None
    restarts: Annotated[int, Field(ge=0, le=30)] = 0
    keep_alive_s: Annotated[int, Field(ge=0, le=21600)] = 0
    subnets: list[Annotated[str, StringConstraints(pattern=r"^[-0-9a-zA-Z]{1,32}$")]] = Field(
        default_factory=list, max_length=16
    )
    security_groups: list[Annotated[str, StringConstraints(pattern=r"^[-0-9a-zA-Z]{1,32}$")]] = (
        Field(default_factory=list, max_length=5)
    )
    encrypt_traffic: bool = False
    network_isolation: bool = False
    secrets: dict[Variable, SecretArn] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict, max_length=50)
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = None
    profile: Annotated[str, StringConstraints(pattern=r"^\S+$")] | None = None

    @model_validator(mode="after")
    def _go_together(self) -> SagemakerOptions:
        if self.spot and (self.max_wait_s or 0) < self.time_limit_s:
            raise ValueError(
                f"max_wait_s: got {self.max_wait_s}; spot: true needs it, with at least the "
                f"seconds of time_limit_s ({self.time_limit_s})"
            )
        if self.max_wait_s is not None and not self.spot:
            raise ValueError("max_wait_s: it works only with spot: true; set that, or leave it out")
        if self.spot and self.keep_alive_s:
            raise ValueError(
                "keep_alive_s: SageMaker does not keep the machines of spot jobs; leave it out, "
                "or leave spot out"
            )
        if bool(self.subnets) is not bool(self.security_groups):
            raise ValueError("subnets and security_groups: give both or neither")
        files = [name for name, one in self.channels.items() if isinstance(one, FileSystem)]
        if files and not self.subnets:
            raise ValueError(
                f"channels.{files[0]}: SageMaker reaches a file system only through your subnets; "
                "give subnets and security_groups"
            )
        if self.secrets and self.network_isolation:
            raise ValueError(
                "secrets: with network_isolation, machines cannot reach Secrets Manager; leave one "
                "of them out"
            )
        return self

    def check(self, job: Job) -> None:
        """What depends on the job.

        Raises:
            RunFileError: the options do not go with it.
        """
        if not re.match(_ECR, self.image_for(job)):
            raise RunFileError(
                "launch.options.image: SageMaker takes images from Amazon ECR alone, and "
                f"{job.profile.image} is not there: push it, and name it here or its repository in "
                f"{REPOSITORY_VARIABLE}"
            )
        device = job.profile.cluster_resource
        if device is not None and not device.startswith("nvidia.com/"):
            raise RunFileError(
                f"backend: {job.backend} needs {device}, which no machine of SageMaker has"
            )
        if job.launch.max_restarts and job.launch.nodes > 1:
            raise RunFileError(
                "launch.max_restarts: on several machines of SageMaker, the other machines get "
                "checkpoints only when the job is started again. Use launch.options.restarts or "
                "spot instead"
            )
        if job.network is not None and job.network.name not in FABRICS:
            raise RunFileError(
                f"launch.fabric: {job.network.name}: machines of SageMaker have "
                f"{' or '.join(FABRICS)}"
            )
        needed = job.stop_grace_s + self.grace_s
        if needed > STOP_S - 10:
            raise RunFileError(
                f"checkpoint.grace_s ({job.stop_grace_s:g} s) and launch.options.grace_s "
                f"({self.grace_s:g} s) may have at most {STOP_S - 10} s together: SageMaker kills "
                f"a job {STOP_S} s after it asks it to end"
            )
        family, _, size = self.instance_type.rpartition(".")
        cards = CARDS.get(family, {}).get(size)
        if device is not None and family in CARDS and cards is None:
            raise RunFileError(
                f"launch.options.instance_type: got {self.instance_type}; valid sizes of {family} "
                f"are {', '.join(CARDS[family])}"
            )
        if cards is not None and job.launch.devices > cards:
            raise RunFileError(
                f"launch.options.instance_type: {self.instance_type} has {cards} accelerators, and "
                f"launch.devices is {job.launch.devices}"
            )


def request_of(
    job: Job, own: SagemakerOptions, name: str, run: str, carried: dict[str, str]
) -> dict[str, object]:
    """The request for CreateTrainingJob.

    Args:
        job: as its machines see it.
        run: under which its run directory is kept.
        carried: hyperparameters that bring the job there.
    """
    stop: dict[str, int] = {"MaxRuntimeInSeconds": own.time_limit_s}
    if own.max_wait_s is not None:
        stop["MaxWaitTimeInSeconds"] = own.max_wait_s
    resources: dict[str, object] = {
        "InstanceType": own.instance_type,
        "InstanceCount": job.launch.nodes,
        **({} if own.volume_gb is None else {"VolumeSizeInGB": own.volume_gb}),
        **({"KeepAlivePeriodInSeconds": own.keep_alive_s} if own.keep_alive_s else {}),
    }
    request: dict[str, object] = {
        "TrainingJobName": name,
        "RoleArn": own.role,
        "AlgorithmSpecification": {
            "TrainingImage": own.image_for(job),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [own.python, "-m", "anygauge_clouds.sagemaker_node"],
            "ContainerArguments": ["--grace", f"{own.grace_s:g}"],
        },
        "HyperParameters": carried,
        "OutputDataConfig": {"S3OutputPath": own.output},
        "CheckpointConfig": {
            "S3Uri": f"{own.output.rstrip('/')}/{run}",
            "LocalPath": job.run_directory,
        },
        "ResourceConfig": resources,
        "StoppingCondition": stop,
        "EnableManagedSpotTraining": own.spot,
        "EnableInterContainerTrafficEncryption": own.encrypt_traffic,
        "EnableNetworkIsolation": own.network_isolation,
    }
    if own.channels:
        request["InputDataConfig"] = [_channel(n, c, own) for n, c in own.channels.items()]
    if own.subnets:
        request["VpcConfig"] = {"Subnets": own.subnets, "SecurityGroupIds": own.security_groups}
    if own.restarts:
        request["RetryStrategy"] = {"MaximumRetryAttempts": own.restarts}
    if own.tags:
        request["Tags"] = [{"Key": key, "Value": value} for key, value in own.tags.items()]
    return request


def _channel(name: str, source: str | FileSystem, own: SagemakerOptions) -> dict[str, object]:
    if isinstance(source, FileSystem):
        where: dict[str, object] = {
            "FileSystemDataSource": {
                "FileSystemId": source.id,
                "FileSystemAccessMode": source.access,
                "FileSystemType": source.type,
                "DirectoryPath": source.path,
            }
        }
        return {"ChannelName": name, "DataSource": where, "InputMode": "File"}
    where = {
        "S3DataSource": {
            "S3DataType": "S3Prefix",
            "S3Uri": source,
            "S3DataDistributionType": "FullyReplicated",
        }
    }
    return {"ChannelName": name, "DataSource": where, "InputMode": own.channel_mode}
