"""From a run file to what its ranks hold: the run's own parts, put together for a rehearsal.

Kernels of a device are rehearsed by plain torch of the same operation. A copy of this process
rehearses a second depth meanwhile (`Aside`).
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from anygauge.config.schema import RunFile, resolve_precision
from anygauge.interface import (
    HOST_DEVICE,
    Backend,
    KernelSpec,
    Precision,
    SequencePart,
    UnsupportedError,
)
from anygauge.interface.strategy import (
    DeviceBatch,
    OptimizerFactory,
    Strategy,
    StrategySpec,
    Workload,
)
from anygauge.kernels.choose import ATTENTION, REFERENCE, kernels_of_run
from anygauge.kernels.plan import KernelPlan, plan_kernels
from anygauge.models.factory import CausalModelFactory
from anygauge.models.flops import step_flops
from anygauge.models.freezing import Freezing
from anygauge.models.inputs import PLAIN, model_inputs, positions, shift_labels
from anygauge.models.masks import MaskPlan, plan_masks
from anygauge.models.quantised import quantised_layers
from anygauge.models.source import check_positions, check_written
from anygauge.planning.depth import at_depth, depths_of, layers_of, of_depth, shallowest
from anygauge.planning.memory import ACTIVATIONS, FORWARD, LOSS, Peak, RunMemory, stages_of
from anygauge.planning.rehearsal import PlannedBackend, PlannedFactory, Rehearsed, rehearse
from anygauge.planning.work import Work
from anygauge.registry import Registry
from anygauge.strategies.common import torch_dtype
from anygauge.training.optimizer import FUSED_ADAMW, optimizer_factory
from anygauge.training.strategy import create_strategy, workload_of
from anygauge.util.processes import tie_to_parent


@dataclass(frozen=True, slots=True)
class Rows:
    """Micro-batches of a run, all of the largest size.

    Attributes:
        documents: rows are packed.
        part: of each row that the rank computes; None: all of it.
    """

    rows: int
    length: int
    masks: MaskPlan
    dtype: torch.dtype
    documents: bool
    part: SequencePart | None

    def __call__(self, device: torch.device) -> DeviceBatch:
        """One, on a device."""
        length = self.length
        if self.part is not None:
            length += -length % self.part.count
        ids = torch.zeros(self.rows, length, dtype=torch.long, device=device)
        ones = torch.ones_like(ids)
        batch = _Tensors(ids, ones, torch.zeros_like(ids), ones if self.documents else None)
        inputs = model_inputs(batch, self.dtype, self.masks, self.part)
        labels = shift_labels(ids)[:, positions(self.part, length)]
        return DeviceBatch({**inputs, "shift_labels": labels})


@dataclass(frozen=True, slots=True)
class _Tensors:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor | None


def rehearse_run(
    run: RunFile, registry: Registry, backend: Backend, world_size: int, rank: int = 0
) -> RunMemory:
    """Rehearse a rank of a run; this process can do it for one rank of one number of them.

    Args:
        backend: that the run would have; its device need not be here.

    Raises:
        AnygaugeError: what the run's ranks would refuse, or what cannot be rehearsed.
    """
    if run.precision.fp8:
        raise UnsupportedError(
            "precision.fp8: what a device's library keeps for it is not known, so it cannot be "
            "planned. Plan without it: weights and optimizer are the same"
        )
    precision = resolve_precision(run.precision, backend.support)
    planned = PlannedBackend(backend)
    planned.open(0)
    backend.adapt_models(packing=run.data.packing)
    factory = factory_of(PlannedFactory, run, precision)
    factory.device = planned.device_type
    usual = factory_of(CausalModelFactory, run, precision)
    check_written(run.model, usual.config)
    check_positions(usual.config, run.data.max_length)
    config = usual.config.get_text_config()
    spec = registry.find_strategy(run.strategy.name).spec
    spec.check_model(run.strategy, usual.config)
    _join(rank, world_size, planned.device_type)
    workload = workload_of(run, registry, planned, precision, rank, world_size)
    part = workload.share.sequence
    steps: list[int] = []
    works: dict[int, Work] = {}
    aside: dict[int, Aside[Rehearsed]] = {}
    kept: dict[int, int] = {}

    def made(layers: int, count: int | None) -> Rehearsed:
        kernels = planned_kernels(run, registry, planned, backend, of_depth(usual, layers))
        masks = PLAIN
        if run.data.packing or part is not None:
            masks = plan_masks(usual.config, kernels.attention.masks_of, run.data.max_length)
        rows = rows_of(run, workload, precision, masks)
        return rehearse(
            create_strategy(registry, run),
            of_depth(factory, layers).having(kernels.attention.name, kernels.model),
            planned_optimizer(run, kernels, backend),
            workload,
            rows,
            padded=not run.data.packing and workload.micro_batch > 1,
            steps=count,
            # A third finds what the second found, but where stages have several at once.
            micro_batches=workload.accumulation if stages_of(run) > 1 else 2,
        )

    def at(layers: int) -> dict[str, Peak]:
        # The last of the first depth's only showed that it was like the one before.
        count = max(1, steps[0] - 1) if steps else None
        found = None
        if layers in aside and count == USUAL_STEPS:
            found = aside.pop(layers).result()
        found = found or made(layers, count)
        steps.append(found.steps)
        works[layers] = found.work
        last = found.device.get(LOSS, found.device[FORWARD])
        kept[layers] = last.kinds.get(ACTIVATIONS, 0)
        host = {f"{_HOST}{phase}": peak for phase, peak in found.host.items()}
        return {**found.device, **host}

    strategy = create_strategy(registry, run)
    peaks: Mapping[str, Peak]
    if stages_of(run) > 1:
        # How layers are cut into stages is not a line.
        layers = layers_of(config)
        model = _at_rest(usual, strategy, workload, layers)
        peaks, how = at(layers), "all layers"
    else:
        weighed = functools.partial(_whole, usual, strategy, workload)
        other = Aside(weighed) if can_be_aside() else None
        _load(spec, planned)
        model, per_layer = (other.result() if other else None) or weighed()
        reach = math.ceil(model["window"] / per_layer)
        depths = depths_of(config, reach)[:3]
        if len(depths) == 3 and can_be_aside():
            # The first depth takes more steps: alone it takes as long as half of the others.
            aside = {
                deeper: Aside(functools.partial(made, deeper, USUAL_STEPS)) for deeper in depths[1:]
            }
        try:
            peaks, how = at_depth(at, config, reach)
        finally:
            for deeper in aside.values():
                deeper.drop()
    numbers = round(model.pop("parameters")), round(model.pop("trained"))
    model_flops = model.pop("per_token"), model.pop("per_position")
    del model["window"], model["stored"]
    return RunMemory(
        device={k: v for k, v in peaks.items() if not k.startswith(_HOST)},
        host={k.removeprefix(_HOST): v for k, v in peaks.items() if k.startswith(_HOST)},
        held={name: round(size) for name, size in model.items()},
        work=_of_layers(works, layers_of(config)),
        model_flops=model_flops,
        strategy=strategy.description,
        precision=precision,
        numbers=numbers,
        how=how,
        per_layer=_slope(kept),
    )


_LOADED: set[str] = set()


def _load(spec: StrategySpec, backend: Backend) -> None:
    """Import a strategy's engine, once."""
    if spec.name not in _LOADED:
        spec.load(backend)
        _LOADED.add(spec.name)


def _slope(kept: Mapping[int, int]) -> int | None:
    """What a layer adds to what there is when the loss begins, from the two deepest."""
    if len(kept) < 2:
        return None
    *_, (less, one), (more, two) = sorted(kept.items())
    return (two - one) // (more - less)


_HOST = "host: "
USUAL_STEPS = 2
"""Of all depths but the first, nearly always: after them an engine holds what it will hold."""

FactoryT = TypeVar("FactoryT", bound=CausalModelFactory)


def rows_of(
    run: RunFile, workload: Workload, precision: Precision, masks: MaskPlan = PLAIN
) -> Rows:
    """A rank's micro-batches."""
    return Rows(
        rows=workload.micro_batch,
        length=run.data.max_length,
        masks=masks,
        dtype=torch_dtype(precision.param_dtype),
        documents=run.data.packing,
        part=workload.share.sequence,
    )


def factory_of(kind: type[FactoryT], run: RunFile, precision: Precision) -> FactoryT:
    """What makes a run's model."""
    return kind(
        run.model,
        run.adapter,
        dtype=torch_dtype(precision.param_dtype),
        seed=run.train.seed,
        gradient_checkpointing=run.train.gradient_checkpointing,
        router_aux_loss_coef=run.train.router_aux_loss_coef,
        freezing=Freezing.of(run.train),
    )


def _of_layers(works: Mapping[int, Work], layers: int) -> Work:
    """Work of a model of so many layers, from the two deepest."""
    *_, (less, one), (more, two) = [(0, None), *sorted(works.items())]
    if more == layers or one is None:
        return two
    return two.further(one, (layers - more) / (more - less))


def _at_rest(
    factory: CausalModelFactory, strategy: Strategy, workload: Workload, layers: int
) -> dict[str, float]:
    """Parameters of a model of some layers, as numbers and as stored, where a byte may hold two;
    and what its first rank holds from step to step."""
    model = of_depth(factory, layers)
    adapted = model.adapt(model.skeleton())
    flops = step_flops(adapted, model.config, lambda parameter: tuple(parameter.shape))
    every = {id(p): p for p in adapted.parameters()}.values()
    stored = sum(p.numel() for p in every)
    codes = quantised_layers(adapted).values()
    found = strategy.footprint(replace(workload, skeleton=adapted))
    return {
        "parameters": stored + sum(math.prod(c.plain_shape) - c.weight.numel() for c in codes),
        "trained": sum(p.numel() for p in every if p.requires_grad),
        "window": found.window,
        "per_token": flops.per_token,
        "per_position": flops.per_token_and_position,
        "stored": stored,
        **{name: getattr(found, name) for name in ("weights", "gradients", "masters", "optimizer")},
    }


def _whole(
    factory: CausalModelFactory, strategy: Strategy, workload: Workload
) -> tuple[dict[str, float], float]:
    """The same of the whole model, from one turn of its pattern; and what is stored of a layer."""

    def at(layers: int) -> dict[str, float]:
        return _at_rest(factory, strategy, workload, layers)

    config = factory.config.get_text_config()
    depth = shallowest(config)
    if depth is None:
        found = at(layers_of(config))
        return found, found["stored"] / layers_of(config)
    least, length, turns = depth
    one, two = at(least), at(least + length)
    more = {name: two[name] - one[name] for name in one}
    whole = {name: one[name] + turns * more[name] for name in one}
    return {**whole, "window": one["window"]}, more["stored"] / length


def _join(rank: int, world_size: int, device_type: str) -> None:
    import os

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    if not dist.is_initialized():  # DeepSpeed asks for one on one rank, too
        kinds = ",".join(f"{kind}:fake" for kind in {HOST_DEVICE, device_type})
        dist.init_process_group(kinds, store=FakeStore(), rank=rank, world_size=world_size)


T = TypeVar("T")


class Aside(Generic[T]):
    """A function's result, found meanwhile.

    The copy has all that this process has imported and found out. It must have no threads: autograd
    has some from its first backward on.

    Args:
        function: returns what can be pickled.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._read, write = os.pipe()
        parent = os.getpid()
        self._pid: int = os.fork()
        if self._pid:
            os.close(write)
            return
        status = 1
        try:
            tie_to_parent(signal.SIGKILL, parent)
            os.close(self._read)
            with os.fdopen(write, "wb") as file:
                file.write(pickle.dumps(function()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def result(self) -> T | None:
        """What was found; None: the copy failed."""
        with os.fdopen(self._read, "rb") as file:
            found = file.read()
        _, status = os.waitpid(self._pid, 0)
        return pickle.loads(found) if status == 0 else None

    def drop(self) -> None:
        """End it: nobody asks for its result."""
        os.close(self._read)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def can_be_aside() -> bool:
    """Whether there is a second core, and this process has but one thread."""
    threads = Path("/proc/self/task")
    if not threads.is_dir() or len(list(threads.iterdir())) > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1


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
    """torch's fused one where the backend says that its device has it.

    Elsewhere torch takes all tensors at once, which it would not do by itself for tensors without
    values.
    """
    served = bool(backend.support(FUSED_ADAMW))

    def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=served, foreach=not served, **options)

    return optimizer_factory(run.train.optimizer, kernels.adamw or adamw)
