"""Hooks, and the specs that kernels and trackers announce themselves with.

A plugin implements some of the hooks with `hookimpl` in a module named by an entry point. In
``pyproject.toml``::

    [project.entry-points.anygauge]
    mine = "anygauge_mine"

Discovery is all that a hook does; what it returns is used as plain objects. The example of each
hook is a whole module ``anygauge_mine``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

from anygauge.interface.environment import Setting
from anygauge.interface.job import Job, Node

if TYPE_CHECKING:
    from anygauge.interface.backend import Backend, BackendSpec
    from anygauge.interface.launch import LauncherSpec
    from anygauge.interface.strategy import StrategySpec

__all__ = [
    "KernelSpec",
    "RunStatus",
    "Tracker",
    "TrackerContext",
    "TrackerSpec",
    "hookimpl",
]

PROJECT = "anygauge"
ENTRY_POINT_GROUP = "anygauge"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def anygauge_provide_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Announce devices. Imports no torch.

    Example::

        from pathlib import Path

        from anygauge.interface import Backend, BackendSpec, Finding, Probe, hookimpl


        class MineBackend(Backend):  # better in a module of its own: imported when it is chosen
            name = "mine"
            device_type = "mine"


        def probe() -> Probe:
            device = "/dev/mine0"
            if Path(device).exists():
                found = Finding.yes("a card", device)
            else:
                found = Finding.no(f"there is no {device}", device)
            return Probe(devices=found, driver=found, software=Finding.not_needed())


        @hookimpl
        def anygauge_provide_backends():
            yield BackendSpec(
                name="mine",
                factory="anygauge_mine:MineBackend",
                probe=probe,
                api_version=1,
                priority=10,
            )
    """


@hookspec
def anygauge_provide_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Announce implementations of operations. Imports no torch.

    Example::

        from anygauge.interface import KernelSpec, hookimpl


        def rms_norm():
            # What each operation takes is in `anygauge.interface.kernels`.
            def normalised(x, weight, epsilon):
                wide = x.float()
                scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
                return weight * (wide * scale).to(x.dtype)

            return normalised


        @hookimpl
        def anygauge_provide_kernels():
            yield KernelSpec(
                operation="rms_norm",
                name="mine",
                factory="anygauge_mine:rms_norm",
                api_version=1,
            )
    """


@hookspec
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:  # type: ignore[empty-body]
    """Announce ways to start a job on one or many machines.

    Example::

        import sys
        from pathlib import Path

        from anygauge.interface import LauncherSpec, Plan, PlannedFile, PlannedProcess, hookimpl


        class Mine:
            def render(self, job, options, profile):
                file = str(Path(job.run_directory) / "job.json")
                agent = (sys.executable, "-m", "anygauge.launch.agent", "--job", file)
                return Plan(
                    files=(PlannedFile(path=file, text=job.dump(), mode=0o600),),
                    processes=(PlannedProcess(node_rank=0, argv=(*agent, "--node-rank", "0")),),
                )

            def submit(self, plan):
                ...  # writes the files, starts the processes and returns a `RunningJob`


        @hookimpl
        def anygauge_provide_launchers():
            yield LauncherSpec(
                name="mine",
                factory="anygauge_mine:Mine",
                api_version=1,
                tested_on="real",
                max_nodes=1,
            )
    """


@hookspec
def anygauge_provide_strategies() -> Iterable[StrategySpec]:  # type: ignore[empty-body]
    """Announce ways to spread a model over ranks. Imports no torch.

    Example::

        from anygauge.interface import StrategySpec, hookimpl


        class Mine:  # better in a module of its own: imported when it is chosen
            description = "mine"

            def __init__(self, section):
                self.section = section

            def settings(self, *arguments, **given):
                return ()

            def build(self, context):
                # Any engine will do: see `anygauge.interface.Engine`.
                from anygauge.strategies.single import Single

                return Single().build(context)


        @hookimpl
        def anygauge_provide_strategies():
            yield StrategySpec(
                name="mine",
                factory="anygauge_mine:Mine",
                api_version=1,
                world_sizes=(1,),
                needs_process_group=False,
            )
    """


@hookspec
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
    """Announce receivers of metrics.

    Example::

        from anygauge.interface import Options, TrackerSpec, hookimpl


        class MineOptions(Options):
            file: str  # what it writes to


        class Mine:
            def __init__(self, context):
                self.file = (context.run_directory / context.options.file).open("a")

            def log(self, step, metrics):
                print(step, dict(metrics), file=self.file)

            def close(self, status, summary):
                print(status, dict(summary), file=self.file)
                self.file.close()


        @hookimpl
        def anygauge_provide_trackers():
            yield TrackerSpec(
                name="mine",
                factory="anygauge_mine:Mine",
                api_version=1,
                options="anygauge_mine:MineOptions",
            )
    """


@hookspec
def anygauge_tune_environment(  # type: ignore[empty-body]
    backend: Backend, job: Job, node: Node, settings: Sequence[Setting]
) -> Iterable[Setting]:
    """A site adds or changes variables: what is returned wins over the backend's of that name.

    A hook takes those of the arguments that it needs.

    Example::

        from anygauge.interface import Setting, hookimpl


        @hookimpl
        def anygauge_tune_environment(job, node):
            if job.launch.nodes > 1:
                yield Setting(
                    name="HF_HUB_OFFLINE",
                    value="1",
                    reason=f"{node.hostname} reaches no other network",
                    source="the handbook of this site",
                )
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """One implementation of one operation.

    Attributes:
        operation: ``softmax``, ``attention``, ``linear_cross_entropy``, ...
        name: what users write in the run file.
        factory: ``"package.module:function"``; called with the kernels of `uses`, by the names of
            their operations, returns the kernel.
        device_types: torch device types it serves; empty means all.
        default: chosen without being asked for, where it can run.
        missing: why it cannot run here, or None; cheap and pure.
        uses: other operations that it is made of: it gets the run's choice of each.
        plain: of a kernel for some devices: the one of the same operation for all devices that
            holds as much memory, with which a run is planned; "" where it holds no more than the
            operation's default or reference, and of attention no scores.
        counterpart: of a kernel that computes by another formula than the reference: the one of the
            same operation for all devices that has its formula, which may be the kernel itself. The
            conformance kit holds both the kernel and its runs against that.
    """

    operation: str
    name: str
    factory: str
    api_version: int
    device_types: frozenset[str] = frozenset()
    default: bool = False
    missing: Callable[[], str | None] = lambda: None
    uses: tuple[str, ...] = ()
    plain: str = ""
    counterpart: str = ""


RunStatus = Literal["finished", "failed", "stopped"]
"""How a run ended; ``stopped``: asked to end, and may be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerContext:
    """What a tracker is made from.

    Attributes:
        run_directory: where the run's files are; a tracker that keeps an id for a resumed run
            writes it to a file of its own in here.
        run_name: the run file's ``name``.
        options: what the run file says, of the class that `TrackerSpec.options` names.
        parameters: the resolved run file, flat: dotted path -> text, number, truth value or
            None. Secrets and the values of ``environment`` are left out.
        resumed_from_step: steps that were done before, where the run resumes from a checkpoint.
    """

    run_directory: Path
    run_name: str
    options: Any = None
    parameters: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    resumed_from_step: int | None = None


class Tracker(Protocol):
    """Receives a run's metrics on rank 0.

    It is made and called in one thread of its own: a slow one does not hold up training. After
    one that raises nothing more is logged to it, and the user gets a message; it is still closed.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record what was measured after `step` steps.

        Names are ``train/loss``, ``eval/loss``, ``system/host_memory_used``; values may be inf
        or nan. A step may come several times, each time with other names.
        """

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Flush and end; the last call.

        Args:
            summary: the run's result, such as ``final_loss``; empty where it failed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerSpec:
    """How a tracker announces itself.

    Attributes:
        factory: ``"package.module:Class"``; called with a `TrackerContext` before the first step.
            An `AnygaugeError` that it raises is shown to the user as it is.
        options: ``"package.module:Class"``: derives from `Options`; what the run file may say in
            ``tracker_options`` for it. Empty: nothing.
        missing: why it cannot run here (a package that is not installed), or None.
        unready: (options, environment variables) -> what a user must still do, such as to log in,
            or None; cheap and pure.
    """

    name: str
    factory: str
    api_version: int
    options: str = ""
    missing: Callable[[], str | None] = lambda: None
    unready: Callable[[Any, Mapping[str, str]], str | None] = lambda options, environ: None
