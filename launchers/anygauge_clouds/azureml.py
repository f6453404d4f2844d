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
    variables_file,
)
from anygauge.util.clients import run_client
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
)

RUNS = "/anygauge/run"
"""Where machines find the run directory."""

_TEMPLATE = read_template("azureml.yaml")
_NAME_LIMIT = 64
_POLLING = "AZUREML_RUN_POLLING_INTERVAL_MAX"
"""Most seconds between two looks of Azure's client at a log; it takes 60 by itself."""

InputName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_]+[a-zA-Z0-9_]*$")]
VaultSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^https://[a-zA-Z0-9-]{3,24}\.vault\.[a-z.]+/secrets/[0-9a-zA-Z-]{1,127}/?$"
    ),
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
        type: a folder, or one file.
        mode: read over the network, or copied first.
    """

    path: Annotated[str, AfterValidator(_source)]
    at: Folder
    type: Literal["uri_folder", "uri_file"] = "uri_folder"
    mode: Literal["ro_mount", "download"] = "ro_mount"


class AzuremlOptions(CloudOptions):
    """Options of the azureml launcher; `extra` is of the command job's YAML.

    Attributes:
        workspace, resource_group: where the job runs.
        subscription: of the az client; its own by default.
        compute: a cluster of the workspace.
        environment: of the workspace, ``NAME:VERSION`` or ``NAME@latest``, instead of `image`.
        output: in a datastore: where run directories are kept, each under its name.
        inputs: name -> data.
        shm: size of /dev/shm.
        secrets: variable -> address in a Key Vault, read by the job's identity on each machine.
        identity: whose rights the job has.
    """

    workspace: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{2,32}$")
    resource_group: str = Field(pattern=r"^[-\w._()]{1,90}$")
    subscription: str | None = Field(
        None, pattern=r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
    )
    compute: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}$")
    environment: str | None = Field(
        None, pattern=r"^(azureml:)?[A-Za-z0-9._-]+([:@][A-Za-z0-9._-]+)$"
    )
    output: str = Field(pattern=r"^azureml://datastores/[A-Za-z0-9_]+/paths/\S+$")
    inputs: dict[InputName, AzureInput] = Field(default_factory=dict)
    shm: str = Field("16g", pattern=r"^[1-9][0-9]*[bkmg]$")
    identity: Literal["managed", "user_identity", "aml_token"] | None = None
    secrets: dict[Variable, VaultSecret] = Field(default_factory=dict)

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


_PHASES: Mapping[str, Literal["running", "done", "failed", "stopped"]] = {
    "Running": "running",
    "Completed": "done",
    "Failed": "failed",
    "Canceled": "stopped",
}
"""Azure's words for a job's state; with all others it waits for its machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureService(Service):
    """One job of a workspace.

    Attributes:
        scope: words by which the client finds the workspace.
    """

    owner, noun = "Azure", "Azure ML job"
    gone = r"ResourceNotFound|\(UserError\).* not found"

    name: str
    scope: tuple[str, ...]

    def az(self, action: str, *words: str) -> tuple[str, ...]:
        """A command of the az client on this job."""
        return ("az", "ml", "job", action, "--name", self.name, *self.scope, *words)

    @property
    def query(self) -> tuple[str, ...]:
        """The command that prints its state."""
        return self.az("show", "--query", "status", "--output", "tsv")

    def state(self) -> JobState:
        """See `Service.state`."""
        out = self.answer(self.query)
        if isinstance(out, JobState):
            return out
        word = out.strip()
        return JobState(phase=_PHASES.get(word, "waiting"), text=f"{self.title}: {word}")

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
        self.end("Azure ML", self.az("cancel"))


class Azureml(ServiceLauncher):
    """Hands a job to an Azure ML workspace."""

    service = AzureService
    title = "Azure ML"
    called = "an Azure ML job"

    def render(self, job: Job, options: AzuremlOptions, profile: LaunchProfile) -> Plan:
        """The job's YAML, its files, and the commands that take them."""
        here = Path(job.run_directory)
        there = relocate(job, RUNS)
        scope = ["--resource-group", options.resource_group, "--workspace-name", options.workspace]
        if options.subscription is not None:
            scope += ["--subscription", options.subscription]
        service = AzureService(name=service_name(job, _NAME_LIMIT), scope=tuple(scope))
        described = _job_yaml(there, options, profile, here.name, service.name)
        job_yaml = str(here / "job.yaml")
        create = (
            *("az", "ml", "job", "create", "--file", job_yaml, *scope),
            *("--query", "name", "--output", "tsv"),
        )
        code = here / "code"
        secrets = json.dumps({"secrets": options.secrets})
        return Plan(
            files=(
                PlannedFile(path=str(code / "job.json"), text=there.dump(), mode=0o600),
                variables_file(code),
                PlannedFile(path=str(code / "secrets.json"), text=secrets),
                PlannedFile(path=job_yaml, text=yaml.safe_dump(described, sort_keys=False)),
            ),
            processes=(
                PlannedProcess(node_rank=0, host=f"Azure ML {options.workspace}", argv=create),
            ),
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": create,
                "status": service.query,
                "logs": service.az("stream"),
                "cancel": service.az("cancel"),
            },
            notes=() if options.environment else options.notes_for(profile),
            folders=(RUNS, *(one.at for one in options.inputs.values()), *options.in_image),
            record=service.record,
        )


def _job_yaml(
    job: Job, own: AzuremlOptions, profile: LaunchProfile, run: str, name: str
) -> dict[str, Any]:
    links = {RUNS: "outputs.run", **{one.at: f"inputs.{key}" for key, one in own.inputs.items()}}
    command = [
        f"{own.python} -m anygauge_clouds.container azureml",
        *(f'--link {path}="${{{{{source}}}}}"' for path, source in links.items()),
        f"--grace {own.grace_s:g}",
    ]
    # Devices and shared memory are Azure's business. As a text: Azure's client drops other
    # resources where it is a list.
    flags = [f for f in profile.container_flags if f.startswith(("--cap-add=", "--ulimit"))]
    inputs = {
        name: {"type": one.type, "path": one.path, "mode": one.mode}
        for name, one in own.inputs.items()
    }
    values = {
        **{"name": name, "run": run, "command": " ".join(command), "nodes": job.launch.nodes},
        "environment": (
            _with_prefix(own.environment)
            if own.environment
            else {"image": own.image_for(job, profile)}
        ),
        **{"compute": _with_prefix(own.compute), "shm": own.shm, "inputs": inputs or None},
        "docker_args": " ".join(flags) or None,
        "output": f"{own.output.rstrip('/')}/{run}/",
        "identity": None if own.identity is None else {"type": own.identity},
    }
    return merge(fill(_TEMPLATE, values), own.extra)


def _with_prefix(name: str) -> str:
    return name if name.startswith("azureml:") else f"azureml:{name}"
