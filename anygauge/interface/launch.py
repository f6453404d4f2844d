"""Launchers: what they announce and plan, and what they need to know of a device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from anygauge.interface.container_image import ImageRelease
from anygauge.interface.job import Job
from anygauge.util.errors import AnygaugeError
from anygauge.util.files import write_text

__all__ = [
    "ABILITIES",
    "BatchFile",
    "JobState",
    "LaunchProfile",
    "Launcher",
    "LauncherSpec",
    "Plan",
    "PlannedFile",
    "PlannedProcess",
    "RunningJob",
    "variables_file",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchProfile:
    """What launchers and containers need to know of a device.

    Attributes:
        visibility_variable: names the devices that a process may see; None where there is none.
        image: container image with anygauge and what the device needs, which jobs run in; None
            where there is none.
        releases: what such images are built of, the default last; empty if the backend builds none.
        container_flags: extra arguments for the container runtime, as Docker takes them.
        podman_flags: those that podman takes instead; None: the same.
        cluster_resource: resource name in a cluster scheduler, such as ``nvidia.com/gpu``.
        node_resources: further resources of a container with devices, name -> quantity.
        runtime_class: of a cluster's pods with devices, where the cluster's default would not let
            them open one.
        capabilities: what containers must be allowed, such as ``IPC_LOCK``.
        network_resource: what a container must ask a cluster for to have the network that
            ``launch.fabric`` names; see `Backend.launch_profile`, which alone fills it in.
        binding: how ranks are bound: ``cores`` gives each an equal share of whole cores; or
            ``none``.
    """

    visibility_variable: str | None = None
    image: str | None = None
    releases: tuple[ImageRelease, ...] = ()
    container_flags: tuple[str, ...] = ()
    podman_flags: tuple[str, ...] | None = None
    cluster_resource: str | None = None
    node_resources: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str | None = None
    capabilities: tuple[str, ...] = ()
    network_resource: str | None = None
    binding: str = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file that a launcher writes before it starts anything."""

    path: str
    text: str
    mode: int = 0o644


_VARIABLES = "variables.json"


def variables_file(folder: Path) -> PlannedFile:
    """The file of `Plan.passed`, still empty: `Plan.write_files` puts their values into it."""
    return PlannedFile(path=str(folder / _VARIABLES), text="{}", mode=0o600)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess:
    """A process that a launcher starts: one agent on one node.

    Attributes:
        argv: never through a shell here.
        host: where; None is this machine.
        arguments: of an agent that reads them from standard input (``--stdin``), where a shell on
            the way to it must not see them.
    """

    node_rank: int
    argv: tuple[str, ...]
    host: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFile:
    """A file that users can hand to a scheduler themselves; ``launch --render`` writes it.

    Attributes:
        text: the absolute folder of the plan -> what stands in the file. The job file and the
            resolved run, ``run.json`` and ``run.yaml``, lie beside it.
        files: the plan's files that it needs.
        command: takes the file's path as its last argument.
    """

    name: str
    text: Callable[[Path], str] = field(compare=False)
    files: tuple[PlannedFile, ...]
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launcher would do: files to write, then processes to start.

    Attributes:
        pass_environment: variables whose values, at the time of submission, all processes get.
        operations: what to type by hand, for readers: ``submit``, ``status``, ``logs``, ``cancel``;
            ``{id}`` stands for the job's number.
        folders: where the machines have files that do not come with their image, for a launcher
            without `LauncherSpec.shared_filesystem`.
        notes: what the user should know before.
        held: open descriptors that processes on this machine inherit and keep to their end: the
            lock of the run directory is one. Other machines have no use for them.
        batch: how the job is submitted without this package's commands, where that is possible.
        grace_s: of ranks that the command itself supervises: seconds from the end of a rank's peers
            to SIGKILL.
        record: by which the submitted job will be found (`RunningJob.record`), where that is known
            before; plain values.
    """

    files: tuple[PlannedFile, ...] = ()
    processes: tuple[PlannedProcess, ...] = ()
    pass_environment: tuple[str, ...] = ()
    operations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    held: tuple[int, ...] = ()
    batch: BatchFile | None = None
    grace_s: float = 5.0
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> dict[str, str]:
        """The variables of `pass_environment`, as this process has them now."""
        return {name: os.environ[name] for name in self.pass_environment if name in os.environ}

    def write_files(self) -> None:
        """Write `files`, with the values of variables in a `variables_file`.

        Raises:
            AnygaugeError: a file cannot be written.
        """
        for file in self.files:
            text = json.dumps(self.passed) if Path(file.path).name == _VARIABLES else file.text
            try:
                write_text(file.path, text, file.mode)
            except OSError as error:
                raise AnygaugeError(f"{file.path} cannot be written: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """How a submitted job stands.

    Attributes:
        phase: ``waiting`` for machines or images, ``running``, or how it ended; ``gone``: whoever
            ran it does not know it (any more), and it left no report of its end; ``silent``:
            nobody answered.
        text: the same in a line, in the words of whoever runs it.
    """

    phase: Literal["waiting", "running", "done", "failed", "stopped", "gone", "silent"]
    text: str

    @property
    def has_ended(self) -> bool:
        """Whether it is sure that it neither waits nor runs."""
        return self.phase not in ("waiting", "running", "silent")


class RunningJob(Protocol):
    """A job that was submitted."""

    @property
    def record(self) -> Mapping[str, Any] | None:
        """For `Launcher.attach`, plain values; None where the job ends with this process."""

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Everything the agents report, until the job has ended. Last comes how: ``ended``, with
        the fields ``state``, ``exit_status`` and ``cause``."""

    def state(self) -> JobState:
        """How it fares now."""

    def cancel(self) -> None:
        """Ask every agent to end its ranks, a second time to kill them; does not wait."""


class Launcher(Protocol):
    """Starts one agent on each machine of a job."""

    def render(self, job: Job, options: Any, profile: LaunchProfile) -> Plan:
        """Return the plan of what `submit` does. Pure: writes and starts nothing, needs no device.

        Args:
            options: what the run file says, of the class that `LauncherSpec.options` names.
            profile: what containers need for the backend, and for the network where the run file
                names one.

        Raises:
            AnygaugeError: an option is wrong, or does not go with the job.
        """

    def submit(self, plan: Plan) -> RunningJob:
        """Do it.

        Raises:
            AnygaugeError: a file cannot be written, a process cannot be started, or the service or
                its client refuses.
        """

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> RunningJob:
        """A job that an earlier process submitted; only where jobs have a `record`.

        Raises:
            UnsupportedError: the record is not one of this launcher, or its jobs end with the
                command that started them.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherSpec:
    """How a launcher announces itself.

    Attributes:
        tested_on: ``real`` machines, ``emulated`` ones, or the ``schema`` of a service alone.
        max_nodes: most machines it can start on; None for no limit.
        remote: ranks run on other machines than this one. Without it, the command itself starts
            and supervises them: `Launcher.submit` is not called.
        shared_filesystem: those machines see this one's files; otherwise data, model and run
            directory are theirs.
        can: what its jobs can do, of `ABILITIES`.
        hardware: of the machines it starts jobs on, as `BackendSpec.hardware`.
        options: what the run file may say in ``launch.options``, as `BackendSpec.options`.
    """

    name: str
    factory: str
    api_version: int
    tested_on: str
    max_nodes: int | None = None
    remote: bool = False
    shared_filesystem: bool = True
    can: frozenset[str] = frozenset()
    hardware: str = ""
    options: str = ""


ABILITIES: Mapping[str, str] = {
    "detach": "runs on when the command ends",
    "warn": "gets a warning before its time is up",
    "requeue": "can be started again when it is preempted or loses a node, where it is asked for",
}
"""What a launcher's jobs may be able to do."""
