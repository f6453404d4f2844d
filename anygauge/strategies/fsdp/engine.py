"""The `fsdp` strategy: torch's FSDP2, and HSDP over groups of ranks.

The model is sharded before it has values: each rank reads and holds its own rows alone. A decoder
layer is gathered as one piece; embedding, last norm and output layer are the root's, which stays
whole between forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from anygauge.interface import HOST_DEVICE, BuildContext, MemoryEstimate, UnsupportedError, Workload
from anygauge.strategies.context.context_parallel import with_attention
from anygauge.strategies.fsdp.footprint import fsdp_memory
from anygauge.strategies.fsdp.spec import FsdpOptions, num_shards
from anygauge.strategies.shared.common import torch_dtype
from anygauge.strategies.shared.degrees import in_words, mesh_axes
from anygauge.strategies.shared.exchanges import device_mesh
from anygauge.strategies.shared.flat import FLAT, FlatLayers, flat_layers_fit
from anygauge.strategies.shared.footprint import Sizes
from anygauge.strategies.shared.gradients import Gradients
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.shared.shards import ShardLayout, fill, sharded_later
from anygauge.strategies.shared.torch_engine import TorchEngine
from anygauge.strategies.tensor.footprint import tensor_memory
from anygauge.strategies.tensor.tensor_parallel import DividedStrategy, divide_model
from anygauge.util.text import first_line

_IGNORES = "ignored_params" in inspect.signature(fully_shard).parameters
"""Whether FSDP2 can leave parameters to others: since torch 2.7."""


class ReducedByFsdp(Gradients):
    """Gradients that FSDP2 adds up, and sums over ranks into parts; see `Gradients`.

    An adapter's are added up whole and reduced once a step. Those of all weights would not fit:
    they are reduced after each micro-batch.

    Args:
        every_time: whether they are reduced after each micro-batch.
        keeps_weights: whether weights stay gathered until the last backward.
        factor: what makes sums of what FSDP2 gives.
    """

    def __init__(
        self,
        model: Any,
        trained: Sequence[nn.Parameter],
        *,
        every_time: bool,
        keeps_weights: bool,
        factor: int,
    ) -> None:
        self._model, self._trained = model, trained
        self._every_time, self._keeps_weights = every_time, keeps_weights
        self._factor = factor

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See `Gradients.micro_batch`."""
        self._model.set_requires_gradient_sync(last or self._every_time)
        self._model.set_is_last_backward(last)
        if self._keeps_weights:
            self._model.set_reshard_after_backward(last)
        yield

    def take(self) -> list[Tensor | None]:
        """See `Gradients.take`."""
        found: list[Tensor | None] = []
        for parameter in self._trained:
            gradient, parameter.grad = parameter.grad, None
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient is not None and self._factor != 1:
                gradient.mul_(self._factor)
            found.append(gradient)
        return found


def sum_gradients(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Have gradients summed; False: this torch averages them.

    Without the second call a factor of one becomes an operation that NCCL alone has.

    Raises:
        UnsupportedError: it cannot average here.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not all(hasattr(m, "set_force_sum_reduction_for_comms") for m in modules):
        check_average(group, device)
        return False
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return True


def check_average(group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse a group whose means are none: some libraries lack them, one gave sums.

    Raises:
        UnsupportedError: says what came of it.
    """
    ranks = dist.get_world_size(group)
    value = torch.full((), float(dist.get_rank(group)), device=device)
    try:
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
        said = f"gives {float(value)} as the mean of 0 to {ranks - 1}"
    except (RuntimeError, ValueError) as error:
        said = f"says: {first_line(error)}"
    if float(value) != (ranks - 1) / 2 or said.startswith("says"):
        raise UnsupportedError(
            "strategy.name: fsdp: torch before 2.8 averages gradients, and this device's "
            f"collectives cannot average: {dist.get_backend(group)} {said}. Use strategy.name: ddp "
            "or zero, or torch 2.8 or later"
        )


def is_flat(options: FsdpOptions, model: nn.Module, workload: Workload) -> bool:
    """Whether frozen layers are gathered by `FlatLayers`, and FSDP2 has the trained weights.

    Raises:
        UnsupportedError: they are to be, and cannot.
    """
    usual = options.tp == 1 and options.offload == "none" and options.gather in ("auto", "flat")
    # A compiled layer takes the hooks that gather for a part of itself.
    compiled = workload.backend.graph.compiler is not None
    fits = usual and not compiled and _IGNORES and flat_layers_fit(model)
    flat = fits and num_shards(options, workload.world_size) > 1
    if options.gather == "flat" and not flat:
        raise UnsupportedError(
            "strategy.gather: flat: this takes several ranks, a frozen base with an adapter, torch "
            "2.7 or later, and neither tp nor offload nor a graph compiler. Leave it out"
        )
    return flat


class Fsdp(DividedStrategy):
    """FSDP2 over all ranks."""

    def __init__(self, options: FsdpOptions) -> None:
        self.options: FsdpOptions = options
        replicas = f", {options.dp_replicate} replicas" if options.dp_replicate > 1 else ""
        offload = ", offloaded" if options.offload != "none" else ""
        self.description = f"fsdp{replicas}{in_words(options)}{offload}"

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        ranks = num_shards(self.options, workload.world_size)

        def plain(one: Workload) -> MemoryEstimate:
            size = Sizes.of(one)
            flat = is_flat(self.options, size.model, one)
            return fsdp_memory(self.options, ranks, size, flat=flat)

        if self.options.tp > 1:
            return tensor_memory(self.options, workload, plain, ranks)
        return with_attention(self.options, workload, plain(workload))

    def build(self, context: BuildContext) -> TorchEngine:
        """See `Strategy.build`."""
        device = context.workload.backend.placement.device
        sizes = mesh_axes(self.options, context.workload.world_size)
        mesh = device_mesh(sizes, device, "shard")
        model, names = sharded_later(context, masters=True)
        divided = divide_model(model, self.options, mesh, device)
        if self.options.cp > 1:  # ranks with other parts of the same sequences shard weights, too
            shard = sizes["shard"] * sizes["context"]
            mesh = device_mesh({**sizes, "shard": shard, "context": 1}, device, "shard")
        ranks = mesh.get_group("shard")
        flat = None
        if is_flat(self.options, model, context.workload):
            flat = FlatLayers(model, ranks, device, otherwise="step")
            setattr(model, FLAT, flat)
        self._shard(model, mesh, context, flat)
        storage = device if self.options.offload == "none" else torch.device(HOST_DEVICE)
        fill(model, names, context.factory, device, storage=storage, cuts=divided.cuts, flat=flat)
        factor = 1
        if not sum_gradients(model, ranks, device):
            factor = context.workload.world_size // self.options.tp
        gradients = functools.partial(
            ReducedByFsdp,
            model,
            every_time=all(p.requires_grad for p in model.parameters()),
            keeps_weights=self.options.gather == "step",
            factor=factor,
        )
        return TorchEngine(
            model,
            context,
            gradients=gradients,
            layout=divided.layout(ShardLayout(ranks, device), model),
            sums=divided.partial_sums(model),
            join_logits=divided.whole_logits,
        )

    def _shard(
        self, model: nn.Module, mesh: DeviceMesh, context: BuildContext, flat: FlatLayers | None
    ) -> None:
        precision = context.workload.precision
        if self.options.tp > 1:
            mesh = mesh["data", "shard"] if self.options.dp_replicate > 1 else mesh["shard"]
        policy = MixedPrecisionPolicy(
            param_dtype=torch_dtype(precision.param_dtype),
            reduce_dtype=torch_dtype(precision.reduce_dtype),
        )
        offloaded = self.options.offload != "none"
        on_host = context.workload.backend.placement.device.type == HOST_DEVICE
        offload = CPUOffloadPolicy(pin_memory=not on_host) if offloaded else OffloadPolicy()
        sharded = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
        if flat is not None:
            # What else is frozen stays whole: the root would hold it so for all of a step.
            frozen = {p for p in model.parameters() if not p.requires_grad}
            sharded(model, reshard_after_forward=False, ignored_params=frozen)
            return
        again = self.options.gather != "step"
        for layer in decoder_layers(model):
            sharded(layer, reshard_after_forward=again, offload_policy=offload)
        sharded(model, reshard_after_forward=False, offload_policy=offload)
