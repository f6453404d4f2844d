"""One step of a run, by its own engine, on tensors without values: what it holds, and when.

Without values an operation is one step from its arguments to its result, which hides what it needs
meanwhile. `OpenedUp` makes such operations of those that torch's kernels call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.interface import Backend, Collectives, Graph, MemoryStats, Placement
from anygauge.interface.strategy import (
    BuildContext,
    DeviceBatch,
    Engine,
    OptimizerFactory,
    Strategy,
    Workload,
)
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory, parts_of
from anygauge.models.quantised import NESTED_BLOCK, quantised_layers
from anygauge.planning.counting import Counter
from anygauge.planning.live import LiveBytes
from anygauge.planning.memory import EVALUATION, FORWARD, SAVE, STEP, UPDATE, Peak
from anygauge.planning.valueless import (
    DEVICE,
    HOST,
    copied_by_the_host,
    register_device,
    valueless,
    with_values,
    without_values,
)
from anygauge.planning.watch import EngineWatch
from anygauge.planning.work import Work

STEPS = 4
"""At most: an optimizer makes its state in the first, and DeepSpeed learns from it what to fetch
ahead; a step that holds what the one before it held is like all that follow."""


class _Placement(Placement):
    pinned_memory = False

    def open(self, local_rank: int) -> torch.device:
        host = self.device_type == HOST
        self._device = torch.device(HOST) if host else torch.device(DEVICE, 0)
        return self._device

    def synchronize(self) -> None:
        """Nothing is under way."""

    def memory(self) -> MemoryStats:
        return MemoryStats(in_use=0, peak=0)

    def reset_peak(self) -> None:
        """There is none."""


class _Collectives(Collectives):
    process_group_backend = "fake"


class PlannedBackend(Backend):
    """A backend whose device has no memory; what it says of graphs and engines is another's."""

    name = "planned"
    device_type = DEVICE
    placement_class = _Placement
    collectives_class = _Collectives

    def __init__(self, other: Backend) -> None:
        if other.device_type == HOST:
            self.device_type = HOST
        else:
            register_device()
        super().__init__()
        self.name = other.name
        self.graph: Graph = Graph()
        self.graph.shapes = other.graph.shapes
        self.capabilities = other.capabilities


class PlannedFactory(CausalModelFactory):
    """Makes the model of a run without reading a file of weights."""

    device: str = DEVICE
    """Type of the device of what the model is made with; see `PlannedBackend`."""

    def skeleton(self) -> nn.Module:
        """See `ModelFactory.skeleton`; its buffers are on the device already."""
        with with_values():
            model = super().skeleton()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = valueless(buffer, self.device)
        return model

    def fill_buffers(self, model: nn.Module) -> None:
        """Stored values are not needed."""

    def values(self, model: nn.Module, unit: str, part: Any = None) -> Mapping[str, Tensor]:
        """See `ModelFactory.values`; of the type that drawn values have."""
        module = model.get_submodule(unit)
        layers = quantised_layers(module)
        prefix = f"{unit}." if unit else ""
        found: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                continue
            shape = tuple(parameter.shape)
            whole = layers[name].plain_shape if name in layers else shape
            if self.section.name is None:
                found[name] = torch.empty(whole, dtype=torch.float32)
                continue
            if name in layers:
                layers[name].encode(torch.empty(whole))
            if part is not None:
                wanted = part(prefix + name, shape)
                if wanted is None:
                    continue
                shape = tuple(torch.empty(shape, device="meta")[wanted].shape)
            dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
            found[name] = torch.empty(shape, dtype=dtype)
        if self.section.name is not None:
            return found
        # What is drawn is drawn whole, unlike what is read, and is there until the unit is done.
        drawn = dict(found)
        for name, value in drawn.items():
            value.isnan()
            if name in layers:
                found[name] = layers[name].encode(value)
        return found if part is None else parts_of(found, prefix, part)

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`; the adapter is small, and made with values."""
        with with_values():
            kept = {
                (id(module), name): parameter
                for module in model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and not parameter.is_meta
            }
            stand_ins = {id(p): _stand_in(p) for p in kept.values()}
            for module in model.modules():
                for name in module._parameters:
                    if (id(module), name) in kept:
                        module._parameters[name] = stand_ins[id(kept[id(module), name])]
            adapted = super().adapt(model)
        made: dict[int, nn.Parameter] = {}
        for module in adapted.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.is_meta:
                    continue
                original = kept.get((id(module), name))
                if original is not None:
                    original.requires_grad = parameter.requires_grad
                    module._parameters[name] = original
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        valueless(parameter.detach(), self.device), parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]
        return adapted


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """With a shape and a type, and one number."""
    one = torch.zeros((), dtype=parameter.dtype)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What a rank holds, by phase: of its device, and of its host; and what a step is of work.

    Attributes:
        steps: how many were made; the last one's work was counted.
    """

    device: Mapping[str, Peak]
    host: Mapping[str, Peak]
    work: Work
    steps: int


class RehearsedBatches(Sequence[DeviceBatch]):
    """Micro-batches of a step, each made when the engine comes to it, as the loop's are.

    Args:
        count: how many.
        make: makes one on the device.
        first: called before each is made for the first time.
    """

    def __init__(
        self, count: int, make: Callable[[], DeviceBatch], first: Callable[[], object]
    ) -> None:
        self._count = count
        self._make = make
        self._first = first
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        if index == self._next:
            self._next += 1
            self._first()
        return self._make()


Batch = Callable[[torch.device], DeviceBatch]
"""Makes a micro-batch on a device; called where tensors have no values."""


def rehearse(
    strategy: Strategy,
    factory: PlannedFactory,
    optimizer: OptimizerFactory,
    workload: Workload,
    batch: Batch,
    *,
    padded: bool = False,
    steps: int | None = None,
    micro_batches: int = 2,
) -> Rehearsed:
    """Build a rank's engine and make steps with it.

    Args:
        workload: of a `PlannedBackend`, whose device is open; where there is more than one rank,
            the fake process group of that many is there.
        padded: rows of a micro-batch have several lengths.
        steps: how many; None: until they are alike.
        micro_batches: of a step, if it has so many.
    """
    backend = workload.backend
    kind = backend.device_type
    live = LiveBytes(*{kind, HOST})
    live.counter = counter = Counter(kind)
    watch = EngineWatch(live, adapted=factory.adapter is not None)
    parts: list[Work] = []
    device: dict[str, Peak] = {}
    host: dict[str, Peak] = {}

    def end() -> None:
        if kind != HOST:
            host.update(live.take_peaks(HOST))
        device.update(live.take_peaks(kind))

    def made_here() -> DeviceBatch:
        watch.enter(FORWARD)
        return batch(backend.placement.device)

    own = copied_by_the_host() if kind == HOST else contextlib.nullcontext()
    live.opened = opened_up
    stages = getattr(getattr(strategy, "options", None), "pp", 1) > 1
    fake = without_values(padded=padded, counter=counter, stages=stages)
    with own, _no_cycles_freed(), fake as live.answers, live:
        engine = strategy.build(
            BuildContext(factory=factory, optimizer=watch.optimizer(optimizer), workload=workload)
        )
        watch.built(engine)
        end()
        count = min(workload.accumulation, micro_batches)
        made = 0
        while made < (steps or STEPS):
            made += 1
            before = _most(device)
            parts.clear()
            counter.taken()
            batches = RehearsedBatches(count, made_here, lambda: parts.append(counter.taken()))
            engine.run_step(batches, model_loss, 1)
            end()
            watch.enter(UPDATE)
            engine.update(1e-4, workload.max_norm)
            end()
            parts.append(counter.taken())
            del batches
            if steps is None and before == _most(device):
                break
        watch.enter(EVALUATION)
        engine.evaluate([batch(backend.placement.device)], model_loss)
        end()
        watch.enter(SAVE)
        save(engine)
        end()
        engine.close()
    work = _of_all(parts, workload.accumulation - count)
    return Rehearsed(device=device, host=host, work=work, steps=made)


@contextlib.contextmanager
def _no_cycles_freed() -> Iterator[None]:
    """Python looks for cycles when it has made so many objects, whatever else they are of.

    What a rehearsal finds must not depend on when that is.
    """
    import gc

    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def save(engine: Engine) -> None:
    """What is gathered of an engine for a checkpoint, and at the end of a run."""
    if engine.checkpoint_support():
        for _ in engine.export_state():
            pass  # each is written before the next
    engine.export_trained()


def _most(peaks: Mapping[str, Peak]) -> int:
    return max((peaks[phase].total for phase in STEP if phase in peaks), default=0)


def _of_all(parts: list[Work], more: int) -> Work:
    """The work of a step from its parts: before the first micro-batch, each but the last, the rest.

    Args:
        more: micro-batches that were not made, each like the first.
    """
    none = Work.none()
    total = none
    for index, part in enumerate(parts):
        total = part.further(none, more if index == 1 and len(parts) > 2 else 0).plus(total)
    return total


class OpenedUp(TorchDispatchMode):
    """Within it, such operations show what they take."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or its parts."""
        opened = opened_up(func)
        return (func if opened is None else opened)(*args, **(kwargs or {}))


@functools.cache
def opened_up(func: Any) -> Callable[..., Any] | None:
    """What shows what an operation takes, in its place; None: nothing needs to."""
    return _OPENED.get(str(func))


def _logsumexp(tensor: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    """As `logsumexp_out_impl` in torch's ReduceOps.cpp, of finite numbers."""
    largest = tensor.amax(dims, keepdim=True)
    result = (tensor - largest).exp_().sum(dims, keepdim=keepdim)
    return result.log_().add_(largest if keepdim else largest.squeeze(dims))


def _gemm_4bit(
    tensor: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    scales: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Any = None,
) -> Tensor:
    """As `_gemm_4bit_default_impl` in bitsandbytes, and its kernels of more than a few rows."""
    few_bits = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = few_bits.dequantize_blockwise.default(
            absmax_8bit, scales, absmax_code, NESTED_BLOCK, torch.float32
        )
        scales = scales + absmax_offset
    weight = few_bits.dequantize_4bit.default(codes, scales, block, kind, shape, tensor.dtype)
    return torch.nn.functional.linear(tensor, weight, bias)


def _quantised_rows(tensor: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Any]:
    """Of inputs of which none is above the threshold."""
    outliers = None
    if threshold > 0.0:
        tensor.abs().ge(threshold)
        outliers = tensor.new_empty(0, dtype=torch.long)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(tensor, 0.0)
    return codes, scales, outliers


def _int8_product(
    tensor: Tensor,
    inputs: Tensor,
    codes: Tensor,
    row_scales: Tensor,
    scales: Tensor,
    outliers: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``int8_mixed_scaled_mm`` of bitsandbytes, of such inputs."""
    few_bits = torch.ops.bitsandbytes
    product = few_bits.int8_linear_matmul.default(inputs, codes)
    result = few_bits.int8_mm_dequant.default(product, row_scales, scales, tensor.dtype, bias)
    return result, tensor.new_empty(0)


_OPENED: Mapping[str, Callable[..., Any]] = {
    "aten.logsumexp.default": _logsumexp,
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.int8_vectorwise_quant.default": _quantised_rows,
    "bitsandbytes.int8_mixed_scaled_mm.default": _int8_product,
}
"""By name: bitsandbytes may not be there."""
