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
_ADAM = ("lr", "betas", "eps")


def adamw(context: OptimizerContext) -> Optimizer:
    """AdamW in float32, by the device; paged, by bitsandbytes, with the same state."""
    if context.options.paged:
        return _by_bitsandbytes(context, _paged_adamw())
    return context.adamw(context.groups, **_chosen(context.options, *_ADAM))


def _chosen(options: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def adamw_8bit(context: OptimizerContext) -> Optimizer:
    """AdamW whose state is block-wise 8-bit codes (https://arxiv.org/abs/2110.02861).

    State of a tensor: ``state1`` and ``state2``, uint8 codes of its shape; ``absmax1`` and
    ``absmax2``, float32, one per 256 elements; ``qmap1`` and ``qmap2``, 256 float32, the values of
    the codes; ``step``, an int. Of one below `MIN_8BIT_NUMEL`: ``state1``, ``state2`` in float32.
    """
    from bitsandbytes.optim import AdamW8bit

    return _by_bitsandbytes(context, AdamW8bit, min_8bit_size=MIN_8BIT_NUMEL)


def _by_bitsandbytes(context: OptimizerContext, kind: Any, **more: Any) -> Optimizer:
    """An optimizer of bitsandbytes, once it has updated a tensor.

    With ``paged``, the driver moves the state of tensors of `MIN_PAGED_NUMEL` elements or more
    between device and host; to torch it is on the host.

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
    more |= {"is_paged": options.paged, **_chosen(options, *_ADAM)}
    made: Optimizer = kind(context.groups, **more)
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
                    for old in [name for name in names if name in state]:
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
    options = context.options
    return DecoupledSGD(context.groups, options.lr, options.momentum, foreach=True)


def _decay(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient, shrunk by the decoupled decay.

    By ``lr * weight_decay`` of themselves, which the state never sees
    (https://arxiv.org/abs/1711.05101, equation 1).
    """
    parameters = [p for p in group["params"] if p.grad is not None]
    if parameters and group["weight_decay"] > 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    return parameters


class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    ``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then
    ``m = b2 * m + (1 - b2) * g``. Option: ``betas``. State: ``exp_avg``, which is m.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            if not (parameters := _decay(group)):
                continue
            for parameter in parameters:
                if not (state := self.state[parameter]):
                    state["exp_avg"] = torch.zeros_like(parameter)
            beta1, beta2 = group["betas"]
            gradients: list[Any] = [p.grad for p in parameters]
            moments = [self.state[p]["exp_avg"] for p in parameters]
            directions = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_add_(parameters, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - beta2)


class DecoupledSGD(torch.optim.SGD):
    """Gradient descent with heavy-ball momentum and decoupled decay.

    ``m = momentum * m + g``, ``p -= lr * (m + weight_decay * p)``. torch's own SGD adds the decay
    to the gradient, so that it passes through the momentum. Option: ``momentum``. State:
    ``momentum_buffer``, which is m; none without momentum.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            _decay(group)
        self.param_groups = [{**group, "weight_decay": 0.0} for group in groups]
        super().step()
        self.param_groups = groups


class MuonAdamW(Optimizer):
    """torch's Muon (https://kellerjordan.github.io/posts/muon/) and AdamW, as one optimizer.

    State of a parameter that `takes_muon`: ``momentum_buffer``; of others AdamW's.
    """

    def __init__(self, context: OptimizerContext) -> None:
        kinds: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in context.groups:
            for is_muon, groups in kinds.items():
                named = ((context.names[p], p) for p in group["params"])
                some = [p for name, p in named if takes_muon(name, p.shape) is is_muon]
                groups.append({**group, "params": some})
        own = ("lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        self._muon = torch.optim.Muon(kinds[True], **_chosen(context.options, *own))
        self._adamw = context.adamw(kinds[False], **_chosen(context.options, *_ADAM))
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._muon.state = self._adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            kind = self._muon if "ns_steps" in group else self._adamw
            kind.param_groups = [group]
            kind.step()


muon = MuonAdamW
