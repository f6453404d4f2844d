"""Hooks, and the specs of kernels, objectives, optimizers and trackers.

A plugin implements some of the hooks with `hookimpl` in a module named by an entry point. In
``pyproject.toml``::

    [project.entry-points.anygauge]
    mine = "anygauge_mine"

Discovery is all that a hook does; what it returns is used as plain objects. docs/plugins.md has
whole plugins: a backend, a kernel, a strategy and a launcher; docs/trackers.md has a tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

from anygauge.interface.environment import Setting
from anygauge.interface.job import Job
from anygauge.interface.node import Node

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from anygauge.interface.backend import Backend
    from anygauge.interface.launch import LauncherSpec
    from anygauge.interface.probe import BackendSpec
    from anygauge.interface.strategy import StrategySpec

__all__ = [
    "KernelSpec",
    "Objective",
    "ObjectiveSpec",
    "OptimizerContext",
    "OptimizerSpec",
    "PairScores",
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
    """Announce devices. Imports no torch."""


@hookspec
def anygauge_provide_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Announce implementations of operations. Imports no torch."""


@hookspec
def anygauge_provide_launchers() -> Iterable[LauncherSpec]:  # type: ignore[empty-body]
    """Announce ways to start a job on one or many machines."""


@hookspec
def anygauge_provide_objectives() -> Iterable[ObjectiveSpec]:  # type: ignore[empty-body]
    """Announce what training makes small. Imports no torch."""


@hookspec
def anygauge_provide_optimizers() -> Iterable[OptimizerSpec]:  # type: ignore[empty-body]
    """Announce what turns gradients into updates. Imports no torch."""


@hookspec
def anygauge_provide_strategies() -> Iterable[StrategySpec]:  # type: ignore[empty-body]
    """Announce ways to spread a model over ranks. Imports no torch."""


@hookspec
def anygauge_provide_trackers() -> Iterable[TrackerSpec]:  # type: ignore[empty-body]
    """Announce receivers of metrics."""


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


@dataclass(frozen=True, slots=True)
class PairScores:
    """How probable a model finds the answers of pairs; the first of each is the chosen one.

    Attributes:
        log_probs: of all tokens of an answer together, in nats; (N, 2) float32, below 0.
        num_tokens: loss tokens of each answer, at least 1; (N, 2) float32.
    """

    log_probs: Tensor
    num_tokens: Tensor


class Objective(Protocol):
    """The loss of pairs; made with an object of the class that `ObjectiveSpec.options` names."""

    def __call__(self, policy: PairScores, reference: PairScores | None) -> Tensor:
        """The loss of each pair by itself, (N,) float32: the step's is the mean over all ranks.

        Args:
            policy: of the model that is trained.
            reference: of the same model with its adapter off, without gradients or dropout; None
                where `ObjectiveSpec.reference` does not ask for it.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """How an objective announces itself.

    Attributes:
        factory: ``"package.module:Class"`` of an `Objective`. Rows are then pairs: a prompt, and a
            chosen and a rejected answer to it. Empty: rows are of any format, and the loss is the
            cross entropy of each of their loss tokens.
        options: what the run file may say in ``objective_options``, as `BackendSpec.options`.
        reference: it compares the model with itself without its adapter.
    """

    name: str
    factory: str = ""
    api_version: int
    summary: str = ""
    options: str = ""
    reference: bool = False

    @property
    def pairs(self) -> bool:
        """Whether its rows are pairs."""
        return bool(self.factory)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerContext:
    """What an optimizer is made from.

    Attributes:
        groups: of float32 parameters, as torch takes them: ``params``, ``lr`` and ``weight_decay``.
        names: of all parameters.
        options: of the class that `OptimizerSpec.options` names, with ``lr``, too.
        adamw: (groups, lr, betas, eps) -> AdamW in the form that is fastest on the device.
    """

    groups: list[dict[str, Any]]
    names: Mapping[nn.Parameter, str]
    options: Any
    adamw: Callable[..., Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """How an optimizer announces itself.

    What it makes is a `torch.optim.Optimizer`, which at an ``lr`` of 0 moves nothing. All that it
    keeps is ``step`` and tensors of a parameter's shape, in its ``state`` of that parameter, so
    that checkpoints have it, and some parameters can be stepped after others.

    Attributes:
        factory: ``"package.module:function"``; called with an `OptimizerContext`.
        summary: a line for the list of optimizers.
        options: as `BackendSpec.options`: the section's fields that not all optimizers have.
        sees_full_parameters: its update of a number depends on the rest of the matrix: refused
            where ranks have parts of matrices.
        changes_weights: it has methods ``train`` and ``eval``, as schedule-free ones do: engines
            call them before they train weights, and before they evaluate or save them. A second
            call changes nothing. Refused where an engine does not.
        state_bytes: what it keeps for each trained number; or (options, a parameter's name, its
            shape) -> that of the parameter.
        needs: options -> capability that it needs of a device -> (field, what to do instead).
        missing: options -> why it cannot run here and what to install, or None; cheap and pure.
    """

    name: str
    factory: str
    api_version: int
    summary: str = ""
    options: str = ""
    sees_full_parameters: bool = False
    changes_weights: bool = False
    state_bytes: float | Callable[[Any, str, Sequence[int]], float] = 8.0
    needs: Callable[[Any], Mapping[str, tuple[str, str]]] = lambda options: {}
    missing: Callable[[Any], str | None] = lambda options: None


RunStatus = Literal["finished", "failed", "stopped"]
"""How a run ended; ``stopped``: asked to end, and may be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerContext:
    """What a tracker is made from.

    Attributes:
        run_directory: a tracker that keeps an id for a resumed run writes it to a file in here.
        options: of the class that `TrackerSpec.options` names.
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
        options: what the run file may say in ``tracker_options``, as `BackendSpec.options`.
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
