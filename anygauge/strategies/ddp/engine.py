"""The `ddp` strategy: the whole model on every rank, gradients summed by torch's DDP.

With an adapter, its gradients are all that travels. Ranks need not be sent weights: each makes the
same ones, from files or from the seed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anygauge.interface import BuildContext, MemoryEstimate, UnsupportedError, Workload
from anygauge.strategies.context.context_parallel import with_attention
from anygauge.strategies.pipeline.engine import build_pipeline
from anygauge.strategies.pipeline.footprint import pipeline_memory
from anygauge.strategies.shared.common import torch_dtype
from anygauge.strategies.shared.degrees import Degrees, in_words, mesh_axes
from anygauge.strategies.shared.exchanges import device_mesh, group_along
from anygauge.strategies.shared.footprint import whole_memory
from anygauge.strategies.shared.gradients import Gradients, LocalGradients
from anygauge.strategies.shared.layout import WholeLayout
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.shared.shards import fill, sharded_later
from anygauge.strategies.shared.torch_engine import TorchEngine
from anygauge.strategies.single.engine import build_whole
from anygauge.strategies.tensor.footprint import tensor_memory
from anygauge.strategies.tensor.tensor_parallel import DividedStrategy, divide_model


class SummedOverRanks(LocalGradients):
    """Sums micro-batches on the rank, and the last one's with it over all ranks, bucket by bucket.

    Both are done in the type of reductions, which DDP by itself does in the parameters' type. Sums,
    not means: a loss is divided by the tokens of all ranks before. A strategy in which ranks send
    each other less overrides `sum_over_ranks`, and may keep a state: see `HasRankState`.
    """

    def __init__(
        self, wrapper: DistributedDataParallel, trained: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> None:
        super().__init__(trained, dtype)
        self._wrapper = wrapper
        self._index = {id(parameter): index for index, parameter in enumerate(trained)}
        self._names = {id(p): name for name, p in wrapper.module.named_parameters()}
        self._last = False
        # torch compares a hook's annotations with classes, and ours are text.
        wrapper.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See `Gradients.micro_batch`."""
        self._last = last
        with contextlib.nullcontext() if last else self._wrapper.no_sync():
            yield

    def collect(self) -> None:
        """See `Gradients.collect`; the last micro-batch's are where `_reduce` put them."""
        if not self._last:
            super().collect()
            return
        for parameter in self._trained:
            parameter.grad = None

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: sum a bucket of gradients over ranks, with those of earlier micro-batches."""
        buffer = bucket.buffer()
        flat = buffer.to(self._dtype)
        start = buffer.storage_offset()
        parts = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index = self._index[id(parameter)]
            at = gradient.storage_offset() - start
            part = flat[at : at + gradient.numel()].view(parameter.shape)
            earlier = self._sums[index]
            if earlier is not None:
                part.add_(earlier)
            self._sums[index] = parts[self._names[id(parameter)]] = part
        done = self.sum_over_ranks(flat, parts, self._wrapper.process_group)
        return done.then(lambda _: buffer)

    def sum_over_ranks(
        self, flat: Tensor, parts: Mapping[str, Tensor], group: dist.ProcessGroup
    ) -> torch.futures.Future[Any]:
        """Sum a bucket of gradients over ranks, in place, to the same numbers on each of them.

        Args:
            flat: (n,), the rank's own sums over a step's micro-batches, in the type of reductions.
                Where the loss is scaled, they are.
            parts: its views in the parameters' shapes, by their names. Torch makes other buckets
                after the first step of a process, so that a state is kept by name.

        Returns:
            Is done when `flat` has the sums.
        """
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return work.get_future()


class Ddp(DividedStrategy):
    """The whole model on every rank, or a part of every layer."""

    def __init__(self, options: Degrees) -> None:
        self.options = options
        self.description = f"ddp{in_words(options)}"

    def gradients(
        self, wrapper: DistributedDataParallel, trained: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> SummedOverRanks:
        """Make what sums the gradients of replicas; `trained` are the wrapper's, in its order."""
        return SummedOverRanks(wrapper, trained, dtype)

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        plain = whole_memory
        if self.options.pp > 1:
            plain = functools.partial(pipeline_memory, self.options)
        if self.options.tp > 1:
            return tensor_memory(self.options, workload, plain)
        return with_attention(self.options, workload, plain(workload))

    def build(self, context: BuildContext) -> TorchEngine:
        """See `Strategy.build`."""
        if self.options.pp > 1:
            if type(self).gradients is not Ddp.gradients:
                raise UnsupportedError(
                    f"strategy.pp: {self.options.pp}: stages sum gradients over ranks themselves, "
                    f"and not as {self.description!r} does. Set strategy.pp: 1, or use "
                    "strategy.name: ddp"
                )
            return build_pipeline(context, self.options)
        options, device = self.options, context.workload.backend.placement.device
        mesh, wrapper = None, None
        if options.tp > 1 or options.cp > 1:
            mesh = device_mesh(mesh_axes(options, context.workload.world_size), device)
        if options.tp == 1:
            model = build_whole(context)
            divided = divide_model(model, options, mesh, device)
            wrapper = wrap_ddp(model, None)
        else:
            model, names = sharded_later(context)
            divided = divide_model(model, options, mesh, device)
            fill(model, names, context.factory, device, cuts=divided.cuts)
            replicas = group_along(mesh, "data")
            wrapper = None if replicas is None else wrap_ddp(model, replicas)
        dtype = torch_dtype(context.workload.precision.reduce_dtype)

        def gradients(trained: Sequence[nn.Parameter]) -> Gradients:
            if wrapper is None:
                return LocalGradients(trained, dtype)
            return self.gradients(wrapper, trained, dtype)

        return TorchEngine(
            model,
            context,
            call=wrapper,
            gradients=gradients,
            layout=divided.layout(WholeLayout(context.clip_grad_norm), model),
            sums=divided.partial_sums(model),
            join_logits=divided.whole_logits,
        )


def wrap_ddp(model: nn.Module, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """The model in torch's DDP over a group, None for all ranks."""
    return DistributedDataParallel(
        model,
        process_group=group,
        init_sync=False,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        # An expert to which no token went has no gradient; to look for such costs a message.
        find_unused_parameters=has_experts(model),
    )


def has_experts(model: nn.Module) -> bool:
    """Whether layers have lists of modules of their own, of which some may not be called."""
    return any(
        isinstance(module, nn.ModuleList)
        for layer in decoder_layers(model)
        for module in layer.modules()
    )
