"""The contract of a strategy: how a model is spread over ranks, built and stepped.

A `Strategy` builds an `Engine`; the loop talks to the engine alone. The engine schedules forward
and backward itself, so that one that runs them in another order (a pipeline) fits as well as one
that runs them batch by batch. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from anygauge.interface.backend import FULL, Backend, Requirement, Support
from anygauge.interface.environment import Setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "PARAMETER",
    "BuildContext",
    "ClipFunction",
    "Counters",
    "DeviceBatch",
    "Engine",
    "LossFunction",
    "ModelFactory",
    "OptimizerFactory",
    "Precision",
    "StepResult",
    "Strategy",
    "StrategyRun",
    "StrategySpec",
    "TrainedState",
    "UpdateResult",
]

PARAMETER = "parameter"
"""The key of a trained tensor itself; other keys are the optimizer's, such as ``exp_avg``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Names of torch types: one policy for every strategy, so that two of them can be compared.

    Attributes:
        param_dtype: weights and adapter in memory, and arithmetic.
        reduce_dtype: accumulation and reduction of gradients.
        master_dtype: the optimizer's copy of trained weights, and its state.
        why: how `param_dtype` was settled, in words.
    """

    param_dtype: str
    reduce_dtype: str
    master_dtype: str = "float32"
    why: str = "asked for"

    @property
    def scales_loss(self) -> bool:
        """float16 underflows without loss scaling."""
        return self.param_dtype == "float16"


# -- the model -------------------------------------------------------------------------------------


class ModelFactory(Protocol):
    """Makes the model in the pieces that a strategy needs, in the order it decides."""

    @property
    def recomputes(self) -> bool:
        """Whether `checkpoint_activations` has activations recomputed: what the run asks for."""

    def skeleton(self) -> nn.Module:
        """The architecture: parameters on the meta device, buffers real and in their own types."""

    def values(self, model: nn.Module, unit: str) -> Mapping[str, Tensor]:
        """Values of every parameter below the submodule `unit`, on the host.

        Read from files, or drawn from a generator that depends on seed and `unit` alone. Keys are
        names within the unit. May put host parameters in place of the model's meta ones. Every rank
        may read, and all get the same.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze the base and add the adapter, if there is one; returns the adapted model.

        The adapter's values are the same on every rank.

        Given ``labels``, what it returns has ``loss``, summed over tokens, in place of logits.
        """

    def external_parameters(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """Of an adapted model: parameters that a module reads though another one owns them."""

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool = False) -> None:
        """Recompute activations in backward, if the run asks for it.

        Args:
            reentrant: by torch's older form, for engines that need it.
        """


class OptimizerFactory(Protocol):
    """Makes the run's optimizer."""

    def __call__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
        /,
    ) -> Optimizer:
        """An optimizer over named trained parameters.

        Args:
            shapes: by name, the whole shape of a parameter that holds a part of itself alone.
        """


ClipFunction: TypeAlias = "Callable[[Sequence[nn.Parameter], float], Tensor]"
"""(parameters, largest norm) -> norm of all gradients before, (); gradients are scaled in place."""

LossFunction: TypeAlias = "Callable[[Any], Tensor]"
"""Outputs of the model -> loss summed over tokens, (); the model makes it of its ``labels``."""


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """torch's clipping, as a `ClipFunction`."""
    from torch import nn

    return nn.utils.clip_grad_norm_(parameters, max_norm)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the device.

    Attributes:
        inputs: keyword arguments of the model's forward, ``labels`` among them where it is to
            return its loss: (B, T) int64, not shifted; -100 where not supervised.
    """

    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Losses of one step on this rank: summed over tokens, one () float32 per micro-batch."""

    loss_sums: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did: gradient norm before clipping, and whether loss scaling skipped it."""

    grad_norm: float
    skipped: bool = False


# -- what was trained ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Numbers of the optimizer and the loss scaler.

    Attributes:
        updates: steps that the optimizer has made; those that loss scaling skipped do not count.
        loss_scale: None where the loss is not scaled.
        good_steps: since the scale last changed.
    """

    updates: int
    loss_scale: float | None = None
    good_steps: int = 0


class TrainedState(Protocol):
    """Where a run goes on from; tensors may be read as late as they are asked for.

    It belongs to no strategy: tensors are whole, float32 and on the host, and names are those of
    the model's parameters. One strategy writes it, another reads it, in another sharding.
    """

    counters: Counters

    def names(self) -> Sequence[str]:
        """Trained parameters."""

    def tensor(self, name: str, key: str) -> Tensor:
        """One whole tensor, float32, on the host."""


# -- engine and strategy ---------------------------------------------------------------------------


class Engine(Protocol):
    """A built model with its optimizer."""

    model: nn.Module

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> StepResult:
        """Forward and backward of one step's micro-batches; gradients add up.

        Args:
            batches: this rank's; each is moved to the device when it is taken.
            normalizer: the gradient is that of the loss, summed over all ranks, divided by this
                number, the same on every rank: use it as it is given. It is the supervised tokens
                of the whole global batch.

        Returns:
            Of this rank's own batches, in their order.
        """

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """Clip to `max_norm` (0: do not), step the optimizer at rate `lr`, clear gradients.

        Gradients are summed over ranks before, here or in `run_step`; a trained parameter that got
        none counts as zero. The result is the same on every rank.
        """

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """Summed losses of this rank's batches, without gradients or dropout."""

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole shape of one of the model's parameters, of which this rank may hold a part."""

    def export_trained(self) -> Mapping[str, Tensor]:
        """Trained parameters, whole and in the master type, on the host.

        Every rank must call it; only rank 0 gets values, others an empty mapping.
        """

    def checkpoint_support(self) -> Support:
        """Whether the next three can be called; the reason if not."""

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """(parameter name, key, whole float32 tensor on the host), one after another.

        Keys are `PARAMETER` and those of the optimizer's state. Every rank must go through it to
        the end; only rank 0 gets tensors, others None.
        """

    def counters(self) -> Counters:
        """The optimizer's step count and the loss scale."""

    def import_state(self, state: TrainedState) -> None:
        """Resume from a state: masters, optimizer state, step count, loss scale.

        The model was built with the state's values already, in the type that weights have.
        """

    def close(self) -> None:
        """Let go of what the engine holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """What a strategy is given to build with.

    Attributes:
        rank, world_size: of this process in the run.
        micro_batch: sequences per forward.
        max_norm: the run's clipping norm.
        clip_grad_norm: for strategies whose optimizer sees full parameters.
    """

    factory: ModelFactory
    optimizer: OptimizerFactory
    precision: Precision
    backend: Backend
    rank: int
    world_size: int
    micro_batch: int
    max_norm: float
    clip_grad_norm: ClipFunction = clip_grad_norm


class Strategy(Protocol):
    """How a model is spread, with the options of a run.

    Attributes:
        description: its name and options in a few words, for the card of what was trained.
    """

    description: str

    def settings(
        self,
        backend: Backend,
        precision: Precision,
        *,
        skeleton: nn.Module | None,
        micro_batch: int,
        max_norm: float,
        recomputes: bool,
    ) -> Sequence[Setting]:
        """The engine's configuration, each field with its reason; also for dry runs.

        Args:
            recomputes: whether decoder layers recompute their activations in backward.
            skeleton: the adapted model on the meta device; None leaves out what depends on it.
        """

    def build(self, context: BuildContext) -> Engine:
        """Build the model on the backend's opened device."""


# -- the plugin ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRun:
    """What a strategy may look at before ranks start; nothing of it needs torch.

    Attributes:
        options: the run file's section, of the class that `StrategySpec.options` names.
        precision: None while the opened device decides it.
        optimizer: ``train.optimizer.name``.
        ranks_run_here: the packages of this machine are those that ranks will have.
    """

    options: Any
    world_size: int
    optimizer: str
    precision: Precision | None = None
    ranks_run_here: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """How a strategy announces itself; making one imports neither torch nor pydantic.

    Attributes:
        name: ``strategy.name`` in run files.
        factory: ``"package.module:Class"``; called with the run file's section, an object of
            `options` that has `name`, too; returns a `Strategy`.
        summary: a line for the list of strategies.
        options: ``"package.module:Class"``: a pydantic model with the section's fields besides
            ``name``; its module imports no torch. Empty: there are none.
        default: taken where a run file names none; of one strategy alone.
        reference: the conformance kit compares the default strategy with it, on one rank.
        world_sizes: the numbers of ranks that it runs on; empty: any.
        needs_process_group: whether ranks must have joined one before `Strategy.build`; a rank
            that is alone joins one, too.
        needs: what it asks of a device, with reasons; on one rank as well.
        engine: a name by which `Backend.unsupported_engines` may refuse it; empty: torch alone.
        distributions: packages besides torch whose versions decide a result, and are recorded.
        optimizer_sees_full_parameters: whether parameters are whole and on the device when they are
            updated, so that a device's own kernels can do it; the reason if not.
        check: refuses what the options cannot do, by raising an `AnygaugeError`; cheap and pure.
            The dry run, the run and each rank call it.
    """

    name: str
    factory: str
    api_version: int
    summary: str = ""
    options: str = ""
    default: bool = False
    reference: bool = False
    world_sizes: tuple[int, ...] = ()
    needs_process_group: bool = True
    needs: tuple[Requirement, ...] = ()
    engine: str = ""
    distributions: tuple[str, ...] = ()
    optimizer_sees_full_parameters: Support = FULL
    check: Callable[[StrategyRun], None] = lambda run: None
