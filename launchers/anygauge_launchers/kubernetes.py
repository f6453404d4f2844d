"""Kubernetes: one agent in each pod of a JobSet, TrainJob, PyTorchJob or MPIJob.

The manifest holds no values of yours but names: what belongs to the job is in a Secret that is made
at submission and goes with the job. Secrets of yours are mounted from where the cluster keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from anygauge.interface import Job, Plan, PlannedFile, PlannedProcess
from anygauge_launchers.apart import moved, short_name, variables_file
from anygauge_launchers.kubernetes_kinds import manifest_of
from anygauge_launchers.kubernetes_options import KubernetesOptions
from anygauge_launchers.kubernetes_service import KubernetesService, submit
from anygauge_launchers.options import read_options
from anygauge_launchers.service_job import ServiceJob

MANIFEST = "manifest.yaml"


class Kubernetes:
    """Hands a job to a cluster by kubectl."""

    def render(self, job: Job, options: Mapping[str, Any]) -> Plan:
        """The manifest, the job file, and the commands that take them.

        Raises:
            RunFileError: an option is wrong.
        """
        own = read_options(KubernetesOptions, "kubernetes", options)
        own.check(job)
        here = Path(job.run_directory)
        there = moved(job, f"{own.storage.path}/{here.name}")
        name = own.name or short_name(job, own.kind_limit, marked=True)
        manifest = manifest_of(there, own, name)
        service = KubernetesService(
            kind=own.kind, name=name, namespace=own.namespace, context=own.context
        )
        secret = (
            *service.kubectl("create", "secret", "generic", service.secret),
            *(f"--from-file=job.json={here / 'job.json'}",),
            *(f"--from-file=variables.json={here / 'variables.json'}",),
        )
        return Plan(
            files=(
                PlannedFile(path=str(here / "job.json"), text=there.dump(), mode=0o600),
                variables_file(here),
                PlannedFile(
                    path=str(here / MANIFEST), text=yaml.safe_dump(manifest, sort_keys=False)
                ),
            ),
            processes=(
                PlannedProcess(
                    node_rank=0,
                    host=service.shown,
                    argv=service.kubectl("create", "-f", str(here / MANIFEST), "-o", "json"),
                ),
            ),
            pass_environment=job.launch.pass_environment,
            operations={
                "submit": service.kubectl("create", "-f", str(here / MANIFEST)),
                "secret": secret,
                "status": service.kubectl("get", own.kind.lower(), name),
                "logs": service.kubectl("logs", "-f", "-l", service.coordinator, "--tail=-1"),
                "cancel": service.kubectl("delete", own.kind.lower(), name),
            },
            folders=own.folders,
            notes=own.notes_for(job),
        )

    def submit(self, plan: Plan) -> ServiceJob:
        """Create the objects.

        Raises:
            AnygaugeError: kubectl is missing or refuses, or a file cannot be written.
        """
        return submit(plan)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> ServiceJob:
        """A job that was submitted before.

        Raises:
            UnsupportedError: the record is not one of this launcher.
        """
        return ServiceJob(KubernetesService.of(record), run_directory)
