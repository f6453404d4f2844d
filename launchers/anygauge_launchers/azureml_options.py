"""What ``launch.options`` may hold for Azure ML, checked before anything is submitted."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from anygauge.interface import Job, RunFileError
from anygauge_launchers.apart import ApartOptions, Folder, Variable
from anygauge_launchers.options import Part

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


class Input(Part):
    """Data that machines get.

    Attributes:
        path: a data asset or a place in a datastore.
        at: where the run file finds it.
    """

    path: Annotated[str, AfterValidator(_source)]
    at: Folder
    type: Literal["uri_folder", "uri_file"] = "uri_folder"
    mode: Literal["ro_mount", "download"] = "ro_mount"


class AzuremlOptions(ApartOptions):
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
    inputs: dict[InputName, Input] = Field(default_factory=dict)
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

    def check(self, job: Job) -> None:
        """What depends on the job.

        Raises:
            RunFileError: the options do not go with it.
        """
        if self.environment is None:
            self.image_for(job)
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


RUNS = "/anygauge/run"
"""Where machines find the run directory."""
