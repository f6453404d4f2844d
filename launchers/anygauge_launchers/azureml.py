"""Azure ML: a command job with one agent on each machine, by the az client.

The command that Azure hands to a shell holds plain words alone: the job is in a file beside it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from anygauge.interface import (
    AnygaugeError,
    Job,
    Plan,
    PlannedFile,
    PlannedProcess,
    UnsupportedError,
)
from anygauge_launchers.apart import filled_in, moved, short_name, submitted, variables_file
from anygauge_launchers.azureml_options import RUNS, AzuremlOptions
from anygauge_launchers.clients import ask, last_line, words
from anygauge_launchers.options import read_options
from anygauge_launchers.service_job import Seen, Service, ServiceJob

_NAME_LIMIT = 64
_POLLING = "AZUREML_RUN_POLLING_INTERVAL_MAX"
"""Seconds between two looks of Azure's client at a log; 60 without it."""

JOB_YAML, CODE = "job.yaml", "code"
SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"


class Azureml:
    """Hands a job to an Azure ML workspace."""

    def render(self, job: Job, options: Mapping[str, Any]) -> Plan:
        """The job's YAML, its files, and the commands that take them.

        Raises:
            RunFileError: an option is wrong.
        """
        own = read_options(AzuremlOptions, "azureml", options)
        own.check(job)
        here = Path(job.run_directory)
        there = moved(job, RUNS)
        name = short_name(job, _NAME_LIMIT, marked=True)
        described = _described(there, own, here.name, name)
        create = (
            *("az", "ml", "job", "create", "--file", str(here / JOB_YAML), *own.scope),
            *("--query", "name", "--output", "tsv"),
        )
        service = AzureService(name=name, scope=own.scope)
        given = json.dumps({"secrets": own.secrets})
        return Plan(
            files=(
                PlannedFile(path=str(here / CODE / "job.json"), text=there.dump(), mode=0o600),
                variables_file(here / CODE),
                PlannedFile(path=str(here / CODE / "secrets.json"), text=given),
                PlannedFile(
                    path=str(here / JOB_YAML), text=yaml.safe_dump(described, sort_keys=False)
                ),
            ),
            processes=(PlannedProcess(node_rank=0, host=f"Azure ML {own.workspace}", argv=create),),
            pass_environment=job.launch.pass_environment,
            operations={
                "submit": create,
                "status": service.az("show", "--query", "status", "--output", "tsv"),
                "logs": service.az("stream"),
                "cancel": service.az("cancel"),
            },
            notes=() if own.environment else own.notes_for(job),
            folders=(RUNS, *(one.at for one in own.inputs.values()), *own.in_image),
        )

    def submit(self, plan: Plan) -> ServiceJob:
        """Create the job.

        Raises:
            AnygaugeError: the az client is missing or refuses, or a file cannot be written.
        """
        filled_in(plan)
        job_yaml = Path(plan.files[-1].path)
        argv = plan.processes[0].argv
        done = submitted(argv, yaml.safe_load(job_yaml.read_text())["name"])
        name = done.stdout.strip()
        if done.returncode or not name:
            raise AnygaugeError(f"Azure ML refused the job: {words(done)}")
        scope = argv[argv.index("--resource-group") : argv.index("--query")]
        return ServiceJob(AzureService(name=name, scope=scope), job_yaml.parent)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> ServiceJob:
        """A job that was submitted before.

        Raises:
            UnsupportedError: the record is not one of this launcher.
        """
        try:
            service = AzureService(name=record["name"], scope=tuple(record["scope"]))
        except (KeyError, TypeError) as error:
            raise UnsupportedError(f"{dict(record)} is not a record of an Azure ML job") from error
        return ServiceJob(service, run_directory)


def _described(job: Job, own: AzuremlOptions, run: str, name: str) -> dict[str, Any]:
    links = [f'--link {one.at}="${{{{inputs.{name}}}}}"' for name, one in own.inputs.items()]
    command = " ".join(
        (
            own.python,
            "-m anygauge_launchers.azureml_node",
            f'--link {RUNS}="${{{{outputs.run}}}}"',
            *links,
            f"--grace {own.grace_s:g}",
        )
    )
    arguments = own.docker_args
    if arguments is None:
        # Devices and shared memory are Azure's business.
        flags = [f for f in job.profile.container_flags if f.startswith(("--cap-add=", "--ulimit"))]
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
            {"image": own.image_for(job)} if own.environment is None else _prefixed(own.environment)
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

    def look(self) -> Seen:
        """See `Service.look`."""
        done = ask(self.az("show", "--query", "status", "--output", "tsv"))
        if done.returncode:
            if re.search(r"ResourceNotFound|\(UserError\).* not found", done.stderr):
                return Seen(phase="gone", text=f"{self.shown} is gone")
            return Seen(phase="silent", text=f"Azure does not answer: {last_line(done.stderr)}")
        state = done.stdout.strip()
        text = f"{self.shown}: {state}"
        if state == "Completed":
            return Seen(phase="done", text=text)
        if state == "Failed":
            return Seen(phase="failed", text=text)
        if state == "Canceled":
            return Seen(phase="stopped", text=text)
        return Seen(phase="running" if state == "Running" else "waiting", text=text)

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`: the client streams the first machine's output."""
        return ("env", f"{_POLLING}=5", *self.az("stream"))

    def whole_log(self, folder: Path) -> bytes:
        """See `Service.whole_log`: of an ended job the client streams nothing."""
        target = folder / "azure"
        with contextlib.suppress(AnygaugeError):
            ask(self.az("download", "--download-path", str(target)))
        logs = sorted(target.rglob("user_logs/std_log*.txt"))
        return logs[0].read_bytes() if logs else b""

    def stop(self, *, firmly: bool) -> None:
        """See `Service.stop`; whether ranks are asked before they are killed, Azure decides."""
        done = ask(self.az("cancel"))
        if done.returncode:
            raise AnygaugeError(f"Azure ML cannot end {self.shown}: {last_line(done.stderr)}")
