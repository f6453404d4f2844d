"""Kubernetes: one agent in each pod of a JobSet or a TrainJob, through kubectl.

The manifest holds names, but no values of yours: what belongs to the job is in a Secret, which is
made at submission and deleted with the job. Pods mount your own Secrets by their names.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from anygauge.interface import (
    AnygaugeError,
    Job,
    JobState,
    LaunchProfile,
    Plan,
    PlannedFile,
    PlannedProcess,
)
from anygauge.util.clients import last_line, printed, run_client
from anygauge_clouds.kubernetes_manifest import SUBMISSION_LABEL, manifest_of, secret_of
from anygauge_clouds.kubernetes_options import NAME_LIMIT, Kind, KubernetesOptions
from anygauge_clouds.service_job import Service, ServiceJob, ServiceLauncher
from anygauge_clouds.submission import relocate, service_name, variables_file, write_files

MANIFEST = "manifest.yaml"
_COORDINATORS = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name={},batch.kubernetes.io/job-completion-index=0",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={},batch.kubernetes.io/job-completion-index=0,"
    "jobset.sigs.k8s.io/replicatedjob-name=node",
}
_PODS = "jobset.sigs.k8s.io/jobset-name={}"
"""A TrainJob makes a JobSet of its name."""
_NOT_FOUND = "(NotFound)"
_DONE = ("Succeeded", "Complete", "Completed")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesService(Service):
    """The object of one job in a cluster."""

    kind: Kind
    name: str
    namespace: str
    context: str | None = None

    @property
    def shown(self) -> str:
        """For humans."""
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def coordinator(self) -> str:
        """Selector of the pod of the coordinator, whose output is about the whole job."""
        return _COORDINATORS[self.kind].format(self.name)

    @property
    def secret(self) -> str:
        """Name of the Secret with the job's files."""
        return secret_of(self.name)

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
            return JobState(phase="failed", text=f"{self.shown} failed{text}")
        if any(kind in conditions for kind in _DONE):
            return JobState(phase="done", text=f"{self.shown} is complete")
        phase = (pod or {}).get("status", {}).get("phase")
        if phase in ("Running", "Succeeded", "Failed"):
            return JobState(phase="running", text=f"{self.shown} runs")
        if "Suspended" in conditions:
            return JobState(phase="waiting", text=f"{self.shown} is suspended (in a queue)")
        return JobState(phase="waiting", text=f"{self.shown} waits{_why_waiting(pod)}")

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`."""
        pod = self._coordinator_pod()
        if pod is None or pod.get("status", {}).get("phase") not in (
            "Running", "Succeeded", "Failed",
        ):  # fmt: skip
            return None
        return self.kubectl("logs", "-f", pod["metadata"]["name"])

    def stop(self, *, force: bool) -> None:
        """See `Service.stop`; the pods' grace is long enough for a checkpoint."""
        done = run_client(
            self.kubectl(
                *("delete", self.kind.lower(), self.name, "--ignore-not-found"),
                # In the foreground: the object is there until its pods have ended.
                *("--cascade=foreground", "--wait=false"),
            )
        )
        if done.returncode == 0 and force:
            # The object's own grace is not that of its pods.
            pods = ("-l", _PODS.format(self.name), "--grace-period=0", "--force")
            done = run_client(self.kubectl("delete", "pods", *pods, "--wait=false"))
        if done.returncode:
            raise AnygaugeError(f"kubectl cannot end {self.shown}: {last_line(done.stderr)}")

    def _coordinator_pod(self) -> dict[str, Any] | None:
        found = self._get("pods", "-l", self.coordinator)
        pods = [] if isinstance(found, JobState) else found.get("items", [])
        made = [(pod["metadata"].get("creationTimestamp", ""), pod) for pod in pods]
        return max(made, key=lambda one: one[0])[1] if made else None

    def _get(self, *words: str) -> dict[str, Any] | JobState:
        done = run_client(self.kubectl("get", *words, "-o", "json", "--request-timeout=20s"))
        if done.returncode == 0:
            try:
                return dict(json.loads(done.stdout))
            except ValueError:
                return JobState(phase="silent", text="kubectl printed no JSON")
        if _NOT_FOUND in done.stderr:
            return JobState(phase="gone", text=f"{self.shown} is gone")
        why = last_line(done.stderr)
        return JobState(phase="silent", text=f"the cluster does not answer: {why}")


class Kubernetes(ServiceLauncher):
    """Hands a job to a cluster by kubectl."""

    service = KubernetesService
    called = "a Kubernetes job"

    def render(self, job: Job, options: KubernetesOptions, profile: LaunchProfile) -> Plan:
        """The manifest, the job file, and the commands that take them.

        Raises:
            RunFileError: an option is wrong.
        """
        options.check(job, profile)
        here = Path(job.run_directory)
        there = relocate(job, f"{options.storage.path}/{here.name}")
        name = options.name or service_name(job, NAME_LIMIT)
        manifest = manifest_of(there, options, profile, name)
        service = KubernetesService(
            kind=options.kind, name=name, namespace=options.namespace, context=options.context
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
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": service.kubectl("create", "-f", str(here / MANIFEST)),
                "secret": secret,
                "status": service.kubectl("get", options.kind.lower(), name),
                "logs": service.kubectl("logs", "-f", "-l", service.coordinator, "--tail=-1"),
                "cancel": service.kubectl("delete", options.kind.lower(), name),
            },
            folders=options.folders,
            notes=options.notes_for(profile),
        )

    def submit(self, plan: Plan) -> ServiceJob:
        """Create the Secret and the object, and have the object own the Secret.

        Raises:
            AnygaugeError: kubectl is missing or refuses, or a file cannot be written. Nothing is
                left in the cluster.
        """
        write_files(plan)
        job_file, variables, manifest = (Path(file.path) for file in plan.files)
        command = plan.processes[0].argv
        wanted = yaml.safe_load(manifest.read_text())
        service = _service(wanted, command)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": service.secret,
                "namespace": service.namespace,
                "labels": wanted["metadata"]["labels"],
            },
            "stringData": {file.name: file.read_text() for file in (job_file, variables)},
        }
        try:
            _carry_out(service.kubectl("create", "-f", "-"), "the job's Secret", json.dumps(secret))
            made = json.loads(_carry_out(command, "the job"))
            owner = {
                **{"apiVersion": made["apiVersion"], "kind": made["kind"]},
                **{"name": made["metadata"]["name"], "uid": made["metadata"]["uid"]},
            }
            # The cluster deletes it with the job.
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            _carry_out(service.kubectl("patch", "secret", service.secret, "-p", patch), "its owner")
        except BaseException as error:
            # Where kubectl did not answer, it may have created the object all the same.
            _remove(service, wanted["metadata"]["labels"][SUBMISSION_LABEL])
            if isinstance(error, (ValueError, KeyError, TypeError)):
                raise AnygaugeError(f"kubectl printed no {service.kind}: {error!r}") from error
            raise
        return ServiceJob(service, job_file.parent)


def _carry_out(command: Sequence[str], what: str, stdin: str | None = None) -> str:
    done = run_client(command, stdin=stdin)
    if done.returncode:
        raise AnygaugeError(f"kubectl refused {what}: {printed(done)}")
    return done.stdout


def _remove(service: KubernetesService, submission: str) -> None:
    """Delete what a failed submission may have made: what has its label, and nothing else."""
    with contextlib.suppress(AnygaugeError):
        kinds = f"{service.kind.lower()},secret"
        label = f"{SUBMISSION_LABEL}={submission}"
        run_client(service.kubectl("delete", kinds, "-l", label, "--wait=false"), timeout_s=30)


def _service(made: Mapping[str, Any], command: Sequence[str]) -> KubernetesService:
    context = command[command.index("--context") + 1] if "--context" in command else None
    return KubernetesService(
        kind=made["kind"],
        name=made["metadata"]["name"],
        namespace=made["metadata"]["namespace"],
        context=context,
    )


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
