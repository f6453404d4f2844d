"""Lion, and SGD whose decay is decoupled: all parameters of a group at once, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ForeachOptimizer(Optimizer):
    """Steps whole groups with torch's multi-tensor functions.

    Decay is decoupled: a parameter shrinks by ``lr * weight_decay`` of itself before its update,
    and the moments never see it (https://arxiv.org/abs/1711.05101, equation 1).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"] > 0:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            self.update(group, parameters, [p.grad for p in parameters])
        return loss

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Move the parameters of one group, in place."""
        raise NotImplementedError

    def moments(self, name: str, parameters: Iterable[Tensor]) -> list[Tensor]:
        """One state tensor per parameter, of its shape and type; zeros at first use."""
        found = []
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            found.append(state[name])
        return found


class Lion(ForeachOptimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then
    ``m = b2 * m + (1 - b2) * g``. State: ``exp_avg``, which is m.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """See `ForeachOptimizer.update`."""
        beta1, beta2 = group["betas"]
        moments = self.moments("exp_avg", parameters)
        directions = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(moments, gradients, 1 - beta2)


class DecoupledSGD(ForeachOptimizer):
    """Gradient descent with heavy-ball momentum and decoupled decay.

    ``m = momentum * m + g``, ``p -= lr * (m + weight_decay * p)``. torch's own SGD adds the decay
    to the gradient, so that it passes through the momentum. State: ``momentum_buffer``, which is
    m; none without momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """See `ForeachOptimizer.update`."""
        if group["momentum"] > 0:
            moments = self.moments("momentum_buffer", parameters)
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, gradients)
            gradients = moments
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])
