"""The contract of a strategy: how a model is spread over ranks, built and stepped.

A `Strategy` builds an `Engine`; the loop talks to the engine alone. The engine schedules forward
and backward itself, so that one that runs them in another order (a pipeline) fits as well as one
that runs them batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor, nn

from anygauge.config.precision import Precision
from anygauge.interface import Backend, Phase, Requirement, Setting, Support

if TYPE_CHECKING:
    from anygauge.strategies.state import Counters, TrainedState


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
        names within the unit. May put host parameters in place of the model's meta ones.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze the base and add the adapter; returns the model unchanged where there is none."""

    def borrowed(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """Of an adapted model: parameters that a module reads though another one owns them."""

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool) -> None:
        """Recompute activations in backward, if the run asks for it."""


OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named trained parameters -> an optimizer over them."""

ClipFunction = Callable[[Sequence[nn.Parameter], float], Tensor]
"""(parameters, largest norm) -> norm of all gradients before, (); gradients are scaled in place."""

LossFunction = Callable[[Any, Tensor], Tensor]
"""(outputs of the model, labels (B, T) int64 with -100 where not supervised) -> summed loss, ()."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the device.

    Attributes:
        inputs: keyword arguments of the model's forward.
        labels: (B, T) int64, not shifted; -100 where not supervised.
    """

    inputs: Mapping[str, Any]
    labels: Tensor


class Placed(Sequence[DeviceBatch]):
    """Micro-batches that move to the device one at a time, as the engine comes to them."""

    def __init__(self, batches: Sequence[Any], place: Callable[[Any], DeviceBatch]) -> None:
        self._batches = batches
        self._place = place

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> DeviceBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Placed: ...
    def __getitem__(self, index: int | slice) -> DeviceBatch | Placed:
        if isinstance(index, slice):
            return Placed(self._batches[index], self._place)
        return self._place(self._batches[index])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Losses of one step on this rank: summed over tokens, one () float32 per micro-batch."""

    loss_sums: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did: gradient norm before clipping, and whether loss scaling skipped it."""

    grad_norm: float
    skipped: bool = False


class Engine(Protocol):
    """A built model with its optimizer."""

    model: nn.Module

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, global_tokens: int
    ) -> StepResult:
        """Forward and backward of one step's micro-batches; gradients add up.

        Args:
            global_tokens: supervised tokens of the whole global batch over all ranks: the
                gradient is that of the summed loss divided by this number.
        """

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """Clip to `max_norm` (0: do not), step the optimizer at rate `lr`, clear gradients."""

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """Summed losses of this rank's batches, without gradients or dropout."""

    def export_trained(self) -> Mapping[str, Tensor]:
        """Trained parameters, whole and in the master type, on the host.

        Every rank must call it; only rank 0 gets values, others an empty mapping.
        """

    def keeps_state(self) -> Support:
        """Whether the next three can be called; the reason if not."""

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """(parameter name, kind, whole float32 tensor on the host), one after another.

        Kinds are `state.PARAMETER` and the optimizer's moments. Every rank must go through it to
        the end; only rank 0 gets tensors, others None.
        """

    def counters(self) -> Counters:
        """The optimizer's step count and the loss scale."""

    def import_state(self, state: TrainedState) -> None:
        """Go on from a state: masters, moments, step count, loss scale."""

    def close(self) -> None:
        """Let go of what the engine holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """What a strategy is given to build with.

    Attributes:
        rank, world_size: of this process in the run.
        micro_batch: sequences per forward.
        max_norm: the run's clipping norm.
        clip_grad_norm: for strategies that update whole parameters.
    """

    factory: ModelFactory
    optimizer: OptimizerFactory
    precision: Precision
    backend: Backend
    rank: int
    world_size: int
    micro_batch: int
    max_norm: float
    clip_grad_norm: ClipFunction = nn.utils.clip_grad_norm_


class Strategy(Protocol):
    """How a model is spread.

    Attributes:
        updates_whole: whether parameters are whole and on the device when they are updated, so that
            a device's own kernels can do it; the reason if not.
    """

    needs: Sequence[Requirement]
    needs_process_group: bool
    updates_whole: Support

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


def summed_losses(
    model: nn.Module, backend: Backend, batches: Iterable[DeviceBatch], loss_function: LossFunction
) -> list[Tensor]:
    """Loss of each batch, summed over its tokens, without gradients or dropout."""
    model.eval()
    sums = []
    with torch.no_grad():
        for batch in batches:
            sums.append(loss_function(model(**batch.inputs), batch.labels))
            backend.graph.mark_step(Phase.FORWARD)
    return sums


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that require a gradient, in the model's order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Give every parameter group the rate `lr`, times its own ``lr_scale`` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
