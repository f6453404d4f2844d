"""Where a step's gradients are added up, and when they are summed over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class Gradients(Protocol):
    """The gradients of one step, for one engine."""

    def during(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; `last` of the step."""

    def collect(self) -> None:
        """After backward of each micro-batch."""

    def take(self) -> list[Tensor | None]:
        """This rank's part of the sums over all ranks, one for each trained parameter.

        In the type of reductions, and the engine's from then on; None counts as zero.
        """


class LocalGradients:
    """Added up on one rank, which has all of them; see `Gradients`.

    Args:
        trained: parameters, each whole.
        dtype: of the sums.
    """

    def __init__(self, trained: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._trained = trained
        self._dtype = dtype
        self._sums: list[Tensor | None] = [None] * len(trained)

    def during(self, last: bool) -> AbstractContextManager[None]:
        """See `Gradients.during`."""
        return contextlib.nullcontext()

    def collect(self) -> None:
        """See `Gradients.collect`."""
        for index, parameter in enumerate(self._trained):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient.to(self._dtype)
            else:
                total.add_(gradient)

    def take(self) -> list[Tensor | None]:
        """See `Gradients.take`."""
        taken, self._sums = self._sums, [None] * len(self._trained)
        return taken
