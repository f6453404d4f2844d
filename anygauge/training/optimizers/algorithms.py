"""Optimizers that torch lacks, and what makes each: AdamW of 8 bits or paged, Lion, Muon, SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anygauge.interface import OptimizerContext, UnsupportedError
from anygauge.training.optimizers import takes_muon

MIN_8BIT_NUMEL = 4096
"""A tensor of fewer elements keeps its state in float32."""
MIN_PAGED_NUMEL = 100_000
"""A tensor of fewer elements is never paged by bitsandbytes."""


def adamw(context: OptimizerContext) -> Optimizer:
    """AdamW in float32, by the device; paged, by bitsandbytes, with the same state."""
    options = context.options
    if options.paged:
        return _by_bitsandbytes(context, _paged_adamw())
    return context.adamw(context.groups, lr=options.lr, betas=options.betas, eps=options.eps)


def adamw_8bit(context: OptimizerContext) -> Optimizer:
    """AdamW whose state is block-wise 8-bit codes (https://arxiv.org/abs/2110.02861).

    State of a tensor of `MIN_8BIT_NUMEL` elements or more: ``state1`` and ``state2`` (uint8 codes
    of its shape), ``absmax1`` and ``absmax2`` (float32, one per 256 elements), ``qmap1`` and
    ``qmap2`` (256 float32, the values of the codes); of a smaller one: ``state1`` and ``state2``
    in float32. ``step`` is an int. With ``paged``, ``state1`` and ``state2`` of a tensor of
    `MIN_PAGED_NUMEL` elements or more are in memory that the driver moves between device and host;
    for torch that is a tensor on the host.
    """
    from bitsandbytes.optim import AdamW8bit

    return _by_bitsandbytes(context, AdamW8bit, min_8bit_size=MIN_8BIT_NUMEL)


def _by_bitsandbytes(context: OptimizerContext, kind: Any, **more: Any) -> Optimizer:
    """An optimizer of bitsandbytes, once it has updated a tensor.

    Raises:
        UnsupportedError: it has no update for the parameters' device, or cannot page there.
    """
    options, device = context.options, context.groups[0]["params"][0].device
    # `check_strategy` has asked the backend, but an installed build may lack the device's library.
    numel = MIN_PAGED_NUMEL if options.paged else MIN_8BIT_NUMEL
    trial = nn.Parameter(torch.zeros(numel, device=device))
    trial.grad = torch.zeros_like(trial)
    tried = kind([trial], is_paged=options.paged)
    try:
        tried.step()
    except Exception as error:
        raise UnsupportedError(
            f"optimizer {options.name}: the installed bitsandbytes cannot update on {device} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use "
            "train.optimizer.name: adamw, not paged, or a build of bitsandbytes for this device"
        ) from error
    # Where bitsandbytes cannot page, it does not raise: it uses ordinary memory.
    paged = (getattr(value, "is_paged", False) for value in tried.state[trial].values())
    if options.paged and not any(paged):
        raise UnsupportedError(
            "train.optimizer.paged: the installed bitsandbytes cannot page "
            f"memory of {device} to the host. Leave it out"
        )
    made: Optimizer = kind(
        context.groups,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        is_paged=options.paged,
        **more,
    )
    return made


def _paged_adamw() -> Any:
    """bitsandbytes' AdamW of 32 bits, with the state of torch's: a run resumes with either."""
    from bitsandbytes.optim import AdamW32bit

    class PagedAdamW(AdamW32bit):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self._rename({"exp_avg": "state1", "exp_avg_sq": "state2"})
            super().step()
            self._rename({"state1": "exp_avg", "state2": "exp_avg_sq"})

        def _rename(self, names: dict[str, str]) -> None:
            for group in self.param_groups:
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    for old in names.keys() & state.keys():
                        state[names[old]] = state.pop(old)

    return PagedAdamW


def adafactor(context: OptimizerContext) -> Optimizer:
    """torch's Adafactor (https://arxiv.org/abs/1804.04235)."""
    return torch.optim.Adafactor(context.groups, lr=context.options.lr)


def lion(context: OptimizerContext) -> Optimizer:
    """See `Lion`."""
    return Lion(context.groups, lr=context.options.lr, betas=context.options.betas)


def sgd(context: OptimizerContext) -> Optimizer:
    """See `DecoupledSGD`."""
    return DecoupledSGD(context.groups, lr=context.options.lr, momentum=context.options.momentum)


class _ForeachOptimizer(Optimizer):
    """Steps whole groups with torch's multi-tensor functions.

    Decay is decoupled: a parameter shrinks by ``lr * weight_decay`` of itself before its update,
    and the state never sees it (https://arxiv.org/abs/1711.05101, equation 1).
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.0, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"] > 0:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            self._update(group, parameters, [p.grad for p in parameters])

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Move the parameters of one group, in place."""
        raise NotImplementedError

    def _state_tensors(self, name: str, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return one state tensor per parameter, of its shape and type; zeros at first use."""
        for parameter in parameters:
            if name not in (state := self.state[parameter]):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [self.state[parameter][name] for parameter in parameters]


class Lion(_ForeachOptimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then
    ``m = b2 * m + (1 - b2) * g``. Option: ``betas``. State: ``exp_avg``, which is m.
    """

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        beta1, beta2 = group["betas"]
        moments = self._state_tensors("exp_avg", parameters)
        directions = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(moments, gradients, 1 - beta2)


class DecoupledSGD(_ForeachOptimizer):
    """Gradient descent with heavy-ball momentum and decoupled decay.

    ``m = momentum * m + g``, ``p -= lr * (m + weight_decay * p)``. torch's own SGD adds the decay
    to the gradient, so that it passes through the momentum. Option: ``momentum``. State:
    ``momentum_buffer``, which is m; none without momentum.
    """

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        if group["momentum"] > 0:
            moments = self._state_tensors("momentum_buffer", parameters)
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, gradients)
            gradients = moments
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])


class MuonAdamW(Optimizer):
    """torch's Muon (https://kellerjordan.github.io/posts/muon/) and AdamW, as one optimizer.

    State of a parameter that `takes_muon`: ``momentum_buffer``; of others AdamW's.
    """

    def __init__(self, context: OptimizerContext) -> None:
        def groups_of(is_muon: bool) -> list[dict[str, Any]]:
            def of_kind(p: nn.Parameter) -> bool:
                return takes_muon(context.names[p], p.shape) is is_muon

            return [
                {**group, "params": [*filter(of_kind, group["params"])]} for group in context.groups
            ]

        options, own = context.options, ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        of_muon = {name: getattr(options, name) for name in own}
        self._muon = torch.optim.Muon(groups_of(True), lr=options.lr, **of_muon)
        self._adamw = context.adamw(
            groups_of(False), lr=options.lr, betas=options.betas, eps=options.eps
        )
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._muon.state = self._adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            kind = self._muon if "ns_steps" in group else self._adamw
            kind.param_groups = [group]
            kind.step()


muon = MuonAdamW
