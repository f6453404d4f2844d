"""The kernels of a run: which serve it, and where the loop's parts get them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anygauge.config.schema import RunFile
from anygauge.interface import Backend, ShapeKind, Support, UnsupportedError
from anygauge.registry import REFERENCE, KernelChoice, Registry
from anygauge.registry.kernels import choose_kernels, load_kernel

if TYPE_CHECKING:
    from anygauge.interface.strategy import ClipFunction, Strategy
    from anygauge.models.fused_loss import LossKernel
    from anygauge.strategies.facts import StrategyFacts
    from anygauge.training.optimizer import AdamW

UPDATES = ("adamw", "clip_grad_norm")
"""Operations of an update, which a strategy may leave to its engine."""
LOSS = "linear_cross_entropy"
LORA = "lora_linear"
CALLED = {"attention", "rms_norm", LORA, LOSS, *UPDATES}
"""What a run calls itself; all else is called by the kernels that use it."""


def kernels_of_run(
    run: RunFile, backend: Backend, registry: Registry, strategy: Strategy | StrategyFacts
) -> dict[str, KernelChoice]:
    """The kernel of each operation that the run calls, itself or through another kernel.

    Raises:
        UnsupportedError: the run file asks for one that nothing would call, or for two attentions.
        AnygaugeError: a kernel that is asked for does not exist or cannot run; see
            `Registry.resolve_kernels`.
    """
    check_attention(run)
    chosen = choose_kernels(registry, backend, run.kernels, packing=run.data.packing)
    for operation in (*UPDATES, LORA):
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
    called = {op: k for op, k in chosen.items() if op in CALLED}
    if run.model.attention != "auto":
        called.pop("attention", None)
    used = {op for k in called.values() if k.provided for op in k.provided.spec.uses}
    for operation in run.kernels.keys() - CALLED - used:
        around = sorted(
            f"kernels.{p.spec.operation}: {p.spec.name}"
            for p in registry.kernels
            if operation in p.spec.uses
        )
        raise UnsupportedError(
            f"kernels.{operation}: {run.kernels[operation]!r} would never be called: no kernel of "
            f"this run uses {operation}. Leave it out"
            + (f", or ask for one that does ({', '.join(around)})" if around else "")
        )
    return {op: choice for op, choice in chosen.items() if op in CALLED | used}


def check_attention(run: RunFile) -> None:
    """Refuse an attention that is named twice.

    Raises:
        UnsupportedError: names both.
    """
    if run.model.attention != "auto" and "attention" in run.kernels:
        raise UnsupportedError(
            f"model.attention is {run.model.attention!r} and kernels.attention is "
            f"{run.kernels['attention']!r}: one of them must be left out"
        )


def _unused(run: RunFile, strategy: Strategy | StrategyFacts, operation: str) -> str:
    if operation == LORA:
        return "" if run.adapter is not None else "there is no adapter"
    if not strategy.optimizer_sees_full_parameters:
        return strategy.optimizer_sees_full_parameters.reason
    if operation == "adamw" and run.train.optimizer.name != "adamw":
        return f"train.optimizer.name is {run.train.optimizer.name}"
    if operation == "clip_grad_norm" and run.train.clip == 0:
        return "train.clip is 0"
    return ""


def load_update_kernels(
    registry: Registry, kernels: Mapping[str, KernelChoice]
) -> tuple[AdamW | None, ClipFunction]:
    """AdamW by a kernel, or None for torch's; and clipping, by a kernel or by torch."""
    from torch import nn

    adamw, clip = (load_kernel(kernels, name) for name in UPDATES)
    return adamw, clip or nn.utils.clip_grad_norm_


def load_loss_kernel(
    run: RunFile, backend: Backend, registry: Registry, kernels: dict[str, KernelChoice]
) -> LossKernel | None:
    """The kernel that makes the loss from hidden states, or None where logits are held.

    Raises:
        UnsupportedError: one is asked for, and the device compiles the model as a whole.
    """
    kernel: LossKernel | None = load_kernel(kernels, LOSS)
    compiler = backend.graph.compiler
    if kernel is not None and compiler is not None and compiler.regions == "model":
        reason = "the device compiles the whole model, its output layer with it"
        give_up(run, kernels, LOSS, reason)
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
        give_up(run, kernels, LOSS, served.reason)
    if LOSS not in kernels or kernels[LOSS].name == REFERENCE:
        return f"all logits held ({kernels[LOSS].reason})" if LOSS in kernels else "all logits held"
    return f"{kernels[LOSS].name}, without holding the logits"


def settle_lora(run: RunFile, kernels: dict[str, KernelChoice], layers: tuple[int, int]) -> str:
    """Once the model is built: record whether its LoRA layers have the kernel; returns it in words.

    Args:
        layers: (served by the kernel, in all).

    Raises:
        UnsupportedError: the run file asks for the kernel, and no layer can have it.
    """
    if LORA not in kernels or kernels[LORA].name == REFERENCE:
        return ""
    served, total = layers
    if not served:
        give_up(run, kernels, LORA, f"none of the {total} adapted layers is plain LoRA")
        return ""
    return f"{served} of {total} LoRA layers fused"


def give_up(run: RunFile, kernels: dict[str, KernelChoice], operation: str, reason: str) -> None:
    """Record that an operation is the model's own, and why.

    Raises:
        UnsupportedError: the run file asks for a kernel.
    """
    if run.kernels.get(operation, REFERENCE) != REFERENCE:
        raise UnsupportedError(
            f"kernels.{operation}: {run.kernels[operation]!r} cannot serve this run: {reason}. "
            "Leave it out"
        )
    kernels[operation] = KernelChoice(operation=operation, name=REFERENCE, reason=reason)
