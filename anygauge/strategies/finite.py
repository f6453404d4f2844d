"""Keeps what is not finite away from the weights.

A loss that is not finite makes its gradient so (`scaled`), a gradient that is not finite makes the
norm over all ranks so, and an optimizer steps only as long as all norms were finite
(`FiniteSteps`). With torch's fused optimizers all of this is decided on the device; for any other,
the host reads the norm before the step. The loop reads loss and norm later, names the rows and ends
the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TAKES_FOUND_INF = "_step_supports_amp_scaling"
"""How torch's optimizers state that where their attribute ``found_inf``, () float32, is 1, a step
changes nothing; torch's GradScaler reads it."""


def scaled(loss: Tensor, factor: float) -> Tensor:
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
        optimizer: where it takes ``found_inf``, the host does not wait for the device.
        step: what steps it; None: its own.
    """

    def __init__(self, optimizer: Any, step: Callable[[], Any] | None = None) -> None:
        self._optimizer = optimizer
        self._on_device = bool(getattr(optimizer, TAKES_FOUND_INF, False))
        self._step = step or optimizer.step
        self._found: Tensor | None = None
        self._finite = True

    def step(self, norm: Tensor) -> None:
        """Step if this norm, (), and all before were finite: that of all ranks' gradients."""
        if not self._on_device:
            self._finite = self._finite and math.isfinite(float(norm))
            if self._finite:
                self._step()
            return
        found = 1.0 - norm.detach().isfinite().to(torch.float32)
        self._found = found if self._found is None else torch.maximum(self._found, found)
        self._optimizer.found_inf = self._found
        try:
            self._step()
        finally:
            del self._optimizer.found_inf
