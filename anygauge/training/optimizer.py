"""A run's optimizer: parameter groups with rates and decay, LoRA+, and optimizers that torch lacks.

Those are AdamW with 8-bit state (from bitsandbytes), Lion, and SGD with decoupled decay.

All leave parameters as they are where ``found_inf`` is 1, decided on the device: whoever steps one
sets this attribute, () float32. torch's fused optimizers do so by themselves. The others take their
step and are given back what it changed, some parameters at a time, so that a copy of all of them is
never held.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anygauge.config.sections import OptimizerSection
from anygauge.interface import HOST_DEVICE, OptimizerFactory, RunFileError, UnsupportedError
from anygauge.strategies.shared.finite import TAKES_FOUND_INF, UPDATED_AT_ONCE

B_FACTOR = re.compile(r"(^|\.)lora_(embedding_)?B(\.|$)")
"""Names of the factors that LoRA+ trains at a higher rate; peft's naming."""
BLOCK = 256
"""Elements of 8-bit state that share one scale."""
MIN_8BIT_NUMEL = 4096
"""A tensor of fewer elements keeps its state in float32."""
MIN_PAGED_NUMEL = 100_000
"""A tensor of fewer elements is never paged by bitsandbytes."""
Groups = list[dict[str, Any]]
AdamW = Callable[..., Optimizer]
"""(groups, lr, betas, eps) -> AdamW by a device's own kernel."""


def optimizer_factory(
    section: OptimizerSection, adamw: AdamW | None = None, *, fused: bool = False
) -> OptimizerFactory:
    """A function that makes the run's optimizer from named parameters; it takes ``found_inf``.

    Args:
        adamw: makes the optimizer ``adamw`` in place of torch's.
        fused: whether the run's device has a kernel for torch's fused AdamW, see `FUSED_ADAMW`.
            The host has one in any case.

    Raises:
        RunFileError: from that function: the section does not fit these parameters, or a package
            is missing.
        UnsupportedError: from that function: the optimizer cannot run on their device.
    """

    def make(
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Optimizer:
        groups = parameter_groups(section, parameters, shapes)
        if section.name != "adamw":
            return with_found_inf(_MAKERS[section.name](section, groups))
        first = groups[0]["params"]
        served = bool(first) and (fused or first[0].device.type == HOST_DEVICE)
        # None, not False: with False torch does not choose its multi-tensor form.
        kernel = adamw or functools.partial(torch.optim.AdamW, fused=served or None)
        return with_found_inf(kernel(groups, lr=section.lr, **_adam_options(section)))

    return make


def parameter_groups(
    section: OptimizerSection,
    parameters: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Groups:
    """Groups by decay and rate, in the order of their first parameters.

    Matrices are decayed, embeddings too; vectors (norms, biases, magnitudes) are not: there is no
    reason to pull a scale towards zero. ``lr_scale`` is the group's rate as a multiple of the
    run's: `loraplus_lr_ratio` for the adapter's B factors (https://arxiv.org/abs/2402.12354), else
    1.

    Args:
        shapes: see `OptimizerFactory`.

    Raises:
        RunFileError: LoRA+ is set, and no parameter is a B factor.
    """
    ratio = section.loraplus_lr_ratio
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    found = False
    for name, parameter in parameters:
        matrix = len(shapes[name] if shapes else parameter.shape) >= 2
        scale = 1.0
        if ratio is not None and B_FACTOR.search(name):
            found, scale = True, ratio
        group = groups.setdefault(
            (matrix, scale),
            {
                "params": [],
                "weight_decay": section.weight_decay if matrix else 0.0,
                "lr": section.lr * scale,
                "lr_scale": scale,
            },
        )
        group["params"].append(parameter)
    if ratio is not None and not found:
        raise RunFileError(
            "train.optimizer.loraplus_lr_ratio: no trained parameter is a B factor of a LoRA "
            "adapter; leave the field out, or train a LoRA adapter"
        )
    if not groups:
        # A pipeline stage without a trained weight has nothing to step, while other stages do.
        return [{"params": [], "weight_decay": 0.0, "lr": section.lr}]
    return list(groups.values())


def _adamw_8bit(section: OptimizerSection, groups: Groups) -> Optimizer:
    """AdamW whose state is block-wise 8-bit codes (https://arxiv.org/abs/2110.02861).

    State of a tensor of `MIN_8BIT_NUMEL` elements or more: ``state1`` and ``state2`` (uint8 codes
    of its shape), ``absmax1`` and ``absmax2`` (float32, one per `BLOCK` elements), ``qmap1`` and
    ``qmap2`` (256 float32, the values of the codes); of a smaller one: ``state1`` and ``state2``
    in float32. ``step`` is an int. With ``paged``, ``state1`` and ``state2`` of a tensor of
    `MIN_PAGED_NUMEL` elements or more are in memory that the driver moves between device and host;
    for torch that is a tensor on the host.

    Raises:
        RunFileError: bitsandbytes is not installed.
        UnsupportedError: it has no 8-bit update for the parameters' device, or cannot page there.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        from anygauge.training.checks import EIGHT_BIT_MISSING

        raise RunFileError(EIGHT_BIT_MISSING) from error
    paged = section.paged
    device = groups[0]["params"][0].device
    # `check_strategy` has asked the backend, but an installed build may lack the device's library.
    trial = nn.Parameter(torch.zeros(MIN_PAGED_NUMEL if paged else MIN_8BIT_NUMEL, device=device))
    trial.grad = torch.zeros_like(trial)
    tried = AdamW8bit([trial], is_paged=paged)
    try:
        tried.step()
    except Exception as error:
        raise UnsupportedError(
            f"optimizer adamw_8bit: the installed bitsandbytes cannot update on {device} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use "
            "train.optimizer.name: adamw, or a build of bitsandbytes for this device"
        ) from error
    # Where bitsandbytes cannot page, it does not raise: it uses ordinary memory.
    if paged and not getattr(tried.state[trial]["state1"], "is_paged", False):
        raise UnsupportedError(
            "train.optimizer.paged: the installed bitsandbytes cannot page "
            f"memory of {device} to the host. Leave it out"
        )
    optimizer: Optimizer = AdamW8bit(
        groups,
        lr=section.lr,
        min_8bit_size=MIN_8BIT_NUMEL,
        is_paged=paged,
        **_adam_options(section),
    )
    return optimizer


def _adam_options(section: OptimizerSection) -> dict[str, Any]:
    return {
        "betas": section.betas or (0.9, 0.999),
        "eps": 1e-8 if section.eps is None else section.eps,
    }


_MAKERS: dict[str, Callable[[OptimizerSection, Groups], Optimizer]] = {
    "adamw_8bit": _adamw_8bit,
    "adafactor": lambda s, groups: torch.optim.Adafactor(groups, lr=s.lr),
    "lion": lambda s, groups: Lion(groups, lr=s.lr, betas=s.betas or (0.9, 0.99)),
    "sgd": lambda s, groups: DecoupledSGD(
        groups, lr=s.lr, momentum=0.9 if s.momentum is None else s.momentum
    ),
}


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


def with_found_inf(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer, made to take ``found_inf`` if it did not.

    Args:
        optimizer: its state is each parameter's own: a step over some parameters and then over the
            others is one over all. What is in the state is not undone.
    """
    kind = type(optimizer)
    if not getattr(optimizer, TAKES_FOUND_INF, False):
        optimizer.__class__ = type(kind.__name__, (_UndoMixin, kind), {TAKES_FOUND_INF: True})
    return optimizer


class _UndoMixin(Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> Any:  # type: ignore[override]
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return super().step(closure)
        groups = self.param_groups
        self.found_inf: Tensor | None = None  # torch's unfused optimizers refuse it
        try:
            for group, some in _chunks(groups):
                self.param_groups = [{**group, "params": some}]
                before = _flatten(some).clone() if len(some) == 1 else _flatten(some)
                super().step()
                after = _flatten(some)
                kept = torch.where(found.to(after.device) > 0, before, after, out=before)
                torch._foreach_copy_(some, _unflatten(kept, some))
        finally:
            self.param_groups, self.found_inf = groups, found
        return None


def _flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Join elements in one vector: one parameter's own memory, where it is in one piece."""
    pieces = [parameter.detach().reshape(-1) for parameter in parameters]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _unflatten(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector's pieces, one after another, in the parameters' shapes."""
    starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
    pairs = zip(starts, parameters, strict=False)
    return [vector.narrow(0, start, p.numel()).view(p.shape) for start, p in pairs]


def _chunks(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
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
