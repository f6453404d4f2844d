"""Fused optimizers, by the arithmetic of the original's Python; its kernel is written out here."""

import math

import habana_standin
import torch
from torch.optim import Optimizer

from habana_frameworks.torch.core import step_closure as _step_closure


class FusedAdamW(Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.0,
        bias_correction=True,
        moments_dtype=None,
    ):
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction
        )
        super().__init__(params, defaults)
        if moments_dtype is not None:
            raise NotImplementedError("the stand-in keeps moments in the type of the parameters")

    def step_wrap(step_func):
        def wrap_(*args, **kwargs):
            result = step_func(*args, **kwargs)
            _step_closure._mark_step_if_lazy()
            return result

        return wrap_

    @step_wrap
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            _step_closure._mark_step_if_lazy()
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    self.state[p]["step"] = 0
                    self.state[p]["exp_avg"] = torch.zeros_like(p.data)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)
            if held:
                group["step"] = group.get("step", 0) + 1
                self._kernel(group, held)
        return loss

    @torch.no_grad()
    def _kernel(self, group, held):
        """One call for a group; it counts no step of a parameter, as the original."""
        habana_standin.record("FusedAdamW", len(held), group["step"])
        beta1, beta2 = group["betas"]
        size = group["lr"]
        if group["bias_correction"]:
            size *= math.sqrt(1.0 - beta2 ** group["step"]) / (1.0 - beta1 ** group["step"])
        moments = [self.state[p][name] for p in held for name in ("exp_avg", "exp_avg_sq")]
        given = [*(p.grad for p in held), *held, *moments, beta1, beta2, group["eps"]]
        given.append(group["weight_decay"] * group["lr"] != 0)
        # The size of a step and the decay are tensors of the card in the original.
        with habana_standin.census().whole("hpu::optimizer_adamw", given):
            self._arithmetic(group, held, size)

    def _arithmetic(self, group, held, size):
        beta1, beta2 = group["betas"]
        for p in held:
            state = self.state[p]
            state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1.0 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
            p.mul_(1.0 - group["weight_decay"] * group["lr"])
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
