"""Azure ML: a command job with one agent on each machine, through the az client.

The command that Azure hands to a shell consists of plain words: the job is in a file beside it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
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
)
from anygauge.util.clients import last_line, printed, run_client
from anygauge_clouds.service_job import Service, ServiceJob, ServiceLauncher
from anygauge_clouds.submission import (
    CloudOptions,
    Folder,
    Variable,
    relocate,
    service_name,
    submit_by_client,
    variables_file,
    write_files,
)

RUNS = "/anygauge/run"
"""Where machines find the run directory."""

JOB_YAML, CODE = "job.yaml", "code"
SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_NAME_LIMIT = 64
_POLLING = "AZUREML_RUN_POLLING_INTERVAL_MAX"
"""Most seconds between two looks of Azure's client at a log; it takes 60 by itself."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}$")]
Workspace = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{2,32}$")]
Group = Annotated[str, StringConstraints(pattern=r"^[-\w._()]{1,90}$")]
Subscription = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
]
Environment = Annotated[
    str, StringConstraints(pattern=r"^(azureml:)?[A-Za-z0-9._-]+([:@][A-Za-z0-9._-]+)$")
]
InputName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_]+[a-zA-Z0-9_]*$")]
Shm = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[bkmg]$")]
VaultSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^https://[a-zA-Z0-9-]{3,24}\.vault\.[a-z.]+/secrets/[0-9a-zA-Z-]{1,127}/?$"
    ),
]
Datastore = Annotated[
    str, StringConstraints(pattern=r"^azureml://datastores/[A-Za-z0-9_]+/paths/\S+$")
]


def _source(path: str) -> str:
    if not re.match(r"^(azureml:\S+|azureml://\S+|https://\S+|wasbs://\S+|abfss://\S+)$", path):
        raise ValueError(
            "what Azure can mount is needed: azureml:NAME:VERSION, "
            "azureml://datastores/STORE/paths/PATH, or an https, wasbs or abfss address"
        )
    return path


class AzureInput(Options):
    """Data that machines get.

    Attributes:
        path: a data asset or a place in a datastore.
        at: where the run file finds it.
    """

    path: Annotated[str, AfterValidator(_source)]
    at: Folder
    type: Literal["uri_folder", "uri_file"] = "uri_folder"
    mode: Literal["ro_mount", "download"] = "ro_mount"


class AzuremlOptions(CloudOptions):
    """Options of the azureml launcher.

    Attributes:
        compute: a cluster of the workspace.
        environment: of the workspace, ``NAME:VERSION`` or ``NAME@latest``, instead of `image`.
        output: in a datastore: where run directories are kept, each under its name.
        inputs: name -> data.
        shm: size of /dev/shm.
        docker_args: further arguments for the container runtime; the backend's own by default.
        secrets: variable -> address in a Key Vault, read by the job's identity on each machine.
        identity: whose rights the job has.
    """

    workspace: Workspace
    resource_group: Group
    subscription: Subscription | None = None
    compute: Name
    environment: Environment | None = None
    output: Datastore
    inputs: dict[InputName, AzureInput] = Field(default_factory=dict)
    instance_type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    shm: Shm = "16g"
    docker_args: str | None = None
    time_limit_s: Annotated[int, Field(ge=1)] | None = None
    experiment: Name | None = None
    identity: Literal["managed", "user_identity", "aml_token"] | None = None
    priority: Literal["low", "medium", "high"] | None = None
    job_tier: Literal["spot", "basic", "standard", "premium"] | None = None
    secrets: dict[Variable, VaultSecret] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _go_together(self) -> AzuremlOptions:
        if self.image is not None and self.environment is not None:
            raise ValueError("image and environment: give one of them")
        places = [RUNS, *(one.at for one in self.inputs.values())]
        twice = sorted({place for place in places if places.count(place) > 1})
        if twice:
            raise ValueError(f"inputs: {twice[0]} is given twice, or is the launcher's own")
        if self.secrets and self.identity is None:
            raise ValueError(
                "identity: a job with secrets needs an identity that may read them (managed)"
            )
        return self

    def check(self, job: Job, profile: LaunchProfile) -> None:
        """What depends on the job.

        Raises:
            RunFileError: the options do not go with it.
        """
        if self.environment is None:
            self.image_for(job, profile)
        if job.launch.max_restarts and self.job_tier == "spot":
            raise RunFileError(
                "launch.max_restarts: ranks are started again on the same machines, which a spot "
                "job loses; start it again with --resume auto"
            )

    @property
    def scope(self) -> tuple[str, ...]:
        """Words by which the client finds the workspace."""
        where = ("--resource-group", self.resource_group, "--workspace-name", self.workspace)
        more = () if self.subscription is None else ("--subscription", self.subscription)
        return (*where, *more)


_PHASES: Mapping[str, Literal["running", "done", "failed", "stopped"]] = {
    "Running": "running",
    "Completed": "done",
    "Failed": "failed",
    "Canceled": "stopped",
}
"""Azure's words for a job's state; with all others it waits for its machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureService(Service):
    """One job of a workspace."""

    name: str
    scope: tuple[str, ...]

    @property
    def shown(self) -> str:
        """For humans."""
        return f"Azure ML job {self.name}"

    def az(self, action: str, *words: str) -> tuple[str, ...]:
        """A command of the az client on this job."""
        return ("az", "ml", "job", action, "--name", self.name, *self.scope, *words)

    def state(self) -> JobState:
        """See `Service.state`."""
        done = run_client(self.az("show", "--query", "status", "--output", "tsv"))
        if done.returncode:
            if re.search(r"ResourceNotFound|\(UserError\).* not found", done.stderr):
                return JobState(phase="gone", text=f"{self.shown} is gone")
            return JobState(phase="silent", text=f"Azure does not answer: {last_line(done.stderr)}")
        word = done.stdout.strip()
        return JobState(phase=_PHASES.get(word, "waiting"), text=f"{self.shown}: {word}")

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`: the client streams the first machine's output."""
        return ("env", f"{_POLLING}=5", *self.az("stream"))

    def whole_log(self, folder: Path) -> bytes:
        """See `Service.whole_log`: of an ended job the client streams nothing."""
        target = folder / "azure"
        with contextlib.suppress(AnygaugeError):
            run_client(self.az("download", "--download-path", str(target)))
        logs = sorted(target.rglob("user_logs/std_log*.txt"))
        return logs[0].read_bytes() if logs else b""

    def stop(self, *, force: bool) -> None:
        """See `Service.stop`; whether ranks are asked before they are killed, Azure decides."""
        done = run_client(self.az("cancel"))
        if done.returncode:
            raise AnygaugeError(f"Azure ML cannot end {self.shown}: {last_line(done.stderr)}")


class Azureml(ServiceLauncher):
    """Hands a job to an Azure ML workspace."""

    service = AzureService
    called = "an Azure ML job"

    def render(self, job: Job, options: AzuremlOptions, profile: LaunchProfile) -> Plan:
        """The job's YAML, its files, and the commands that take them.

        Raises:
            RunFileError: an option is wrong.
        """
        options.check(job, profile)
        here = Path(job.run_directory)
        there = relocate(job, RUNS)
        name = service_name(job, _NAME_LIMIT)
        described = _job_yaml(there, options, profile, here.name, name)
        create = (
            *("az", "ml", "job", "create", "--file", str(here / JOB_YAML), *options.scope),
            *("--query", "name", "--output", "tsv"),
        )
        service = AzureService(name=name, scope=options.scope)
        given = json.dumps({"secrets": options.secrets})
        return Plan(
            files=(
                PlannedFile(path=str(here / CODE / "job.json"), text=there.dump(), mode=0o600),
                variables_file(here / CODE),
                PlannedFile(path=str(here / CODE / "secrets.json"), text=given),
                PlannedFile(
                    path=str(here / JOB_YAML), text=yaml.safe_dump(described, sort_keys=False)
                ),
            ),
            processes=(
                PlannedProcess(node_rank=0, host=f"Azure ML {options.workspace}", argv=create),
            ),
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": create,
                "status": service.az("show", "--query", "status", "--output", "tsv"),
                "logs": service.az("stream"),
                "cancel": service.az("cancel"),
            },
            notes=() if options.environment else options.notes_for(profile),
            folders=(RUNS, *(one.at for one in options.inputs.values()), *options.in_image),
        )

    def submit(self, plan: Plan) -> ServiceJob:
        """Create the job.

        Raises:
            AnygaugeError: the az client is missing or refuses, or a file cannot be written.
        """
        write_files(plan)
        job_yaml = Path(plan.files[-1].path)
        argv = plan.processes[0].argv
        done = submit_by_client(argv, yaml.safe_load(job_yaml.read_text())["name"])
        name = done.stdout.strip()
        if done.returncode or not name:
            raise AnygaugeError(f"Azure ML refused the job: {printed(done)}")
        scope = argv[argv.index("--resource-group") : argv.index("--query")]
        return ServiceJob(AzureService(name=name, scope=scope), job_yaml.parent)


def _job_yaml(
    job: Job, own: AzuremlOptions, profile: LaunchProfile, run: str, name: str
) -> dict[str, Any]:
    links = [f'--link {one.at}="${{{{inputs.{name}}}}}"' for name, one in own.inputs.items()]
    command = " ".join(
        (
            own.python,
            "-m anygauge_clouds.azureml_node",
            f'--link {RUNS}="${{{{outputs.run}}}}"',
            *links,
            f"--grace {own.grace_s:g}",
        )
    )
    arguments = own.docker_args
    if arguments is None:
        # Devices and shared memory are Azure's business.
        flags = [f for f in profile.container_flags if f.startswith(("--cap-add=", "--ulimit"))]
        arguments = " ".join(flags)
    found: dict[str, Any] = {
        "$schema": SCHEMA,
        "type": "command",
        "name": name,
        "display_name": run,
        **({} if own.experiment is None else {"experiment_name": own.experiment}),
        "code": f"./{CODE}",
        "command": command,
        "environment": (
            {"image": own.image_for(job, profile)}
            if own.environment is None
            else _prefixed(own.environment)
        ),
        "compute": _prefixed(own.compute),
        # One process on each machine: the agent, which starts the ranks.
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        "resources": {
            "instance_count": job.launch.nodes,
            **({} if own.instance_type is None else {"instance_type": own.instance_type}),
            "shm_size": own.shm,
            # As a text: Azure's client drops other resources where it is a list.
            **({"docker_args": arguments} if arguments else {}),
        },
        "outputs": {
            "run": {
                "type": "uri_folder",
                "path": f"{own.output.rstrip('/')}/{run}/",
                "mode": "rw_mount",
            }
        },
    }
    if own.inputs:
        found["inputs"] = {
            name: {"type": one.type, "path": one.path, "mode": one.mode}
            for name, one in own.inputs.items()
        }
    if own.time_limit_s is not None:
        found["limits"] = {"timeout": own.time_limit_s}
    if own.identity is not None:
        found["identity"] = {"type": own.identity}
    queue = {"job_tier": own.job_tier, "priority": own.priority}
    if any(queue.values()):
        found["queue_settings"] = {key: value for key, value in queue.items() if value}
    if own.tags:
        found["tags"] = dict(own.tags)
    return found


def _prefixed(name: str) -> str:
    return name if name.startswith("azureml:") else f"azureml:{name}"
