"""Builds the strategy of a run: refuses what it cannot do, makes it, describes its work."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import Any

from anygauge.config.schema import AdapterSection, RunFile, resolve_precision
from anygauge.data import accumulation
from anygauge.interface import (
    Backend,
    NotAvailableError,
    Precision,
    RunFileError,
    Share,
    Strategy,
    StrategyRun,
    StrategySpec,
    UnsupportedError,
    Workload,
)
from anygauge.models.factors import changes_base
from anygauge.models.quantization import quantization
from anygauge.models.warm_start import whole_modules
from anygauge.registry import Registry, missing_of
from anygauge.registry.specs import load_factory, read_options
from anygauge.training.optimizers import PAGED_MEMORY

FP8 = "fp8_products"
"""The capability that ``precision.fp8`` needs."""

QUANTIZED = {"nf4": "quantized_base", "int8": "quantized_base_int8"}
"""Type of a quantized base -> the capability that it needs."""

UPDATE_BYTES = 8.0
"""What an update makes for each trained number, for those that are updated at once, in float32:
a copy from before (see `anygauge.training.optimizer`), and what the optimizer's step makes, or
afterwards a copy of what it changed. torch's fused AdamW makes neither."""

FUSED_ADAMW = "fused_adamw"
"""The capability of a device that has a kernel for torch's fused AdamW, which makes nothing."""


def check_ranks(spec: StrategySpec, world_size: int, registry: Registry) -> None:
    """Raises: RunFileError: it does not run on so many ranks; names strategies that would do."""
    if world_size == 1 or not spec.single_process:
        return
    others = [each.spec.name for each in registry.strategies if not each.spec.single_process]
    raise RunFileError(
        f"strategy.name: {spec.name!r} trains in one process, but the run has {world_size} ranks; "
        "use --devices 1 and --nodes 1"
        + (f", or strategy.name: {' or '.join(others)}" if others else "")
    )


def check_installed(spec: StrategySpec, registry: Registry) -> None:
    """Raises: NotAvailableError: its packages are not on this machine; how to install them."""
    if not (missing := missing_of(spec)):
        return
    others = [p.spec.name for p in registry.strategies if not p.spec.distributions]
    raise NotAvailableError(
        f"strategy.name: {spec.name!r} needs {missing}. Or use another: {', '.join(others)}"
    )


def check_backend(spec: StrategySpec, backend: Backend) -> None:
    """Raises: UnsupportedError: the device lacks what it needs; quotes the backend's reason."""
    for capability, because in spec.needs.items():
        if not (support := backend.support(capability)):
            raise UnsupportedError(
                f"backend {backend.name!r} lacks {capability!r}, needed because {because}: "
                f"{support}"
            )
    if spec.engine in backend.unsupported_engines:
        raise UnsupportedError(
            f"backend {backend.name!r} cannot run {spec.engine!r}, the engine of strategy "
            f"{spec.name!r}: {backend.unsupported_engines[spec.engine]}"
        )


def check_strategy(
    run: RunFile,
    registry: Registry,
    backend: Backend,
    world_size: int,
    *,
    ranks_run_here: bool = True,
) -> None:
    """Refuse all that is known to fail before a device is opened.

    Args:
        ranks_run_here: whether packages of this machine are those of the ranks.

    Raises:
        AnygaugeError: says what the strategy cannot do, and what to change.
    """
    spec = registry.find_strategy(run.strategy.name).spec
    check_objective(run, registry)
    check_ranks(spec, world_size, registry)
    if ranks_run_here:
        check_installed(spec, registry)
    check_fp8(run, spec, backend)
    precision = None
    if run.precision.param_dtype != "auto":
        precision = resolve_precision(run.precision, backend.support)
    optimizer = registry.find_optimizer(run.train.optimizer.name).spec
    micro_batches = 0
    with contextlib.suppress(RunFileError):  # `check_batch` tells it
        micro_batches = _micro_batches(run, registry, world_size)
    spec.check(
        StrategyRun(
            options=run.strategy,
            world_size=world_size,
            optimizer=run.train.optimizer.name,
            activations=run.train.activations,
            adapter=adapter_kind(run.adapter),
            micro_batches=micro_batches,
            precision=precision,
            pairs=run.objective_spec.pairs,
            router_aux_loss=run.train.router_aux_loss_coef > 0,
            ranks_run_here=ranks_run_here,
            quantized=run.model.quantize is not None,
            paged=PAGED_MEMORY in optimizer.needs(run.train.optimizer),
            optimizer_sees_full_parameters=optimizer.sees_full_parameters,
            optimizer_changes_weights=optimizer.changes_weights,
            reentrant_only=backend.graph.reentrant_only,
        )
    )
    check_divided(run)
    check_backend(spec, backend)
    check_offloading(run, backend)
    for capability, (field, instead) in optimizer.needs(run.train.optimizer).items():
        _require(backend, capability, field, instead)
    check_quantized(run, backend, ranks_run_here=ranks_run_here)


def check_objective(run: RunFile, registry: Registry) -> None:
    """Raises: RunFileError: another field does not go with the objective; names all such fields."""
    provided = registry.find_objective(run.objective)
    with run.locate_errors():
        read_options(provided, run.objective_options)
    name, said = run.objective, {}
    if provided.spec.reference and run.adapter is None:
        said["objective"] = (
            f"{name} compares the model with itself without its adapter, and the run has no "
            "adapter; add an adapter section, or use an objective without a reference, such as orpo"
        )
    elif provided.spec.reference and run.adapter is not None and changes_base(run.adapter.init):
        said["adapter.init"] = (
            f"{run.adapter.init} takes the first factors out of the base's weights, so the model "
            f"without its adapter is not the base, with which {name} compares; set it to true"
        )
    if provided.spec.pairs:
        off = {
            "data.packing": (run.data.packs, "a sequence holds one answer of a pair"),
            "data.streaming": (run.data.streaming, "pairs are tokenized before the run"),
            "train.router_aux_loss_coef": (
                run.train.router_aux_loss_coef > 0,
                "the routers' loss is a mean over tokens, that of pairs is not",
            ),
            "precision.fp8": (run.precision.fp8, "nobody has tried products in FP8 with pairs"),
        }
        for field, (given, why) in off.items():
            if given:
                said[field] = f"objective {name}: {why}; leave it out"
    if said:
        raise run.errors(said.items())


def adapter_kind(adapter: AdapterSection | None) -> str:
    """See `StrategyRun.adapter`."""
    if adapter is None:
        return ""
    return "dora" if adapter.dora else "taken" if changes_base(adapter.init) else "lora"


def check_divided(run: RunFile) -> None:
    """Raises: UnsupportedError: parts of layers would be trained of a model that is divided."""
    new = run.adapter is not None and (run.model.new_tokens or run.model.new_special_tokens)
    for field, what in (("tp", "divides layers"), ("pp", "gives them to several stages")):
        if getattr(run.strategy, field, 1) == 1:
            continue
        if new:
            raise UnsupportedError(
                "model.new_tokens: with an adapter, peft puts the new tokens' rows into the whole "
                f"embedding and output layer in every forward, but strategy.{field} {what}. Set "
                f"strategy.{field}: 1, or train all weights (no adapter section)"
            )
        if whole_modules(run.adapter):
            raise UnsupportedError(
                f"adapter.modules_to_save: strategy.{field} cannot divide whole modules yet. Set "
                f"strategy.{field}: 1, or leave adapter.modules_to_save out"
            )


def check_offloading(run: RunFile, backend: Backend) -> None:
    """Raises: UnsupportedError: layers' activations are not to be had one by one on this device."""
    graph = backend.graph
    if not run.train.activation_offloading:
        return
    if graph.accumulates or graph.compiler is not None:
        how = "collects operations into graphs, and each copy to the host would end a graph"
        if graph.compiler is not None:
            how = "compiles layers together with what they keep for backward"
        raise UnsupportedError(
            f"train.activation_offloading: backend {backend.name!r} {how}. Leave it out, and set "
            "train.gradient_checkpointing: true"
        )


def _require(backend: Backend, capability: str, field: str, instead: str) -> None:
    """Raises: UnsupportedError: quotes the backend's reason for lacking what a field needs."""
    if not (support := backend.support(capability)):
        raise UnsupportedError(
            f"{field}: backend {backend.name!r} lacks {capability!r}: {support}. {instead}"
        )


def check_fp8(run: RunFile, spec: StrategySpec, backend: Backend) -> None:
    """Raises: UnsupportedError: ``precision.fp8`` cannot work, or nobody has tried it; why."""
    if not run.precision.fp8:
        return
    instead = "With precision.fp8: false, linear layers multiply in precision.param_dtype"
    _require(backend, FP8, "precision.fp8", instead)
    if why := spec.refuses_fp8(run.strategy):
        raise UnsupportedError(
            f"precision.fp8: strategy {spec.name!r}: {why}. Use strategy.name: zero without "
            "offload, or single; or set precision.fp8: false"
        )
    if run.model.quantize is not None:
        field = "model.quantize"
        why = "quantized layers hold codes and multiply by a library of their own"
    elif run.adapter is not None and run.adapter.dora:
        field = "adapter.dora"
        why = "DoRA computes norms of whole weights, which nobody has tried with converted layers"
    elif whole_modules(run.adapter):
        field = "adapter.modules_to_save"
        why = "each such module has a copy beside it, which nobody has tried to convert"
    else:
        return
    raise UnsupportedError(
        f"precision.fp8 and {field}: {why}. Leave {field} out, or set precision.fp8: false"
    )


def check_quantized(run: RunFile, backend: Backend, *, ranks_run_here: bool) -> None:
    """Refuse what is known to fail.

    Args:
        ranks_run_here: packages of this machine are those of the ranks.

    Raises:
        RunFileError: a section does not go with it, or the package is missing.
        UnsupportedError: quotes the backend's reason, or peft's limit.
    """
    asked = quantization(run.model)
    if asked is None:
        return
    if run.adapter is None:
        raise RunFileError(
            f"model.quantize: {asked.type}: quantized weights cannot be trained, and the run has "
            "no adapter. Add an adapter section, or leave model.quantize out to train all weights"
        )
    if run.adapter.dora and asked.type == "int8":
        raise UnsupportedError(
            "adapter.dora: peft cannot load a DoRA adapter onto bitsandbytes' 8-bit layers, so you "
            "could not use the result. Use model.quantize: nf4, or leave dora out"
        )
    _require(backend, QUANTIZED[asked.type], f"model.quantize: {asked.type}", "Leave it out")
    if backend.graph.compiler is not None:
        raise UnsupportedError(
            f"model.quantize: backend {backend.name!r} compiles layers, which was not tested with "
            "bitsandbytes' layers. Leave it out"
        )
    if ranks_run_here and importlib.util.find_spec("bitsandbytes") is None:
        raise RunFileError(
            "model.quantize needs the package bitsandbytes, which is not installed; "
            "pip install 'anygauge[8bit]', or leave it out"
        )


def create_strategy(registry: Registry, run: RunFile) -> Strategy:
    """The strategy that a run file names. Raises: PluginError: its plugin is broken."""
    strategy: Strategy = load_factory(registry.find_strategy(run.strategy.name))(run.strategy)
    return strategy


def share_of(run: RunFile, registry: Registry, rank: int, world_size: int) -> Share:
    """Which rows a rank of a run reads."""
    spec = registry.find_strategy(run.strategy.name).spec
    return spec.share(run.strategy, rank, world_size)


def check_batch(run: RunFile, registry: Registry, world_size: int) -> None:
    """Raises: RunFileError: the global batch cannot be divided over the ranks."""
    _micro_batches(run, registry, world_size)


def _micro_batches(run: RunFile, registry: Registry, world_size: int) -> int:
    parts = share_of(run, registry, 0, world_size).count
    return accumulation(run.train.global_batch_size, run.train.sequences_at_once(parts), parts)


def state_bytes(run: RunFile, registry: Registry, skeleton: Any = None) -> float:
    """Mean bytes that the optimizer keeps for each trained number; without a model, a matrix's."""
    section = run.train.optimizer
    of = registry.find_optimizer(section.name).spec.state_bytes
    if not callable(of):
        return of
    trained = [("weight", (1, 1))]
    if skeleton is not None:
        trained = [(n, p.shape) for n, p in skeleton.named_parameters() if p.requires_grad]
    total = sum(math.prod(shape) * of(section, name, shape) for name, shape in trained)
    return total / max(1, sum(math.prod(shape) for _, shape in trained))


def workload_of(
    run: RunFile,
    registry: Registry,
    backend: Backend,
    precision: Precision,
    rank: int,
    world_size: int,
    skeleton: Any = None,
) -> Workload:
    """Describe the work of one rank of a run for a strategy.

    Raises:
        RunFileError: see `check_batch`.
    """
    share = share_of(run, registry, rank, world_size)
    micro_batch = run.train.sequences_at_once(share.count)
    fused = not run.why_no_adamw_kernel and bool(backend.support(FUSED_ADAMW))
    return Workload(
        backend=backend,
        precision=precision,
        skeleton=skeleton,
        world_size=world_size,
        rank=rank,
        share=share,
        micro_batch=micro_batch * (1 + run.objective_spec.pairs),
        accumulation=accumulation(run.train.global_batch_size, micro_batch, share.count),
        length=run.data.max_length,
        max_norm=run.train.max_grad_norm,
        activations=run.train.activations,
        adapter=adapter_kind(run.adapter),
        state_bytes=state_bytes(run, registry, skeleton),
        update_bytes=0.0 if fused else UPDATE_BYTES,
    )
