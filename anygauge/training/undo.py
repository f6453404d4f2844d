"""Optimizers that leave parameters as they are where ``found_inf`` is 1, decided on the device.

torch's fused optimizers do so by themselves: whoever steps one sets its attribute ``found_inf``, ()
float32. The others here take their step and are given back what it changed, some parameters at a
time, so that a copy of all of them is never held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from anygauge.strategies.shared.finite import TAKES_FOUND_INF, UPDATED_AT_ONCE


def undone(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, which takes ``found_inf`` if it did not.

    Args:
        optimizer: its state is each parameter's own: a step over some parameters and then over the
            others is one over all. What is in the state is not undone.
    """
    kind = type(optimizer)
    if not getattr(optimizer, TAKES_FOUND_INF, False):
        optimizer.__class__ = type(kind.__name__, (_Undoes, kind), {TAKES_FOUND_INF: True})
    return optimizer


class _Undoes(Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return super().step(closure)
        groups = self.param_groups
        self.found_inf: Tensor | None = None  # torch's unfused optimizers refuse it
        try:
            for group, some in parts(groups):
                self.param_groups = [{**group, "params": some}]
                before = flat(some).clone() if len(some) == 1 else flat(some)
                super().step()
                after = flat(some)
                kept = torch.where(found.to(after.device) > 0, before, after, out=before)
                torch._foreach_copy_(some, shaped(kept, some))
        finally:
            self.param_groups, self.found_inf = groups, found
        return None


def flat(parameters: Sequence[Tensor]) -> Tensor:
    """Their elements in one vector: one parameter's own memory, where it is in one piece."""
    pieces = [parameter.detach().reshape(-1) for parameter in parameters]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def shaped(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector's pieces, one after another, in the parameters' shapes."""
    sizes = [parameter.numel() for parameter in parameters]
    starts = accumulate(sizes, initial=0)
    pieces = [vector.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)]
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


def parts(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """A group, and some of its parameters with a gradient: `UPDATED_AT_ONCE` numbers, or one."""
    for group in groups:
        some: list[Tensor] = []
        size = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if some and size + parameter.numel() > UPDATED_AT_ONCE:
                yield group, some
                some, size = [], 0
            some.append(parameter)
            size += parameter.numel()
        if some:
            yield group, some
