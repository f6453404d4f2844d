"""AdamW whose epsilon is added before the second moment's bias is corrected, torch's after.

A device's own AdamW may compute so, as the original paper proposes for efficiency at the end of its
section 2 (https://arxiv.org/abs/1412.6980). It is then the counterpart for every other device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def early_epsilon() -> Callable[..., torch.optim.Optimizer]:
    """(groups, lr, betas, eps) -> AdamW, whose update after t steps is, beside the decay,

    lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

    with m and v the moments. torch's divides by ``sqrt(v / (1 - beta2^t)) + eps``, which is the
    same for an epsilon that is divided by ``sqrt(1 - beta2^t)``: 32 times as large in the first
    step of beta2 = 0.999, and the same in the end.
    """
    import torch

    class EarlyEpsilon(torch.optim.AdamW):
        """Parameters of a group have made the same number of steps."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            stated = [group["eps"] for group in self.param_groups]
            try:
                for group in self.param_groups:
                    made = max(
                        (int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)),
                        default=0,
                    )
                    group["eps"] /= (1.0 - group["betas"][1] ** (made + 1)) ** 0.5
                return super().step(closure)
            finally:
                for group, eps in zip(self.param_groups, stated, strict=True):
                    group["eps"] = eps

    return EarlyEpsilon
