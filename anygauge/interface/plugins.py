"""Specs of the other plugin kinds: kernels, launchers and trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anygauge.interface.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """One implementation of one operation.

    Attributes:
        operation: ``softmax``, ``attention``, ``linear_cross_entropy``, ...
        name: what users write in the run file.
        factory: ``"package.module:function"``; called without arguments, returns the kernel.
        device_types: torch device types it serves; empty means all.
        default: chosen without being asked for, where it can run.
        missing: why it cannot run here, or None; cheap and pure.
    """

    operation: str
    name: str
    factory: str
    api_version: int
    device_types: frozenset[str] = frozenset()
    default: bool = False
    missing: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file that a launcher writes before it starts anything."""

    path: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess:
    """A process that a launcher starts: one agent on one node.

    Attributes:
        node_rank: which machine of the job.
        host: where; None is this machine.
        argv: the arguments, never through a shell.
        environment: variables by value, besides those inherited.
    """

    node_rank: int
    argv: tuple[str, ...]
    host: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launcher would do: files to write, then processes to start."""

    files: tuple[PlannedFile, ...] = ()
    processes: tuple[PlannedProcess, ...] = ()


class RunningJob(Protocol):
    """A job that was submitted."""

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Everything the agents report, until the job ends."""

    def cancel(self) -> None:
        """Ask every agent to end its ranks, a second time to kill them; does not wait."""

    def wait(self) -> int:
        """Exit status of the job."""


class Launcher(Protocol):
    """Starts one agent on each node of a job."""

    def render(self, job: Job, options: Mapping[str, Any]) -> Plan:
        """What would be done. Pure: writes nothing, starts nothing, needs no device."""

    def submit(self, plan: Plan) -> RunningJob:
        """Do it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherSpec:
    """How a launcher announces itself.

    Attributes:
        fidelity: how far it was proven: ``real``, ``emulated`` or ``schema``.
        max_nodes: most machines it can start on; None for no limit.
    """

    name: str
    factory: str
    api_version: int
    fidelity: str
    max_nodes: int | None = None


class Tracker(Protocol):
    """Receives a run's metrics on rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerSpec:
    """How a tracker announces itself; the factory is called with the run directory.

    Attributes:
        missing: why it cannot run here (a package that is not installed), or None.
    """

    name: str
    factory: str
    api_version: int
    missing: Callable[[], str | None] = lambda: None
