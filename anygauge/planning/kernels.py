"""The kernels of a rehearsal: those of the run that are plain torch, and their like for others."""

from __future__ import annotations

from typing import Any

import torch

from anygauge.config.schema import RunFile
from anygauge.interface import Backend, KernelSpec
from anygauge.interface.strategy import OptimizerFactory
from anygauge.kernels.choose import ATTENTION, REFERENCE, kernels_of_run
from anygauge.kernels.plan import KernelPlan, plan_kernels
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.training.optimizer import optimizer_factory

FUSED = "sdpa"
"""The model library's attention that holds no scores."""


def planned_kernels(
    run: RunFile,
    registry: Registry,
    planned: Backend,
    backend: Backend,
    factory: CausalModelFactory,
) -> KernelPlan:
    """What a run's kernels are, with plain ones for those that need the backend's device.

    Args:
        planned: the backend of the rehearsal.
        backend: that of the run.

    Raises:
        AnygaugeError: what the run would refuse.
    """
    specs = {(p.spec.operation, p.spec.name): p.spec for p in registry.kernels}
    preferred = {**backend.kernels, **(backend.packed_kernels if run.data.packing else {})}
    planned.attention, planned.attention_why = backend.attention, backend.attention_why
    asked = dict(run.kernels)
    for operation, name in {**preferred, **asked}.items():
        spec = specs.get((operation, name))
        if spec is None or backend.device_type not in spec.device_types:
            continue
        asked[operation] = spec.plain or _plain(specs, operation)
        if operation == ATTENTION and not spec.plain:
            del asked[operation]
            planned.attention = FUSED
    if run.model.attention != "auto":
        asked.pop(ATTENTION, None)
    planned.kernels = {o: name for o, name in asked.items() if o not in run.kernels}
    planned.packed_kernels = {}
    named = {o: name for o, name in asked.items() if o in run.kernels}
    plain = run.model_copy(update={"kernels": named})
    return plan_kernels(plain, planned, kernels_of_run(plain, planned, registry), factory)


def _plain(specs: dict[tuple[str, str], KernelSpec], operation: str) -> str:
    """The default for all devices, or the reference."""
    for (of, name), spec in sorted(specs.items()):
        if of == operation and spec.default and not spec.device_types:
            return name
    return REFERENCE


def planned_optimizer(run: RunFile, kernels: KernelPlan, backend: Backend) -> OptimizerFactory:
    """torch's fused one where torch has it for the device, which only that device could tell.

    Elsewhere torch takes all tensors at once, which it would not do by itself for tensors without
    values.
    """
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    served = backend.device_type in _get_fused_kernels_supported_devices()

    def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=served, foreach=not served, **options)

    return optimizer_factory(run.train.optimizer, kernels.adamw or adamw)
