"""The kernels of a run: which serve it, and where the loop's parts get them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import nn

from anygauge.config.schema import RunFile
from anygauge.interface import (
    AttentionKernel,
    Backend,
    PluginError,
    ShapeKind,
    Support,
    UnsupportedError,
)
from anygauge.models.fused_loss import LossKernel
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
    adamw, clip = (registry.load_kernel(kernels, name) for name in UPDATES)
    return adamw, clip or nn.utils.clip_grad_norm_


LOSS = "linear_cross_entropy"


def load_loss_kernel(
    run: RunFile, backend: Backend, registry: Registry, kernels: dict[str, KernelChoice]
) -> LossKernel | None:
    """The kernel that makes the loss from hidden states, or None where logits are held.

    Raises:
        UnsupportedError: one is asked for, and the device compiles the model as a whole.
    """
    kernel: LossKernel | None = registry.load_kernel(kernels, LOSS)
    compiler = backend.graph.compiler
    if kernel is not None and compiler is not None and compiler.regions == "model":
        hold_logits(run, kernels, "the device compiles the whole model, its output layer with it")
        return None
    if kernel is None:
        return None
    # Leaving rows out makes a new shape of each batch.
    fluid = backend.graph.shapes.kind is ShapeKind.DYNAMIC
    return functools.partial(kernel, skip_ignored=fluid)


def settle_loss(run: RunFile, kernels: dict[str, KernelChoice], served: Support | None) -> str:
    """Once the model is built: record whether its loss is the kernel's; returns it in words.

    Raises:
        UnsupportedError: the run file asks for the kernel, and the model cannot have it.
    """
    if served is not None and not served:
        hold_logits(run, kernels, str(served))
    if LOSS not in kernels or kernels[LOSS].name == REFERENCE:
        return f"all logits held ({kernels[LOSS].reason})" if LOSS in kernels else "all logits held"
    return f"{kernels[LOSS].name}, without holding the logits"


def hold_logits(run: RunFile, kernels: dict[str, KernelChoice], reason: str) -> None:
    """Record that the loss is computed from logits, and why.

    Raises:
        UnsupportedError: the run file asks for another way.
    """
    if run.kernels.get(LOSS, REFERENCE) != REFERENCE:
        raise UnsupportedError(
            f"kernels.{LOSS}: {run.kernels[LOSS]!r} cannot serve this run: {reason}. Leave it out"
        )
    kernels[LOSS] = KernelChoice(operation=LOSS, name=REFERENCE, reason=reason)


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
    kernel = registry.load_kernel(kernels, "attention")
    if kernel is None:
        return backend.attention, None
    if not isinstance(kernel, AttentionKernel):
        raise PluginError(
            f"kernel {kernels['attention'].name!r} for attention is a {type(kernel).__name__}; its "
            "factory must return an AttentionKernel"
        )
    return register_attention(kernel), kernel
