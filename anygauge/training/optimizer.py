"""From the run file's section to an optimizer: parameter groups, rates, decay, LoRA+."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anygauge.config.schema import OptimizerSection
from anygauge.interface import RunFileError
from anygauge.interface.strategy import OptimizerFactory

B_FACTOR = re.compile(r"(^|\.)lora_(embedding_)?B(\.|$)")
"""Names of the factors that LoRA+ learns faster; peft's naming."""

Groups = list[dict[str, Any]]


AdamW = Callable[..., torch.optim.Optimizer]
"""(groups, lr, betas, eps) -> AdamW by a device's own kernel."""


def optimizer_factory(section: OptimizerSection, adamw: AdamW | None = None) -> OptimizerFactory:
    """A function that makes the run's optimizer from named parameters.

    Args:
        adamw: in place of torch's, where that is the optimizer.

    Raises:
        RunFileError: from that function: the section does not fit these parameters, or a package
            is missing.
        UnsupportedError: from that function: the optimizer cannot run on their device.
    """

    def make(
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> torch.optim.Optimizer:
        groups = parameter_groups(section, parameters, shapes)
        if adamw is not None and section.name == "adamw":
            return adamw(groups, lr=section.lr, **_adam_options(section))
        return _MAKERS[section.name](section, groups)

    return make


def parameter_groups(
    section: OptimizerSection,
    parameters: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Groups:
    """Groups by decay and rate, in the order of their first parameters.

    Matrices are decayed, those of embeddings too; vectors (norms, biases, magnitudes) are not:
    pulling a scale towards zero has no purpose. ``lr_scale`` is the group's rate as a multiple of
    the run's: `loraplus_lr_ratio` for the adapter's B factors (https://arxiv.org/abs/2402.12354),
    else 1. ``matrices`` says whether the group's parameters are.

    Args:
        shapes: see `OptimizerFactory`.

    Raises:
        RunFileError: LoRA+ is asked for, and no parameter is a B factor.
    """
    ratio = section.loraplus_lr_ratio
    found = False
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, parameter in parameters:
        matrix = len(shapes[name] if shapes else parameter.shape) >= 2
        faster = ratio is not None and B_FACTOR.search(name) is not None
        found = found or faster
        scale = ratio if ratio is not None and faster else 1.0
        group = groups.setdefault(
            (matrix, scale),
            {
                "params": [],
                "matrices": matrix,
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
        # A stage of a pipeline without a trained weight steps nothing, beside others that do.
        return [{"params": [], "matrices": True, "weight_decay": 0.0, "lr": section.lr}]
    return list(groups.values())


def _adamw(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    # None, not False: only then does torch choose its multi-tensor form by itself.
    first = groups[0]["params"]
    fused = True if first and _has_fused_adamw(first[0].device) else None
    return torch.optim.AdamW(groups, lr=section.lr, fused=fused, **_adam_options(section))


def _has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has a fused kernel there.

    A step alone cannot tell: a device that leaves to the host what it lacks takes one, by copying
    everything there and back. So the device's own kernel is asked for, and then the step, since
    torch refuses a device that it does not know for this there, not when it is constructed.
    """
    key = torch._C._dispatch_key_for_device(device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key):
        return False
    trial = nn.Parameter(torch.zeros(1, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        torch.optim.AdamW([trial], fused=True).step()
    except RuntimeError:
        return False
    return True


def _adamw_8bit(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    from anygauge.training.optimizers.adamw_8bit import adamw_8bit

    return adamw_8bit(groups, lr=section.lr, paged=section.paged, **_adam_options(section))


def _adam_options(section: OptimizerSection) -> dict[str, Any]:
    return {
        "betas": section.betas or (0.9, 0.999),
        "eps": 1e-8 if section.eps is None else section.eps,
    }


def _adafactor(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    from anygauge.training.optimizers.adafactor import Adafactor

    return Adafactor(groups, lr=section.lr)


def _lion(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    from anygauge.training.optimizers.foreach import Lion

    return Lion(groups, lr=section.lr, betas=section.betas or (0.9, 0.99))


def _sgd(section: OptimizerSection, groups: Groups) -> torch.optim.Optimizer:
    from anygauge.training.optimizers.foreach import DecoupledSGD

    momentum = 0.9 if section.momentum is None else section.momentum
    return DecoupledSGD(groups, lr=section.lr, momentum=momentum)


_MAKERS: dict[str, Callable[[OptimizerSection, Groups], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
}
