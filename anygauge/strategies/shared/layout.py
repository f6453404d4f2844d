"""Which part of each trained parameter a rank holds: all of it, or what a subclass says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anygauge.interface import ClipFunction


@dataclass(frozen=True, slots=True)
class Cut:
    """Part `index` of `count` equal ones, of dimension `dim` of a parameter."""

    dim: int
    index: int
    count: int

    def place(self, size: int) -> slice:
        """Return where the part lies in a dimension of `size`."""
        each = size // self.count
        return slice(self.index * each, (self.index + 1) * each)


class TensorLayout:
    """How whole tensors and this rank's parts of them belong together; here, a part is all."""

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter, as a plain one that shares its memory."""
        return parameter

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole shape of a parameter, trained or not."""
        return tuple(parameter.shape)

    def grad_square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """The sum of squares of the gradients of some parts, over all ranks; ()."""
        return local_square(parts)

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients of parts so that all ranks' together have a norm of `max_norm` at most.

        Returns:
            The norm before, (), the same on every rank.
        """
        return scale_to(parts, self.grad_square(parts).sqrt(), max_norm)

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Put together a tensor of which each rank has such a part as of `parameter`.

        Every rank must call it.
        """
        return part

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of `parameter`'s shape."""
        return whole


class GroupLayout(TensorLayout):
    """Ranks of a group together hold each parameter once.

    Args:
        group: these ranks.
        device: on which they communicate; parts may lie on another.
        inner: of what each of them holds.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, inner: TensorLayout | None = None
    ) -> None:
        self._group = group
        self._device = device
        self._inner = inner or TensorLayout()

    def grad_square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """See `TensorLayout.grad_square`."""
        square = self._inner.grad_square(parts).to(self._device)
        dist.all_reduce(square, group=self._group)
        return square


class WholeLayout(TensorLayout):
    """Every rank holds everything.

    Args:
        clip: clips gradients to a norm above 0.
    """

    def __init__(self, clip: ClipFunction) -> None:
        self._clip = clip

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `TensorLayout.clip`."""
        if max_norm == torch.inf:
            return nn.utils.clip_grad_norm_(parts, max_norm)
        return self._clip(parts, max_norm)


def local_square(parts: Sequence[nn.Parameter]) -> Tensor:
    """The sum of squares of gradients on this rank, (); zero without any."""
    gradients = [p.grad for p in parts if p.grad is not None and p.grad.numel()]
    if not gradients:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(gradients).square()


def scale_to(parts: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> Tensor:
    """Scale gradients to a norm of `max_norm` at most, of all ranks' together; returns `norm`."""
    if max_norm != torch.inf and any(p.grad is not None and p.grad.numel() for p in parts):
        torch.nn.utils.clip_grads_with_norm_(parts, max_norm, norm)
    return norm
