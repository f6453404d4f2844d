"""A job in a Kubernetes cluster, through kubectl."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from anygauge.interface import AnygaugeError, Plan, UnsupportedError
from anygauge_launchers.apart import filled_in
from anygauge_launchers.clients import ask, last_line, words
from anygauge_launchers.kubernetes_kinds import MARK, secret_of
from anygauge_launchers.service_job import Seen, Service, ServiceJob

_HEADS = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name={},batch.kubernetes.io/job-completion-index=0",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={},batch.kubernetes.io/job-completion-index=0,"
    "jobset.sigs.k8s.io/replicatedjob-name=node",
    "PyTorchJob": "training.kubeflow.org/job-name={},training.kubeflow.org/replica-type=master",
    "MPIJob": "training.kubeflow.org/job-name={},training.kubeflow.org/job-role=launcher",
}
_ALL = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name={}",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={}",
    "PyTorchJob": "training.kubeflow.org/job-name={}",
    "MPIJob": "training.kubeflow.org/job-name={}",
}
_NOT_FOUND = "(NotFound)"
_DONE = ("Succeeded", "Complete", "Completed")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesService(Service):
    """One object in a cluster."""

    kind: str
    name: str
    namespace: str
    context: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> KubernetesService:
        """The one of a record.

        Raises:
            UnsupportedError: it is none.
        """
        try:
            found = cls(**record)
            _HEADS[found.kind]
        except (TypeError, KeyError) as error:
            raise UnsupportedError(f"{dict(record)} is not a record of a Kubernetes job") from error
        return found

    @property
    def shown(self) -> str:
        """For humans."""
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def coordinator(self) -> str:
        """Selector of the pod whose output tells of the whole job."""
        return _HEADS[self.kind].format(self.name)

    @property
    def secret(self) -> str:
        """Name of the Secret with the job's files."""
        return secret_of(self.name)

    def kubectl(self, *words: str) -> tuple[str, ...]:
        """A command for this object's namespace."""
        context = () if self.context is None else ("--context", self.context)
        return ("kubectl", *context, "--namespace", self.namespace, *words)

    def look(self) -> Seen:
        """See `Service.look`."""
        found = self._get(self.kind.lower(), self.name)
        if isinstance(found, Seen):
            return found
        conditions = {
            one.get("type"): one
            for one in found.get("status", {}).get("conditions", [])
            if one.get("status") == "True"
        }
        pod = self._coordinator_pod()
        if "Failed" in conditions:
            text = _words(conditions["Failed"]) + (_last_words(pod) if pod else "")
            return Seen(phase="failed", text=f"{self.shown} failed{text}")
        if any(kind in conditions for kind in _DONE):
            return Seen(phase="done", text=f"{self.shown} is complete")
        phase = (pod or {}).get("status", {}).get("phase")
        if phase in ("Running", "Succeeded", "Failed"):
            return Seen(phase="running", text=f"{self.shown} runs")
        if "Suspended" in conditions:
            return Seen(phase="waiting", text=f"{self.shown} is suspended (in a queue)")
        return Seen(phase="waiting", text=f"{self.shown} waits{_why_waiting(pod)}")

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`."""
        pod = self._coordinator_pod()
        if pod is None or pod.get("status", {}).get("phase") not in (
            "Running", "Succeeded", "Failed",
        ):  # fmt: skip
            return None
        return self.kubectl("logs", "-f", pod["metadata"]["name"])

    def stop(self, *, firmly: bool) -> None:
        """See `Service.stop`; the pods' grace is long enough for a checkpoint."""
        done = ask(
            self.kubectl(
                *("delete", self.kind.lower(), self.name, "--ignore-not-found"),
                # In the foreground: the object is there until its pods have ended.
                *("--cascade=foreground", "--wait=false"),
            )
        )
        if done.returncode == 0 and firmly:
            # The object's own grace is not that of its pods.
            pods = ("-l", _ALL[self.kind].format(self.name), "--grace-period=0", "--force")
            done = ask(self.kubectl("delete", "pods", *pods, "--wait=false"))
        if done.returncode:
            raise AnygaugeError(f"kubectl cannot end {self.shown}: {last_line(done.stderr)}")

    def _coordinator_pod(self) -> dict[str, Any] | None:
        found = self._get("pods", "-l", self.coordinator)
        pods = [] if isinstance(found, Seen) else found.get("items", [])
        made = [(pod["metadata"].get("creationTimestamp", ""), pod) for pod in pods]
        return max(made, key=lambda one: one[0])[1] if made else None

    def _get(self, *words: str) -> dict[str, Any] | Seen:
        done = ask(self.kubectl("get", *words, "-o", "json", "--request-timeout=20s"))
        if done.returncode == 0:
            try:
                return dict(json.loads(done.stdout))
            except ValueError:
                return Seen(phase="silent", text="kubectl printed no JSON")
        if _NOT_FOUND in done.stderr:
            return Seen(phase="gone", text=f"{self.shown} is gone")
        return Seen(phase="silent", text=f"the cluster does not answer: {last_line(done.stderr)}")


def submit(plan: Plan) -> ServiceJob:
    """Create the Secret and the object, and have the object own the Secret.

    Raises:
        AnygaugeError: kubectl is missing or refuses, or a file cannot be written. Nothing is left
            in the cluster.
    """
    filled_in(plan)
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
        # It goes when the job does.
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        _carry_out(service.kubectl("patch", "secret", service.secret, "-p", patch), "its owner")
    except BaseException as error:
        # An answer that never came may have been a yes.
        _remove(service, wanted["metadata"]["labels"][MARK])
        if isinstance(error, (ValueError, KeyError, TypeError)):
            raise AnygaugeError(f"kubectl printed no {service.kind}: {error!r}") from error
        raise
    return ServiceJob(service, job_file.parent)


def _carry_out(command: Sequence[str], what: str, given: str | None = None) -> str:
    done = ask(command, given=given)
    if done.returncode:
        raise AnygaugeError(f"kubectl refused {what}: {words(done)}")
    return done.stdout


def _remove(service: KubernetesService, mark: str) -> None:
    """Take back what a submission that failed may have made: what bears its mark, and no other."""
    with contextlib.suppress(AnygaugeError):
        kinds = f"{service.kind.lower()},secret"
        ask(service.kubectl("delete", kinds, "-l", f"{MARK}={mark}", "--wait=false"), limit_s=30)


def _service(made: Mapping[str, Any], command: Sequence[str]) -> KubernetesService:
    context = command[command.index("--context") + 1] if "--context" in command else None
    return KubernetesService(
        kind=made["kind"],
        name=made["metadata"]["name"],
        namespace=made["metadata"]["namespace"],
        context=context,
    )


def _words(condition: Mapping[str, Any]) -> str:
    text = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    return f" ({text})" if text else ""


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _last_words(pod: Mapping[str, Any]) -> str:
    """What the agent left as the cause."""
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
            return _words(condition)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return _words(waiting)
    return " for its first pod"
