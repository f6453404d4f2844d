"""The model that a strategy builds: its types, its pieces and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "Activations",
    "ClipFunction",
    "ModelFactory",
    "OptimizerFactory",
    "PartFunction",
    "Precision",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Names of torch types: one policy for every strategy, so that two of them can be compared.

    The optimizer's copy of trained weights, and its state, are float32.

    Attributes:
        param_dtype: weights and adapter in memory, and arithmetic.
        reduce_dtype: accumulation and reduction of gradients.
        why: how `param_dtype` was settled, in words.
        fp8: linear layers multiply in FP8 while they train; see `Backend.fp8_products`.
    """

    param_dtype: str
    reduce_dtype: str
    why: str = "asked for"
    fp8: bool = False

    @property
    def scales_loss(self) -> bool:
        """float16 underflows without loss scaling."""
        return self.param_dtype == "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What decoder layers keep between forward and backward, and where.

    Attributes:
        every: one of so many layers, the first of each, recomputes its activations in backward;
            0: none does.
        selective: such a layer keeps the results of matrix products and attention.
        offload: what layers keep lies in the host's memory meanwhile.
    """

    every: int = 0
    selective: bool = False
    offload: bool = False

    def recomputes(self, layer: int) -> bool:
        """Whether a layer, counted from 0, does."""
        return bool(self.every) and layer % self.every == 0

    def num_recomputed(self, layers: int) -> int:
        """How many of so many layers do."""
        return sum(map(self.recomputes, range(layers)))


class ModelFactory(Protocol):
    """Makes the model in the pieces that a strategy needs, in the order it decides.

    `fill_buffers` and `values` take a model of `skeleton` that was not adapted yet.
    """

    def skeleton(self) -> nn.Module:
        """The architecture: parameters on the meta device, buffers real and in their own types."""

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the buffers that are stored with the weights their stored values, on every rank."""

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        """Values of every parameter below the submodule `unit`, on the host.

        Read from files, or drawn from a generator that depends on seed and `unit` alone. Keys are
        names within the unit; a value may be read when it is looked up, each time anew. May put
        host parameters in place of the model's meta ones. Every rank may read, and all get the
        same.

        Args:
            part: what this rank keeps of each parameter; no more is read from files that allow it.
                Its names are those within the whole model. None: everything.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze the base and add the adapter, if there is one, with the same values on every rank.

        Given ``shift_labels``, the model returns ``loss``, summed over tokens, in place of logits.
        """

    def adapted_on_meta(self) -> tuple[nn.Module, Mapping[str, str]]:
        """The adapted model before it has the base's values, for strategies that shard it then.

        Returns:
            The model: what is `skeleton`'s is on the meta device, the adapter's values are real,
            float32 or the run's type, and on the host. And the skeleton's parameters: name in the
            adapted model -> name in the skeleton, which `values` knows.

        Raises:
            UnsupportedError: the adapter's first values depend on the base's.
        """

    def external_parameters(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """Find an adapted model's parameters that a module reads though another one owns them."""

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool = False) -> None:
        """Have layers recompute their activations in backward, as the run asks for it.

        Args:
            reentrant: by torch's older form, for engines that need it.

        Raises:
            UnsupportedError: the architecture, or the older form, has no such way.
        """


PartFunction: TypeAlias = "Callable[[str, Sequence[int]], tuple[slice, ...] | None]"
"""(parameter name, whole shape) -> the slice of each dimension that is wanted; None: nothing."""


class OptimizerFactory(Protocol):
    """Makes the run's optimizer over named trained parameters."""

    def __call__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
        /,
    ) -> Optimizer:
        """Args: shapes: by name, the whole shape of a parameter that holds a part of itself."""


ClipFunction: TypeAlias = "Callable[[Sequence[nn.Parameter], float], Tensor]"
"""(parameters, largest norm) -> norm of all gradients before, (); gradients are scaled in place."""
