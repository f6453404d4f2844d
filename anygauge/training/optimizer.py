"""A run's optimizer: parameter groups with rates and decay, LoRA+; `optimizers` makes each kind.

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
from anygauge.interface import HOST_DEVICE, OptimizerContext, OptimizerFactory, RunFileError
from anygauge.registry import installed_plugins
from anygauge.registry.specs import load_factory, refuse_if_missing
from anygauge.strategies.shared.finite import TAKES_FOUND_INF, UPDATED_AT_ONCE

B_FACTOR = re.compile(r"(^|\.)lora_(embedding_)?B(\.|$)")
"""Names of the factors that LoRA+ trains at a higher rate; peft's naming."""
Groups = list[dict[str, Any]]


def optimizer_factory(
    section: OptimizerSection, adamw: Callable[..., Optimizer] | None = None, *, fused: bool = False
) -> OptimizerFactory:
    """A function that makes the run's optimizer from named parameters; it takes ``found_inf``.

    Args:
        adamw: a device's own, in place of torch's; see `OptimizerContext`.
        fused: whether the run's device has a kernel for torch's fused AdamW, see `FUSED_ADAMW`.
            The host has one in any case.

    Raises:
        NotAvailableError: something that it needs is not installed.
        AnygaugeError: from that function: the section does not fit these parameters, or the
            optimizer cannot run on their device.
    """
    provided = installed_plugins().find_optimizer(section.name)
    refuse_if_missing(provided, section)
    factory = load_factory(provided)

    def make(
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Optimizer:
        named = list(parameters)
        groups = parameter_groups(section, named, shapes)
        first = groups[0]["params"]
        served = bool(first) and (fused or first[0].device.type == HOST_DEVICE)
        context = OptimizerContext(
            groups=groups,
            names={parameter: name for name, parameter in named},
            options=section,
            # None, not False: with False torch does not choose its multi-tensor form.
            adamw=adamw or functools.partial(torch.optim.AdamW, fused=served or None),
        )
        return with_found_inf(factory(context))

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
