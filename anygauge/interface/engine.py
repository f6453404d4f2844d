"""A built model with its optimizer: what the loop talks to.

The engine schedules forward and backward itself, so that one that runs them in another order (a
pipeline) fits as well as one that runs them batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "PARAMETER",
    "Counters",
    "DeviceBatch",
    "Engine",
    "HasRankState",
    "LossFunction",
    "TrainedState",
    "UpdateResult",
]

PARAMETER = "parameter"
"""The key of a trained tensor itself; other keys are the optimizer's, such as ``exp_avg``."""

LossFunction: TypeAlias = "Callable[[Any], Tensor]"
"""Outputs of the model -> summed loss, (); made of its input ``shift_labels``."""


DeviceBatch: TypeAlias = "Mapping[str, Any]"
"""One micro-batch on the device: keyword arguments of the model's forward, ``shift_labels`` among
them where it is to return its loss: (B, T) int64, the token that each position is to predict; -100
where there is none. They are shifted already, so that a sequence can be cut anywhere. Those that
are not -100 are loss tokens: an engine that steps on its own gradients counts its rank's there.
Over all ranks that read other rows or positions they come to the step's `normalizer`; with
`StrategyRun.pairs`, sequences two by two are pairs, and those with loss tokens come to it."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        grad_norm: of all ranks' gradients before clipping, (); may still be on the device.
        skipped: whether loss scaling skipped it.
    """

    grad_norm: Tensor
    skipped: bool = False


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
    """Where a run resumes from; tensors may be read as late as they are needed.

    It belongs to no strategy: tensors are whole, float32 and on the host, and names are those of
    the model's parameters. One strategy writes it, another reads it, in another sharding.
    """

    counters: Counters

    def names(self) -> Sequence[str]:
        """Trained parameters."""

    def tensor(self, name: str, key: str) -> Tensor:
        """One whole tensor, float32, on the host."""


class Engine(Protocol):
    """A built model with its optimizer.

    Attributes:
        refuses_checkpoints: why `export_state`, `counters` and `import_state` cannot be called;
            empty: they can.
    """

    model: nn.Module
    refuses_checkpoints: str

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """Forward and backward of one step's micro-batches; gradients add up.

        Args:
            batches: this rank's; each is moved to the device when it is taken.
            normalizer: the gradient is that of the loss, summed over all ranks, divided by this
                number, the same on every rank: use it as it is given. It is the loss tokens of the
                whole global batch, or its pairs. Where the loss is not finite, the gradient is not.

        Returns:
            Losses of this rank's batches, in their order: each a sum, () float32. They may
            be on the device, where the loop leaves them until the next step was begun. Summed over
            all ranks they are the loss of the global batch, so they are zero where another rank of
            the same rows gives them.
        """

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """Clip to `max_norm` (0: do not), step the optimizer at rate `lr`, clear gradients.

        Gradients are summed over ranks before, here or in `run_step`; a trained parameter that got
        none counts as zero. The result is the same on every rank.

        From the first norm on that is not finite, weights stay as they are, here and in all later
        calls; not so where loss scaling skips an update. The loop reads the norm later, when the
        next step was begun, and ends the run.
        """

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """Losses of this rank's batches, as `run_step` has them, without gradients or dropout."""

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """The model's whole logits, (B, T, V) float32 on the host; ``shift_labels`` are not read.

        Every rank must call it, with the same rows; rank 0 gets them, others may get None.
        """

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole shape of one of the model's parameters, of which this rank may hold a part."""

    def export_trained(self) -> Mapping[str, Tensor]:
        """Trained parameters, whole and in the master type, on the host.

        Every rank must call it; only rank 0 gets values, others an empty mapping.
        """

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


@runtime_checkable
class HasRankState(Protocol):
    """What an `Engine` also has where ranks may keep a state of their own.

    Such as the error feedback of compressed gradients, or the outer momentum of local steps: it is
    nobody else's, so it is not in what `Engine.export_state` gives. A checkpoint keeps it beside
    that. It is given back where strategy, options and ranks are those of the checkpoint; otherwise
    a line says that it is left out, and the rest resumes.
    """

    def export_rank_state(self) -> Mapping[str, Tensor]:
        """This rank's state, by names of the engine's own choice; empty: it keeps none.

        Tensors may be on the device, and the engine's own, which its next step changes. Every rank
        calls it, after `Engine.export_state`.
        """

    def import_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `export_rank_state` gave, bit by bit, on the host.

        Called after `Engine.import_state`.

        Raises:
            ValueError: it does not fit this engine.
        """
