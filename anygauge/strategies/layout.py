"""Which part of each trained parameter a rank holds; here all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from anygauge.interface.strategy import ClipFunction


class TensorLayout(Protocol):
    """How whole tensors and this rank's parts of them belong together."""

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter, as a plain one that shares its memory."""

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole shape of a parameter, trained or not."""

    def square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """The sum of squares of the gradients of some parts, over all ranks; ()."""

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients of parts so that all ranks' together have a norm of `max_norm` at most.

        Returns:
            The norm before, (), the same on every rank.
        """

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Put together a tensor of which each rank has such a part as of `parameter`.

        Every rank must call it.
        """

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of `parameter`'s shape."""


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


class Whole:
    """Every rank holds everything; see `TensorLayout`.

    Args:
        clip: clips gradients to a norm above 0.
    """

    def __init__(self, clip: ClipFunction) -> None:
        self._clip = clip

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        return parameter

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `TensorLayout.shape`."""
        return tuple(parameter.shape)

    def square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """See `TensorLayout.square`."""
        return local_square(parts)

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `TensorLayout.clip`."""
        if max_norm == torch.inf:
            return nn.utils.clip_grad_norm_(parts, max_norm)
        return self._clip(parts, max_norm)

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.whole`."""
        return part

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """See `TensorLayout.part`."""
        return whole
