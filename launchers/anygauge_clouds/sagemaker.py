"""SageMaker: a training job with one agent on each machine, through the aws client.

The request is the plain API's, CreateTrainingJob; patterns, limits and fields are those of its
published model. The job travels in its hyperparameters, in pieces: no bucket is needed for code,
and no shell reads it.

``python -m anygauge_clouds.sagemaker aws logs filter-log-events ...`` follows a log of CloudWatch.
The aws client of version 2 can do so itself, that of version 1 cannot; this repeats the command of
either, prints each message once, and ends with its parent.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from anygauge.interface import (
    REPOSITORY_VARIABLE,
    AnygaugeError,
    Job,
    JobState,
    LaunchProfile,
    Options,
    Plan,
    PlannedFile,
    PlannedProcess,
    RunFileError,
    UnsupportedError,
)
from anygauge.util.processes import tie_to_parent
from anygauge_clouds.container import CHANNELS, CHECKPOINTS, PIECE, pack_job
from anygauge_clouds.service_job import Service, ServiceLauncher
from anygauge_clouds.submission import (
    CloudOptions,
    Variable,
    fill,
    merge,
    read_template,
    relocate,
    service_name,
)

_TEMPLATE = read_template("sagemaker.yaml")
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LOG_POLL_S = 5.0
"""Seconds between two reads of the log."""
_OVERLAP_MS = 60_000
"""Each read begins this long before the newest event: events may arrive out of order."""
_VARIABLE_LIMIT, _VARIABLES_LIMIT, _PIECES_LIMIT = 512, 100, 100
_NAME_LIMIT = 63

S3 = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$")]
SecretArn = Annotated[
    str, StringConstraints(pattern=r"^arn:aws[a-z\-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:\S+$")
]
Channel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_ECR = r"^\d{12}\.dkr\.ecr(-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/\S+$"

_FABRICS = ("efa", "ethernet")
"""Networks between machines that instance types have."""

_STOP_S = 120
"""Seconds from SIGTERM to SIGKILL."""

_MACHINES = tomllib.loads(Path(__file__).with_name("aws.toml").read_text(encoding="utf-8"))
_CARDS: Mapping[str, int] = {
    name: machine["cards"][0]
    for machine in _MACHINES["machine"].values()
    for name in machine["names"]
}
"""Accelerators of an instance type that ``aws.toml`` describes; others are not counted."""


class FileSystem(Options):
    """A file system as a channel; it is shared by all machines.

    Attributes:
        id: ``fs-...``.
        type: of the file system.
        path: folder in it.
        access: read only, or read and write.
    """

    id: str = Field(pattern=r"^fs-[0-9a-f]{8,17}$")
    type: Literal["EFS", "FSxLustre"]
    path: str = Field(pattern=r"^/\S*$", max_length=4096)
    access: Literal["ro", "rw"] = "ro"


class SagemakerOptions(CloudOptions):
    """Options of the sagemaker launcher; `extra` is of the request CreateTrainingJob.

    Attributes:
        role: that the job has, by its ARN.
        image: in Amazon ECR.
        instance_type: of each machine.
        time_limit_s: seconds after which the job is ended.
        output: where in S3 run directories are kept, each under its name.
        channels: name -> where it comes from: data that machines find in /opt/ml/input/data/NAME.
        channel_mode: of channels in S3: copied first, or read as they are needed.
        spot: spare capacity, which may be taken away; the job then resumes from its newest
            checkpoint.
        max_wait_s: with spot: seconds that waiting and running may take.
        secrets: variable -> ARN in Secrets Manager, read by the role on each machine.
        region: of the aws client; its own by default.
        profile: of the aws client.
    """

    role: str = Field(pattern=r"^arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+$")
    image: str | None = Field(None, pattern=_ECR, max_length=255)
    instance_type: str = Field(pattern=r"^ml\.[a-z0-9-]+\.(metal|[0-9]*x?large|medium)$")
    output: S3
    channels: dict[Channel, S3 | FileSystem] = Field(default_factory=dict, max_length=20)
    channel_mode: Literal["File", "FastFile"] = "File"
    time_limit_s: int = Field(86400, ge=1, le=28 * 86400)
    spot: bool = False
    max_wait_s: int | None = Field(None, ge=1)
    secrets: dict[Variable, SecretArn] = Field(default_factory=dict)
    region: str | None = Field(None, pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    profile: str | None = Field(None, pattern=r"^\S+$")

    @model_validator(mode="after")
    def _go_together(self) -> SagemakerOptions:
        if self.spot and (self.max_wait_s or 0) < self.time_limit_s:
            raise ValueError(
                f"max_wait_s: got {self.max_wait_s}; spot: true needs it, with at least the "
                f"seconds of time_limit_s ({self.time_limit_s})"
            )
        if self.max_wait_s is not None and not self.spot:
            raise ValueError("max_wait_s: it works only with spot: true; set that, or leave it out")
        files = [name for name, one in self.channels.items() if isinstance(one, FileSystem)]
        if files and "VpcConfig" not in self.extra:
            raise ValueError(
                f"channels.{files[0]}: SageMaker reaches a file system only through your subnets; "
                "give VpcConfig in extra"
            )
        if self.secrets and self.extra.get("EnableNetworkIsolation"):
            raise ValueError(
                "secrets: with EnableNetworkIsolation, machines cannot reach Secrets Manager; "
                "leave one of them out"
            )
        return self

    def check(self, job: Job, profile: LaunchProfile) -> None:
        """Refuse what does not go with the job (`RunFileError`)."""
        if not re.match(_ECR, self.image_for(job, profile)):
            raise RunFileError(
                "launch.options.image: SageMaker takes images from Amazon ECR alone, and "
                f"{profile.image} is not there: push it, and name it here or its repository in "
                f"{REPOSITORY_VARIABLE}"
            )
        device = profile.cluster_resource
        if device is not None and not device.startswith("nvidia.com/"):
            raise RunFileError(
                f"backend: {job.backend} needs {device}, which no machine of SageMaker has"
            )
        if job.launch.max_restarts and job.launch.nodes > 1:
            raise RunFileError(
                "launch.max_restarts: on several machines of SageMaker, the other machines get "
                "checkpoints only when the job is started again. Use launch.options.spot, or "
                "RetryStrategy in launch.options.extra, instead"
            )
        if job.launch.fabric not in ("auto", *_FABRICS):
            raise RunFileError(
                f"launch.fabric: {job.launch.fabric}: machines of SageMaker have "
                f"{' or '.join(_FABRICS)}"
            )
        needed = job.stop_grace_s + self.grace_s
        if needed > _STOP_S - 10:
            raise RunFileError(
                f"checkpoint.grace_s ({job.stop_grace_s:g} s) and launch.options.grace_s "
                f"({self.grace_s:g} s) may have at most {_STOP_S - 10} s together: SageMaker kills "
                f"a job {_STOP_S} s after it asks it to end"
            )
        cards = _CARDS.get(self.instance_type)
        if cards is not None and job.launch.devices > cards:
            raise RunFileError(
                f"launch.options.instance_type: {self.instance_type} has {cards} accelerators, and "
                f"launch.devices is {job.launch.devices}"
            )


def _channel(name: str, source: str | FileSystem, mode: str) -> dict[str, object]:
    if isinstance(source, FileSystem):
        files = {
            "FileSystemId": source.id,
            "FileSystemAccessMode": source.access,
            "FileSystemType": source.type,
            "DirectoryPath": source.path,
        }
        where, mode = {"FileSystemDataSource": files}, "File"
    else:
        prefix = {"S3DataType": "S3Prefix", "S3Uri": source}
        where = {"S3DataSource": {**prefix, "S3DataDistributionType": "FullyReplicated"}}
    return {"ChannelName": name, "DataSource": where, "InputMode": mode}


@dataclass(frozen=True, kw_only=True, slots=True)
class SagemakerService(Service):
    """One training job."""

    log_delay_s = 30.0
    owner, noun = "AWS", "SageMaker training job"
    gone = r"ValidationException.*(not found|Could not find)"

    name: str
    region: str | None = None
    profile: str | None = None

    def job(self, action: str, *words: str) -> tuple[str, ...]:
        """A command of the aws client on this job."""
        return self.aws("sagemaker", action, "--training-job-name", self.name, *words)

    def aws(self, *words: str) -> tuple[str, ...]:
        """A command of the aws client."""
        return (
            "aws",
            *words,
            *(() if self.region is None else ("--region", self.region)),
            *(() if self.profile is None else ("--profile", self.profile)),
        )

    def state(self) -> JobState:
        """See `Service.state`."""
        out = self.answer(self.job("describe-training-job", "--output", "json"))
        if isinstance(out, JobState):
            return out
        try:
            found = json.loads(out)
            status, second = found["TrainingJobStatus"], found.get("SecondaryStatus", "")
        except (ValueError, KeyError, TypeError):
            return JobState(phase="silent", text="the aws client printed no training job")
        if status == "Failed":
            reason = found.get("FailureReason", "no reason is given")
            return JobState(phase="failed", text=f"{self.title} failed: {reason}")
        if status == "Completed":
            return JobState(phase="done", text=f"{self.title} is complete")
        if status == "Stopped":
            return JobState(phase="stopped", text=f"{self.title} was stopped ({second})")
        phase: Literal["running", "waiting"] = "running" if second == "Training" else "waiting"
        return JobState(phase=phase, text=f"{self.title}: {second or status}")

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`; the aws client of version 1 cannot follow by itself."""
        # Without the dash, algo-1 would be algo-10 as well.
        command = self.aws(
            *("logs", "filter-log-events", "--log-group-name", LOG_GROUP),
            *("--log-stream-name-prefix", f"{self.name}/algo-1-", "--output", "json"),
        )
        return (sys.executable, "-m", "anygauge_clouds.sagemaker", *command)

    def stop(self, *, force: bool) -> None:
        """See `Service.stop`: SageMaker sends SIGTERM, and SIGKILL 120 s later, in any case."""
        # One that has just ended cannot be stopped, and need not.
        self.end("SageMaker", self.job("stop-training-job"), unless="in status")


class Sagemaker(ServiceLauncher):
    """Hands a job to SageMaker."""

    service = SagemakerService
    title = "SageMaker"
    called = "a SageMaker job"

    def render(self, job: Job, options: SagemakerOptions, profile: LaunchProfile) -> Plan:
        """The request, and the commands that take it."""
        options.check(job, profile)
        here = Path(job.run_directory)
        service = SagemakerService(
            name=service_name(job, _NAME_LIMIT), region=options.region, profile=options.profile
        )
        request = _request(relocate(job, CHECKPOINTS), options, profile, here.name, service.name)
        path = str(here / "request.json")
        command = service.aws(
            *("sagemaker", "create-training-job", "--cli-input-json", f"file://{path}")
        )
        logs = ("logs", "tail", LOG_GROUP, "--follow")
        channels = (f"{CHANNELS}/{channel}" for channel in options.channels)
        return Plan(
            # The token that the agents know each other by is in it.
            files=(PlannedFile(path=path, text=json.dumps(request, indent=2) + "\n", mode=0o600),),
            processes=(PlannedProcess(node_rank=0, host=service.title, argv=command),),
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": command,
                "status": service.job("describe-training-job"),
                "logs": service.aws(*logs, "--log-stream-name-prefix", f"{service.name}/"),
                "cancel": service.job("stop-training-job"),
            },
            folders=(CHECKPOINTS, *channels, *options.in_image),
            record=service.record,
        )

    def create(self, plan: Plan) -> None:
        """Send the request, with the variables that are passed on, if SageMaker takes those."""
        passed = plan.passed
        long = next((n for n, value in passed.items() if len(value) > _VARIABLE_LIMIT), None)
        if long is not None or len(passed) > _VARIABLES_LIMIT:
            found = f"{len(passed)} variables" if long is None else f"a longer value of {long}"
            raise AnygaugeError(
                f"launch.pass_environment: got {found}, but SageMaker takes at most "
                f"{_VARIABLES_LIMIT} variables of up to {_VARIABLE_LIMIT} characters; put them "
                "into the run file's environment, or into the image"
            )
        (file,) = plan.files
        request = json.loads(file.text)
        if passed:
            request["Environment"] = {**passed, **request.get("Environment", {})}
        file = replace(file, text=json.dumps(request, indent=2) + "\n")
        super().create(replace(plan, files=(file,)))


def _request(
    job: Job, own: SagemakerOptions, profile: LaunchProfile, run: str, name: str
) -> dict[str, Any]:
    """The request for CreateTrainingJob; `job` is as its machines see it.

    Raises:
        UnsupportedError: the run file is too long for it.
    """
    carried = pack_job(job, own.secrets)
    if len(carried) > _PIECES_LIMIT:
        raise UnsupportedError(
            f"the run file is too long: it takes {len(carried)} pieces of {PIECE} characters, "
            f"and a request to SageMaker may have at most {_PIECES_LIMIT}"
        )
    channels = [_channel(key, source, own.channel_mode) for key, source in own.channels.items()]
    values = {
        **{"name": name, "role": own.role, "image": own.image_for(job, profile)},
        "command": [own.python, "-m", "anygauge_clouds.container"],
        "arguments": ["sagemaker", "--grace", f"{own.grace_s:g}"],
        **{"carried": carried, "output": own.output, "run_directory": job.run_directory},
        "checkpoints": f"{own.output.rstrip('/')}/{run}",
        **{"instance_type": own.instance_type, "nodes": job.launch.nodes, "spot": own.spot},
        **{"time_limit_s": own.time_limit_s, "max_wait_s": own.max_wait_s},
        "channels": channels or None,
    }
    return merge(fill(_TEMPLATE, values), own.extra)


def follow_log(argv: list[str]) -> int:
    """Print the log's messages until this process is ended.

    Returns:
        The exit status of the client, if that fails.
    """
    tie_to_parent(signal.SIGTERM)
    known: set[str] = set()
    since = 0
    while True:
        done = subprocess.run(
            [*argv, "--start-time", str(max(0, since - _OVERLAP_MS))],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode and "ResourceNotFound" not in done.stderr:
            print(done.stderr.strip(), file=sys.stderr, flush=True)
            return done.returncode
        for event in json.loads(done.stdout)["events"] if done.returncode == 0 else ():
            if event["eventId"] not in known:
                known.add(event["eventId"])
                since = max(since, int(event["timestamp"]))
                print(event["message"].rstrip("\n"), flush=True)
        time.sleep(LOG_POLL_S)


if __name__ == "__main__":
    sys.exit(follow_log(sys.argv[1:]))
