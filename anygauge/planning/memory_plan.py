"""Plans a run file's memory and work: a strategy's bytes, and a traced layer."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from anygauge.config.schema import RunFile, resolve_precision
from anygauge.interface import (
    HOST_DEVICE,
    Backend,
    Graph,
    HeldAtOnce,
    HeldLayers,
    MemoryEstimate,
    SequencePart,
    Strategy,
    UnsupportedError,
    Workload,
)
from anygauge.interface import estimate as at
from anygauge.kernels.attention import register_attention
from anygauge.kernels.choose import ATTENTION, CALLED, REFERENCE, kernels_of_run
from anygauge.kernels.kernel_plan import KernelPlan, plan_kernels
from anygauge.models.factory import CausalModelFactory
from anygauge.models.flops import step_flops
from anygauge.models.inputs import PLAIN, MaskPlan, model_inputs, plan_masks
from anygauge.models.quantized import quantized_layers
from anygauge.models.source import LAYERS, check_positions, check_written
from anygauge.planning.forecast import PHASES, Peak, RunMemory, Work
from anygauge.planning.trace import FUSED, LayerTrace, ModelTrace, trace_model
from anygauge.registry import Registry
from anygauge.strategies.shared.common import torch_dtype
from anygauge.strategies.shared.footprint import memory_of
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.training.build_strategy import create_strategy, workload_of


def plan_run(run: RunFile, registry: Registry, backend: Backend, world_size: int) -> RunMemory:
    """What a run takes of each of its ranks' devices and hosts, and what its steps compute.

    Args:
        backend: that the run would have; its device need not be here.

    Raises:
        AnygaugeError: what the run's ranks would refuse, or what cannot be planned.
    """
    traces: dict[SequencePart | None, ModelTrace] = {}
    found = (
        _plan_rank(run, registry, backend, world_size, rank, traces)
        for rank in ranks_that_differ(run, world_size)
    )
    return functools.reduce(RunMemory.with_other, found)


def ranks_that_differ(run: RunFile, world_size: int) -> tuple[int, ...]:
    """Ranks of which one holds most: all hold the same, but for the stages of a pipeline.

    The first stage has the embedding and most micro-batches at once, the last has logits; of those
    between, the second has as many layers as any and most micro-batches.
    """
    stages = int(getattr(run.strategy, "pp", 1) or 1)
    rows = world_size // stages
    return tuple(sorted({0, rows * min(1, stages - 1), world_size - rows}))


def _plan_rank(
    run: RunFile,
    registry: Registry,
    backend: Backend,
    world_size: int,
    rank: int,
    traces: dict[SequencePart | None, ModelTrace],
) -> RunMemory:
    """Args: traces: of the run's other ranks, by their part of sequences; those with one are alike.

    A stage of a pipeline is given the trace of the whole model, of which it has some layers.
    """
    if run.precision.fp8:
        raise UnsupportedError(
            "precision.fp8: what a device's library keeps for it is not known, so it cannot be "
            "planned. Plan without it: weights and optimizer are the same"
        )
    precision = resolve_precision(run.precision, backend.support)
    backend.adapt_models(packing=run.data.isolates)
    factory = CausalModelFactory.of(run, torch_dtype(precision.param_dtype))
    check_written(run.model, factory.config)
    check_positions(factory.config, run.data.max_length)
    registry.find_strategy(run.strategy.name).spec.check_model(run.strategy, factory.config)
    strategy = create_strategy(registry, run)
    model = _whole_model(run.model, run.adapter, factory)
    workload = workload_of(run, registry, backend, precision, rank, world_size, model)
    estimate = memory_of(strategy, workload)
    kinds = _layer_kinds(model, factory.config.get_text_config(), workload)
    # The first layers, until each kind of them was there.
    few = _of_depth(factory, min(len(kinds), max(2, 1 + max(map(kinds.index, kinds)))))
    kernels, names = _traced_kernels(run, registry, backend, few)
    part, staged = workload.share.sequence, bool(estimate.stages)
    if part not in traces:
        few = few.with_kernels(kernels.attention.name, kernels.model)
        traces[part] = _trace_run(run, few, kernels, strategy, workload, staged=staged)
    trace = traces[part]
    of_kind: dict[Any, LayerTrace] = {}
    for kind, layer in zip(kinds, trace.layers, strict=False):
        one = of_kind.setdefault(kind, layer)
        # A first layer keeps less than others where its input is there in any case.
        of_kind[kind] = replace(one, kept=max(one.kept, layer.kept))
    layers = [of_kind[kind] for kind in kinds]
    flops = step_flops(model, factory.config, lambda parameter: tuple(parameter.shape))
    every = list(model.parameters())
    codes = quantized_layers(model).values()
    numbers = sum(p.numel() for p in every)
    numbers += sum(math.prod(c.plain_shape) - c.weight.numel() for c in codes)
    buffers = sum(b.nbytes for b in model.buffers() if not b.is_meta)
    device = _device_peaks(estimate, trace, layers, buffers)
    held, uncompiled = backend.graph.held, {}
    if held is not None:
        uncompiled = device
        trace = replace(trace, loss=round(held.share * trace.loss))
        layers = [_fused_trace(one, held) for one in layers]
        device = _device_peaks(estimate, trace, layers, buffers)
    host: dict[str, Peak] = {}
    for moment, held_there in estimate.host.items():
        phase, peak = _PHASE_OF.get(moment, moment), Peak.of(held_there)
        host[phase] = max(peak, host.get(phase, peak), key=lambda one: one.total)
    if backend.device_type == HOST_DEVICE:
        none = Peak.of()
        device = {n: Peak.of(one.kinds, host.get(n, none).kinds) for n, one in device.items()}
        host = {}
    return RunMemory(
        device=device,
        host=host,
        work=_step_work(estimate, trace, layers, workload),
        model_flops=(flops.per_token, flops.per_token_and_position),
        strategy=strategy.description,
        precision=precision,
        numbers=(numbers, sum(p.numel() for p in every if p.requires_grad)),
        per_layer=sum(layer.kept for layer in layers) // len(layers),
        kernels=names,
        positions=getattr(factory.config, "max_position_embeddings", None),
        uncompiled=uncompiled,
        compiled="" if held is None else held.source,
    )


_PHASE_OF = {
    **dict.fromkeys((at.BEGIN, at.GATHER), at.FORWARD),
    **dict.fromkeys((at.REDUCE, at.END, at.EMBEDDING, at.COLLECT), at.BACKWARD),
}
"""Of moments that are no phases."""


# -- the model -------------------------------------------------------------------------------------

_WHOLE: dict[str, nn.Module] = {}
"""Of the last run: changes of it are planned with the same model."""


def _whole_model(section: Any, adapter: Any, factory: CausalModelFactory) -> nn.Module:
    """The adapted model on the meta device, all of its layers."""
    key = repr((section, adapter, factory.trainable, factory.frozen, factory.dtype))
    if key not in _WHOLE:
        _WHOLE.clear()
        _WHOLE[key] = _on_meta(factory, buffers=False)
    return _WHOLE[key]


def _on_meta(factory: CausalModelFactory, *, buffers: bool) -> nn.Module:
    """An adapted model on the meta device, in the type of the run.

    Args:
        buffers: move these there, too, but for those of angles.
    """
    model = factory.skeleton()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(factory.dtype)
    model = factory.adapt(model)
    moved = {
        id(p): nn.Parameter(p.detach().to("meta", factory.dtype), p.requires_grad)
        for p in model.parameters()
        if not p.is_meta
    }
    for module in model.modules():
        for name, one in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, moved.get(id(one), one))
        if buffers and type(module).__name__.endswith(ROTARY):
            _rotate_on_host(module)
        elif buffers:
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, name, buffer.to("meta"))
    return model


ROTARY = "RotaryEmbedding"


def _rotate_on_host(module: nn.Module) -> None:
    """Have angles computed there: earlier releases of transformers begin with a context manager of
    torch's that knows no meta device. Those of one row are computed: all rows' are alike."""
    rows = 1

    def to_host(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, on_host, (args, kwargs))

    def on_host(tensor: Tensor) -> Tensor:
        nonlocal rows
        shape: Sequence[int] = tensor.shape
        if len(shape) == 2:  # positions
            rows, shape = shape[0], (1, shape[1])
        # One number in all places: of hidden states, the type alone is looked at.
        return torch.zeros((), dtype=tensor.dtype).expand(shape)

    def to_meta(_: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, on_meta, output)

    def on_meta(tensor: Tensor) -> Tensor:
        several = tensor.shape[:1] == (1,)
        shape = (rows, *tensor.shape[1:]) if several else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    module.register_forward_pre_hook(to_host, with_kwargs=True)
    module.register_forward_hook(to_meta)


def _of_depth(factory: CausalModelFactory, layers: int) -> CausalModelFactory:
    """Return the same model with its first layers alone; per-layer settings are cut as well."""
    other = copy.copy(factory)
    other.config = copy.deepcopy(factory.config)
    config = other.config.get_text_config()
    names = [name for name in LAYERS if getattr(config, name, None)]
    whole = [int(getattr(config, name)) for name in names][:1]
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and [len(value)] == whole:
            setattr(config, name, value[:layers])
    for name in names:
        setattr(config, name, layers)
    return other


def _layer_kinds(model: nn.Module, config: Any, workload: Workload) -> list[Any]:
    """Return what tells each decoder layer from others: its parameters and its settings."""
    layers = list(decoder_layers(model))
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    return [
        (
            tuple((n, tuple(p.shape), p.requires_grad) for n, p in layer.named_parameters()),
            tuple(repr(value[index]) for value in lists),
            workload.activations.recomputes(index),
        )
        for index, layer in enumerate(layers)
    ]


# -- what is traced --------------------------------------------------------------------------------


def _trace_run(
    run: RunFile,
    factory: CausalModelFactory,
    kernels: KernelPlan,
    strategy: Strategy,
    workload: Workload,
    *,
    staged: bool,
) -> ModelTrace:
    """Args: factory: of a few layers, with the run's kernels."""
    model = _on_meta(factory, buffers=True)
    factory.checkpoint_activations(model)
    planner = getattr(strategy, "planner", None)
    if planner is not None:
        planner.part_of(model, workload)
    part = workload.share.sequence
    masks = PLAIN
    if run.data.isolates or part is not None:
        masks = plan_masks(factory.config, kernels.attention.masks_of, run.data.max_length)
    padded = not run.data.packs and workload.micro_batch > 1
    rows = functools.partial(_micro_batch, workload, masks, part, packing=run.data.isolates)
    # Padding on the right needs no mask in attention of that kind; see `answer_from_host`.
    unasked = not padded or kernels.attention.masks_of == "sdpa"
    return trace_model(model, rows, all_set=unasked, holds_outputs=not staged)


def _micro_batch(
    workload: Workload, masks: MaskPlan, part: SequencePart | None, *, packing: bool
) -> Mapping[str, Any]:
    """Make a micro-batch of the largest size, on the meta device."""
    length = workload.length
    if part is not None:
        length += -length % part.count
    length += -length % workload.share.multiple
    ids = torch.zeros(workload.micro_batch, length, dtype=torch.long, device="meta")
    ones = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": ones, "position_ids": torch.zeros_like(ids)}
    if packing:
        batch["segment_ids"] = ones
    inputs = model_inputs(batch, torch_dtype(workload.precision.param_dtype), masks, part)
    return {**inputs, "shift_labels": ids[:, workload.share.positions(length)]}


class _TracedBackend(Backend):
    """Stands in for a run's backend when kernels are chosen: those for all devices alone serve."""

    device_type = "meta"

    def __init__(self, other: Backend) -> None:
        self.name = other.name
        super().__init__()
        self.graph: Graph = Graph()
        self.graph.shapes = other.graph.shapes
        self.capabilities = other.capabilities


def _traced_kernels(
    run: RunFile, registry: Registry, backend: Backend, factory: CausalModelFactory
) -> tuple[KernelPlan, dict[str, str]]:
    """What a run's kernels are, with plain ones of as much memory for those of its device.

    Returns:
        The plan, and operation -> the kernel that the run would have on its device.

    Raises:
        AnygaugeError: what the run would refuse.
    """
    traced = _TracedBackend(backend)
    fused = register_attention(FUSED)
    specs = {(p.spec.operation, p.spec.name): p.spec for p in registry.kernels}
    everywhere = sorted(key for key, one in specs.items() if one.default and not one.device_types)
    defaults = dict(reversed(everywhere))
    preferred = {**backend.kernels, **(backend.packed_kernels if run.data.isolates else {})}
    traced.attention, traced.attention_why = backend.attention, backend.attention_why
    asked = dict(run.kernels)
    names = {}
    for operation, name in {**preferred, **asked}.items():
        spec = specs.get((operation, name))
        if spec is None or backend.device_type not in spec.device_types:
            continue
        names[operation] = name
        asked[operation] = spec.plain or defaults.get(operation, REFERENCE)
        if operation == ATTENTION and not spec.plain:
            del asked[operation]
            traced.attention = "sdpa"  # the library's that holds no scores
    if run.model.attention != "auto":
        asked.pop(ATTENTION, None)
    traced.kernels = {o: name for o, name in asked.items() if o not in run.kernels}
    traced.packed_kernels = {}
    named = {o: name for o, name in asked.items() if o in run.kernels}
    plain = run.model_copy(update={"kernels": named})
    plan = plan_kernels(plain, traced, kernels_of_run(plain, traced, registry), factory)
    if plan.attention.kernel is None and plan.attention.name != "eager":
        attention = replace(plan.attention, name=fused)
        plan = replace(plan, attention=attention)
    chosen = {one: plan.choices[one].name for one in CALLED if one in plan.choices}
    return plan, {**chosen, ATTENTION: plan.attention.name, **names}


# -- put together ----------------------------------------------------------------------------------


def _device_peaks(
    estimate: MemoryEstimate, trace: ModelTrace, layers: Sequence[LayerTrace], buffers: int
) -> dict[str, Peak]:
    """The most that is there at once, by phase.

    Args:
        buffers: bytes of the model's, which all ranks have.
    """
    found: dict[str, Peak] = {}

    def hold(phase: str, moment: str, activations: int = 0, logits: int = 0) -> None:
        held = estimate.device.get(moment, {})
        if phase == at.EVALUATION:
            held = {kind: size for kind, size in held.items() if kind != at.GRADIENTS}
        peak = Peak.of(held, {at.WEIGHTS: buffers, at.ACTIVATIONS: activations, at.LOGITS: logits})
        found[phase] = max(found.get(phase, peak), peak, key=lambda one: one.total)

    stages = _stages(estimate, layers)
    kept = [_kept_bytes(trace, layers, stage) for stage in stages]
    of_all = sum(stage.in_flight * size for stage, size in zip(stages, kept, strict=True))
    for moment in (at.LOAD, at.UPDATE, at.SAVE):
        hold(moment, moment)
    for stage, own in zip(stages, kept, strict=True):
        # Of other micro-batches, and of this one in other stages.
        others = of_all - own
        mine = layers[stage.first : stage.end]
        base = others + (trace.base if stage.first == 0 else trace.base - trace.embedded)
        before = [base + sum(layer.kept for layer in mine[:index]) for index in range(len(mine))]
        pairs = list(zip(before, mine, strict=True))
        if stage.first == 0:
            hold(at.FORWARD, at.BEGIN, others + trace.begin)
            last = at.EMBEDDING if at.EMBEDDING in estimate.device else at.END
            hold(at.BACKWARD, last, others + trace.end)
            hold(at.EVALUATION, at.BEGIN, trace.begin)
        hold(at.FORWARD, at.GATHER, before[-1])
        hold(at.FORWARD, at.FORWARD, max(beside + one.forward for beside, one in pairs))
        hold(at.BACKWARD, at.BACKWARD, max(beside + one.backward for beside, one in pairs))
        hold(at.BACKWARD, at.END, base + mine[0].backward)
        hold(at.BACKWARD, at.REDUCE, before[-1] + mine[-1].kept)
        hold(at.BACKWARD, at.COLLECT, trace.base)
        hold(at.EVALUATION, at.GATHER, trace.base)
        hold(at.EVALUATION, at.EVALUATION, trace.base + max(one.evaluation for one in mine))
        if stage.apart:
            # At the most: what a weight's gradient was made of is let go of.
            made = (one.trained * one.recomputed if one.recomputed else one.kept for one in mine)
            hold(at.BACKWARD, at.BACKWARD, before[-1] + mine[-1].kept + sum(made))
        if stage.end == len(layers):
            hold(at.LOSS, at.LOSS, base + sum(layer.kept for layer in mine), trace.loss)
            hold(at.EVALUATION, at.LOSS, trace.base, trace.loss_evaluation)
    return {phase: found[phase] for phase in PHASES if phase in found}


def _stages(estimate: MemoryEstimate, layers: Sequence[LayerTrace]) -> Sequence[HeldLayers]:
    return estimate.stages or (HeldLayers(0, len(layers)),)


def _kept_bytes(trace: ModelTrace, layers: Sequence[LayerTrace], stage: HeldLayers) -> int:
    """Count a micro-batch's bytes from a stage's forward until its backward.

    What later stages are given lies in buffers that are the strategy's.
    """
    size = trace.base + sum(layer.kept for layer in layers[stage.first : stage.end])
    size -= 0 if stage.first == 0 else trace.embedded
    return size + (trace.loss_kept if stage.end == len(layers) else 0)


def _fused_trace(layer: LayerTrace, held: HeldAtOnce) -> LayerTrace:
    """What a graph compiler has of a layer at once; what is kept for backward stays."""

    def part(size: int) -> int:
        return layer.kept + round(held.share * max(0, size - layer.kept))

    return replace(
        layer,
        forward=part(layer.forward),
        backward=part(layer.backward),
        evaluation=round(held.share * layer.evaluation),
        work=replace(layer.work, other_bytes=held.share * layer.work.other_bytes),
    )


def _step_work(
    estimate: MemoryEstimate, trace: ModelTrace, layers: Sequence[LayerTrace], workload: Workload
) -> Work:
    """Sum the work of one step."""
    once = Work()
    for stage in _stages(estimate, layers):
        for layer in layers[stage.first : stage.end]:
            once = once.add(layer.work)
        if stage.first == 0:
            once = once.add(trace.work).add(trace.head, -1.0)
        if stage.end == len(layers):
            once = once.add(trace.head)
    step = Work().add(once, workload.accumulation)
    return replace(
        step,
        other_bytes=step.other_bytes + estimate.other_bytes,
        copied_bytes=estimate.copied_bytes,
        host_bytes=estimate.host_bytes,
        traffic=tuple(estimate.traffic),
    )
