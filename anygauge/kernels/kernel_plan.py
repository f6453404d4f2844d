"""The kernels of a run, settled once before the model is built: what computes what, and why."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import nn

from anygauge.config.schema import RunFile
from anygauge.interface import (
    AttentionKernel,
    Backend,
    Graph,
    Phase,
    PluginError,
    ShapeKind,
    UnsupportedError,
)
from anygauge.kernels.attention import (
    AttentionChoice,
    library_attention,
    never_called,
    register_attention,
    unfit_attention,
)
from anygauge.kernels.choose import (
    ADAMW,
    ATTENTION,
    CALLED,
    CLIP,
    LORA,
    LOSS,
    NORM,
    REFERENCE,
    ROPE,
    KernelChoice,
    load_kernel,
)
from anygauge.kernels.install_kernels import ModelKernels, plain_lora, plain_norms
from anygauge.kernels.logits_rule import logits_rule
from anygauge.kernels.loss import LossKernel, base_of
from anygauge.kernels.rope import plain_rotations


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPlan:
    """The kernels of a run.

    Attributes:
        choices: operation -> which and why, as the run's record has it.
        attention: what the model is built with.
        model: what is put into the model.
        adamw: (groups, lr, betas, eps) -> AdamW by a kernel; None for torch's.
        clip_grad_norm: by a kernel or by torch.
        norms, rotations, lora_layers: (served by the kernel, in all); (0, 0) without one.
    """

    choices: Mapping[str, KernelChoice]
    attention: AttentionChoice
    model: ModelKernels
    adamw: Callable[..., Any] | None
    clip_grad_norm: Callable[..., Any]
    norms: tuple[int, int]
    rotations: tuple[int, int]
    lora_layers: tuple[int, int]

    def describe(self) -> str:
        """One line for the terminal."""
        parts = [f"attention {self.attention.describe()}"]
        if self.norms[1]:
            parts.append(f"{self.norms[0]} of {self.norms[1]} norms fused")
        if self.rotations[1]:
            parts.append(f"{self.rotations[0]} of {self.rotations[1]} rotations fused")
        if self.lora_layers[0]:
            parts.append(f"{self.lora_layers[0]} of {self.lora_layers[1]} LoRA layers fused")
        loss = "all logits held"
        if self.model.loss is not None:
            loss = f"{self.choices[LOSS].name}, without holding the logits"
        elif LOSS in self.choices:
            loss += f" ({self.choices[LOSS].reason})"
        return "; ".join([*parts, f"loss {loss}"])

    def record(self) -> dict[str, Any]:
        """Plain values for the run's report."""
        return {
            "attention": {"name": self.attention.name, "why": self.attention.why},
            "kernels": {name: choice.record() for name, choice in self.choices.items()},
        }


class Architecture(Protocol):
    """What a plan looks at; a `ModelFactory` that can be given kernels."""

    config: Any

    def with_kernels(self, attention: str, kernels: ModelKernels | None) -> Self:
        """Return the same model, built with these kernels; None puts nothing into it."""

    def skeleton(self) -> nn.Module:
        """See `ModelFactory.skeleton`."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`."""


def plan_kernels(
    run: RunFile,
    backend: Backend,
    choices: Mapping[str, KernelChoice],
    architecture: Architecture,
) -> KernelPlan:
    """Hold a run's kernels against its model: the configuration, and the model without weights.

    What cannot serve the model gives way, with the reason in its choice.

    Args:
        choices: of run file and backend; see `kernels_of_run`.

    Raises:
        UnsupportedError: the run file asks for what cannot serve.
        PluginError: a kernel cannot be made.
        ModelError: the model cannot be built.
    """
    kernels = {operation: load_kernel(choices, operation) for operation in CALLED}
    attention, problems = _attention(run, backend, choices, kernels[ATTENTION], architecture.config)
    bare = architecture.with_kernels(attention.name, None)
    model = bare.adapt(bare.skeleton())
    # Code that comes with a model's files is known only now.
    if attention.kernel is not None and (reason := never_called(type(base_of(model)))):
        raise UnsupportedError(
            f"kernels.attention: {reason}; set model.attention: eager, and leave kernels.attention "
            "out"
        )
    norm, rope, lora, loss = (kernels[operation] for operation in (NORM, ROPE, LORA, LOSS))
    norms = _count_replaced(plain_norms(model)) if norm is not None else (0, 0)
    rotations = _count_replaced(plain_rotations(model)) if rope is not None else (0, 0)
    layers = _count_replaced(plain_lora(model)) if lora is not None else (0, 0)
    if lora is not None and not layers[0]:
        problems[LORA] = f"none of the {layers[1]} adapted layers is plain LoRA"
    if loss is not None:
        rule, served = logits_rule(model)
        compiler = backend.graph.compiler
        if compiler is not None and compiler.regions == "model":
            problems[LOSS] = "the device compiles the whole model, its output layer with it"
        elif not served:
            problems[LOSS] = served.reason
        loss = _on_graphs(rule.bind(loss), backend.graph)
    return KernelPlan(
        choices={**choices, **{op: _gives_way(run, choices[op], problems[op]) for op in problems}},
        attention=attention,
        model=ModelKernels(
            norm=norm,
            rope=rope,
            lora=None if LORA in problems else lora,
            loss=None if LOSS in problems else loss,
        ),
        adamw=kernels[ADAMW],
        clip_grad_norm=kernels[CLIP] or nn.utils.clip_grad_norm_,
        norms=norms,
        rotations=rotations,
        lora_layers=layers,
    )


def _on_graphs(loss: LossKernel, graph: Graph) -> LossKernel:
    """A loss kernel that knows what new shapes and graphs cost on its device."""
    if graph.shapes.kind is ShapeKind.DYNAMIC:
        return functools.partial(loss, skip_ignored=True)
    # Leaving rows out would make a new shape of each batch.
    fixed = functools.partial(loss, skip_ignored=False)
    if "mark_step" not in inspect.signature(loss).parameters:
        return fixed
    return functools.partial(fixed, mark_step=functools.partial(graph.mark_step, Phase.CHUNK))


def _attention(
    run: RunFile, backend: Backend, choices: Mapping[str, KernelChoice], kernel: Any, config: Any
) -> tuple[AttentionChoice, dict[str, str]]:
    """Choose what computes attention; tells why the kernel cannot, by operation."""
    named = run.model.attention
    if named != "auto":
        return AttentionChoice(name=named, why="asked for by name", masks_of=named), {}
    if kernel is None:
        return library_attention(backend, config), {}
    if not isinstance(kernel, AttentionKernel):
        raise PluginError(
            f"kernel {choices[ATTENTION].name!r} for attention is a {type(kernel).__name__}; its "
            "factory must return an AttentionKernel"
        )
    if problem := unfit_attention(kernel, config):
        _gives_way(run, choices[ATTENTION], problem)
        return library_attention(backend, config), {ATTENTION: problem}
    return AttentionChoice(
        name=register_attention(kernel),
        why=choices[ATTENTION].reason,
        masks_of=kernel.mask,
        kernel=kernel,
    ), {}


def _gives_way(run: RunFile, choice: KernelChoice, why: str) -> KernelChoice:
    """The model's own, in place of a kernel that cannot serve.

    Raises:
        UnsupportedError: the run file asks for the kernel.
    """
    if run.kernels.get(choice.operation, REFERENCE) != REFERENCE:
        raise UnsupportedError(
            f"kernels.{choice.operation}: {choice.name!r} cannot serve this run: {why}. Leave it "
            "out: the model's own is used then"
        )
    return KernelChoice(
        operation=choice.operation,
        name=REFERENCE,
        reason=why,
        rejected=(*choice.rejected, (choice.name, why)),
    )


def _count_replaced(found: tuple[Sequence[Any], int]) -> tuple[int, int]:
    return len(found[0]), found[1]
