"""What engines share: names of types, trained parameters, rates, sums of losses, compiling, FP8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import Backend, BuildContext, DeviceBatch, Graph, LossFunction, Phase
from anygauge.strategies.shared.materialize import causal_of, decoder_layers


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that require a gradient, in the model's order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def float_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are numbers to compute with, not codes of them."""
    return [p for p in model.parameters() if p.is_floating_point()]


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Give every parameter group the rate `lr`, times its own ``lr_scale`` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def summed_losses(
    model: nn.Module, backend: Backend, batches: Iterable[DeviceBatch], loss_function: LossFunction
) -> list[Tensor]:
    """Loss of each batch, summed over its tokens, without gradients or dropout."""
    model.eval()
    sums = []
    with torch.no_grad():
        for batch in batches:
            sums.append(loss_function(model(**batch)))
            backend.graph.mark_step(Phase.FORWARD)
    return sums


def logits_of(model: nn.Module, backend: Backend, batch: DeviceBatch) -> Tensor:
    """Logits of a model for all positions of a batch that it is given, on the device."""
    model.eval()
    inputs = {name: value for name, value in batch.items() if name != "shift_labels"}
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    backend.graph.mark_step(Phase.FORWARD)
    return logits


def prepare_layers(model: nn.Module, context: BuildContext, *, reentrant: bool = False) -> None:
    """Have layers recompute their activations, mark their graphs and be compiled, as configured."""
    context.factory.checkpoint_activations(model, reentrant=reentrant)
    mark_recomputation(model, context.workload.backend.graph)
    compile_regions(model, context.workload.backend)


def compile_regions(model: nn.Module, backend: Backend) -> int:
    """Compile what `Graph.compiler` names, in place; returns the number of regions.

    Decoder layers are alike: one compilation serves all of them, and what stands between them
    (gathers of shards, recomputation) stays outside.
    """
    compiler = backend.graph.compiler
    if compiler is None:
        return 0
    regions = list(decoder_layers(model)) if compiler.regions == "layer" else [model]
    for region in regions:
        region.compile(backend=compiler.backend)
    return len(regions)


def mark_recomputation(model: nn.Module, graph: Graph) -> None:
    """End the graph before each layer is computed again in backward, where graphs accumulate.

    All layers' recomputation and backward would otherwise be one graph: it takes long to compile,
    and may hold the activations of all layers at once. Cut, layers that are alike share a graph.

    Args:
        model: of transformers, whose layers already recompute as the run asks for.
    """
    if not graph.accumulates:
        return
    layers: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer._gradient_checkpointing_func = _mark(layer._gradient_checkpointing_func, graph)


def _mark(checkpoint: Callable[..., Any], graph: Graph) -> Callable[..., Any]:
    """torch's checkpointing, in either form, of a function whose second call is in backward."""

    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran = False

        def marked(*inputs: Any, **named: Any) -> Any:
            nonlocal ran
            if ran:
                graph.mark_step(Phase.RECOMPUTE)
            ran = True
            return function(*inputs, **named)

        return checkpoint(marked, *args, **kwargs)

    return checkpointed


@dataclass(frozen=True, slots=True)
class Fp8Contexts:
    """Make the context of a forward that trains, and that of its backward."""

    forward: Callable[[], contextlib.AbstractContextManager[Any]]
    backward: Callable[[], contextlib.AbstractContextManager[Any]]


WITHOUT_FP8 = Fp8Contexts(contextlib.nullcontext, contextlib.nullcontext)
"""Of a run without products in FP8."""


def fp8_contexts(
    model: nn.Module, context: BuildContext, *, reentrant: bool = False
) -> Fp8Contexts:
    """Have the backend convert a model, if the run sets it, before an engine takes it.

    The output layer stays as it is: the loss multiplies with its weight, chunk by chunk, and calls
    no layer. Backward has a context where layers are computed again in it, as the products of both
    times must be the same.

    Args:
        model: with its adapter, on the device; layers already recompute as the run asks for.
        reentrant: by torch's older form, where they do.

    Raises:
        UnsupportedError: by the backend, with its reason.
    """
    if not context.workload.precision.fp8:
        return WITHOUT_FP8
    head: Any = causal_of(model).get_output_embeddings()
    again = context.workload.activations.every > 0
    make = context.workload.backend.fp8_products(
        model, () if head is None else (head,), reentrant=reentrant if again else None
    )
    return Fp8Contexts(make, make if again else contextlib.nullcontext)
