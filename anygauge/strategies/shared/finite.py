"""Keeps what is not finite away from the weights, without a question to the device.

A loss that is not finite makes its gradient so (`propagate_nonfinite`), a gradient that is not
finite makes the norm over all ranks so, and an optimizer steps only as long as all norms were
finite (`FiniteSteps`). All of this is decided on the device. The loop reads loss and norm later,
names the rows and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TAKES_FOUND_INF = "_step_supports_amp_scaling"
"""How torch's optimizers state that where their attribute ``found_inf``, () float32, is 1, a step
changes nothing; torch's GradScaler reads it."""

UPDATED_AT_ONCE = 2**23
"""Numbers that are copied before a step of an optimizer that does not take it: 32 MiB in float32.
One tensor may have more."""


def propagate_nonfinite(loss: Tensor, factor: float) -> Tensor:
    """`loss * factor`, (); its gradient is not finite where the loss is not.

    A loss can be infinite and its gradient finite: that of a token whose logit is -inf is.
    """
    value = loss.detach()
    # A number that is added is no part of a device's graph; one that fills a tensor is, and the
    # factor is another in every step.
    return loss * ((value - value) + factor)


class FiniteSteps:
    """Steps an optimizer until a norm is not finite, and never again.

    Args:
        optimizer: one that takes ``found_inf``, as those that a strategy is given do.
        step: what steps it; None: its own.

    Raises:
        TypeError: it does not, so that the weights would be lost.
    """

    def __init__(self, optimizer: Any, step: Callable[[], Any] | None = None) -> None:
        if not getattr(optimizer, TAKES_FOUND_INF, False):
            raise TypeError(f"{type(optimizer).__name__} does not take found_inf")
        self._optimizer = optimizer
        self._step = step or optimizer.step
        self._found: Tensor | None = None

    def step(self, norm: Tensor) -> None:
        """Step if this norm, (), and all before were finite: that of all ranks' gradients."""
        found = 1.0 - norm.detach().isfinite().to(torch.float32)
        self._found = found if self._found is None else torch.maximum(self._found, found)
        self._optimizer.found_inf = self._found
        try:
            self._step()
        finally:
            del self._optimizer.found_inf
