"""Kernels of Gaudi's library for the update: AdamW over all parameters at once, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def fused_adamw() -> Callable[..., torch.optim.Optimizer]:
    """(groups, lr, betas, eps) -> AdamW in one kernel per group.

    Its epsilon is added before the second moment's bias is corrected, torch's after. In lazy mode
    it marks a step before each group and at the end.
    """
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    class CountedAdamW(FusedAdamW):
        """The library counts the steps of a group; here each parameter has the count, too, as
        torch's optimizers have it: a run resumes from there, on this device or another."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            for group in self.param_groups:
                # Each has made the same number of steps, but for those without a state.
                made = {int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)}
                group["step"] = max(made, default=0)
            result = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter]["step"] = group["step"]
            return result

    return CountedAdamW


def fused_clip_grad_norm() -> Callable[[Sequence[torch.nn.Parameter], float], torch.Tensor]:
    """(parameters, max_norm) -> norm of all gradients, which are scaled in place, in one kernel."""
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm

    clippers: dict[float, Any] = {}

    def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        # Each copies its limit to the card once.
        if max_norm not in clippers:
            clippers[max_norm] = FusedClipNorm(parameters, max_norm)
        norm: torch.Tensor = clippers[max_norm].clip_norm(parameters)
        return norm

    return clip
