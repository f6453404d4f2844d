"""The kernels of a run: which serve it, and where the loop's parts get them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from anygauge.config.schema import RunFile
from anygauge.interface import AttentionKernel, Backend, PluginError, UnsupportedError
from anygauge.models.kernels import register_attention
from anygauge.registry import REFERENCE, KernelChoice, Registry
from anygauge.strategies.base import ClipFunction, Strategy
from anygauge.training.optimizer import AdamW

UPDATES = ("adamw", "clip_grad_norm")
"""Operations of an update, which a strategy may leave to its engine."""


def kernels_of_run(
    run: RunFile, backend: Backend, registry: Registry, strategy: Strategy
) -> dict[str, KernelChoice]:
    """The kernel of each operation; those of an update only where they would be called.

    Raises:
        UnsupportedError: the run file asks for one that nothing would call.
        AnygaugeError: a kernel that is asked for does not exist or cannot run; see
            `Registry.resolve_kernels`.
    """
    chosen = registry.resolve_kernels(backend, run.kernels)
    for operation in UPDATES:
        if operation not in chosen:
            continue
        unused = _unused(run, strategy, operation)
        if unused and run.kernels.get(operation, REFERENCE) != REFERENCE:
            raise UnsupportedError(
                f"kernels.{operation}: {run.kernels[operation]!r} would never be called: {unused}. "
                "Leave it out"
            )
        if unused:
            chosen[operation] = KernelChoice(operation=operation, name=REFERENCE, reason=unused)
    return chosen


def _unused(run: RunFile, strategy: Strategy, operation: str) -> str:
    if not strategy.updates_whole:
        return strategy.updates_whole.reason
    if operation == "adamw" and run.train.optimizer.name != "adamw":
        return f"train.optimizer.name is {run.train.optimizer.name}"
    if operation == "clip_grad_norm" and run.train.clip == 0:
        return "train.clip is 0"
    return ""


def load_update_kernels(
    registry: Registry, kernels: Mapping[str, KernelChoice]
) -> tuple[AdamW | None, ClipFunction]:
    """AdamW by a kernel, or None for torch's; and clipping, by a kernel or by torch."""
    adamw, clip = (
        registry.load_kernel(kernels[name]) if name in kernels else None for name in UPDATES
    )
    return adamw, clip or nn.utils.clip_grad_norm_


def choose_attention(
    run: RunFile, backend: Backend, registry: Registry, kernels: Mapping[str, KernelChoice]
) -> tuple[str, AttentionKernel | None]:
    """The attention that models are built with, and the kernel behind it, if it is one.

    Raises:
        UnsupportedError: the run file asks for an attention of the model library and a kernel.
    """
    asked = run.model.attention
    if asked != "auto":
        if "attention" in run.kernels:
            raise UnsupportedError(
                f"model.attention is {asked!r} and kernels.attention is "
                f"{run.kernels['attention']!r}: one of them must be left out"
            )
        return asked, None
    kernel = registry.load_kernel(kernels["attention"]) if "attention" in kernels else None
    if kernel is None:
        return backend.attention, None
    if not isinstance(kernel, AttentionKernel):
        raise PluginError(
            f"kernel {kernels['attention'].name!r} for attention is a {type(kernel).__name__}; its "
            "factory must return an AttentionKernel"
        )
    return register_attention(kernel), kernel
