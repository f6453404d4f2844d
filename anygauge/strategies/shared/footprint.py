"""What a rank holds and sends, in bytes, counted from a model on the meta device.

The arithmetic that the estimates of all strategies are made of, and the estimate of a rank that has
the whole model: alone, or as one of DDP's replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from anygauge.interface import MemoryEstimate, Setting, Strategy, StrategyPlanner, Traffic, Workload
from anygauge.interface import estimate as at
from anygauge.strategies.shared.common import torch_dtype
from anygauge.strategies.shared.finite import UPDATED_AT_ONCE
from anygauge.strategies.shared.materialize import decoder_layers

Kinds: TypeAlias = "Mapping[str, int]"
"""Kind -> bytes."""

IN_STEP = (at.BEGIN, at.FORWARD, at.LOSS, at.BACKWARD, at.END)
BUCKET = 25 * 2**20
"""Bytes after which DDP closes a bucket."""


# -- parameters ------------------------------------------------------------------------------------


def item_bytes(name: str) -> int:
    """Bytes of one number of a type of torch's, by its name."""
    return torch.empty((), dtype=torch_dtype(name), device="meta").element_size()


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each once, also if it is tied."""
    return list({id(p): p for p in parameters}.values())


def numel(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers parameters hold; a tied one is counted once."""
    return sum(p.numel() for p in unique(parameters))


def item_size(parameter: nn.Parameter, dtype: str) -> int:
    """Bytes of one of its numbers in a model of a type; codes stay what they are."""
    return item_bytes(dtype) if parameter.is_floating_point() else parameter.element_size()


def weight_bytes(parameters: Iterable[nn.Parameter], dtype: str) -> int:
    """Bytes of parameters in a type; a tied one is counted once."""
    return sum(p.numel() * item_size(p, dtype) for p in unique(parameters))


def scale_bytes(model: nn.Module) -> int:
    """Bytes of what belongs to codes, which every rank has whole: buffers that come with values."""
    return sum(b.numel() * b.element_size() for b in model.buffers() if b.is_meta)


def rows_of(parameter: nn.Parameter, ranks: int) -> int:
    """Numbers in the first rank's rows of a parameter."""
    return -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What estimates are made of.

    Attributes:
        compute, reduce, master: bytes of a number, of the types of `Precision` and of float32.
        parameters: that are trained, each once, in the model's order.
        head: numbers of those of which backward has the gradients first, of the output layer and
            the last norm.
        layer: of the last decoder layer's but for the largest: a traced layer has one gradient
            itself at a time.
        embedding: of those that nothing but the embedding reads, which come last.
    """

    workload: Workload
    model: nn.Module
    compute: int
    reduce: int
    master: ClassVar[int] = 4
    parameters: tuple[nn.Parameter, ...]
    head: int
    layer: int
    embedding: int

    @classmethod
    def of(cls, workload: Workload) -> Sizes:
        """Return a run's sizes; its skeleton is an adapted model."""
        model, precision = workload.skeleton, workload.precision
        assert model is not None, "an estimate is made from the model"
        trained = unique(p for p in model.parameters() if p.requires_grad)
        layers = list(decoder_layers(model))
        read = {
            id(p)
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        }
        embedding = numel(p for p in trained if id(p) not in read)
        last = [p.numel() for p in unique(layers[-1].parameters()) if p.requires_grad]
        in_layers = numel(p for one in layers for p in one.parameters() if p.requires_grad)
        return cls(
            workload=workload,
            model=model,
            compute=item_bytes(precision.param_dtype),
            reduce=item_bytes(precision.reduce_dtype),
            parameters=tuple(trained),
            head=numel(trained) - in_layers - embedding,
            layer=sum(last) - max(last, default=0),
            embedding=embedding,
        )

    @property
    def num_trained(self) -> int:
        """Numbers that are trained."""
        return numel(self.parameters)

    @property
    def largest(self) -> int:
        """Numbers of the largest trained parameter."""
        return max((p.numel() for p in self.parameters), default=0)

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches, the gradients of which are added up."""
        return self.workload.accumulation > 1

    @property
    def to_save(self) -> dict[str, int]:
        """What rank 0 holds in the host's memory when it saves: every trained tensor, whole.

        `Engine.export_trained` gives them all at once; one more is on its way.
        """
        whole = (self.num_trained + self.largest) * self.master
        return {at.SAVED: whole if self.workload.rank == 0 else 0}

    def update_traffic(self, count: int, state: int, *, masters: bool = True) -> float:
        """What a rank reads and writes in a step of so many trained numbers beside the model.

        Gradients are added to their sums, their norm is taken, they are scaled, and the optimizer
        reads them, and reads and writes masters and state; weights get the masters' values.

        Args:
            state: bytes of the optimizer's state.
            masters: whether they are others than the weights.
        """
        added = self.workload.accumulation * (self.compute + 2 * self.reduce)
        update = 6 * self.master + (self.compute + self.master if masters else 0)
        return float(count * (added + update) + 2 * state)


def update_made(workload: Workload, sizes: Iterable[int]) -> int:
    """Bytes that an update makes on a rank that holds trained tensors of such sizes.

    As `anygauge.training.optimizer` takes them: some at once, or one that is larger.
    """
    most = at_once = 0
    for size in sizes:
        if at_once + size > UPDATED_AT_ONCE:
            at_once = 0
        at_once += size
        most = max(most, at_once)
    return round(most * workload.update_bytes)


# -- estimates -------------------------------------------------------------------------------------


def add_kinds(*several: Kinds) -> dict[str, int]:
    """The bytes of each kind together."""
    found: defaultdict[str, int] = defaultdict(int)
    for kinds in several:
        for kind, size in kinds.items():
            found[kind] += size
    return dict(found)


def by_moment(
    held: Kinds, masters: int, step: Kinds, more: Mapping[str, Kinds]
) -> dict[str, dict[str, int]]:
    """Bytes by moment.

    Args:
        held: always.
        masters: bytes of the optimizer's that are there before its first step.
        step: beside it, from the start of a micro-batch on.
        more: in place of `step`, at some moments.
    """
    rest: Kinds = {}
    beside = {**dict.fromkeys(IN_STEP, step), at.EVALUATION: rest, at.SAVE: rest, **more}
    loaded = {**held, at.OPTIMIZER: masters}
    return {
        at.LOAD: add_kinds(loaded, beside.pop(at.LOAD, {})),
        **{moment: add_kinds(held, kinds) for moment, kinds in beside.items()},
    }


def transfer(
    operation: str, group: Sequence[int], times: float, size: float, *, waited: bool = False
) -> tuple[Traffic, ...]:
    """What a rank gives to one collective in a step; nothing where it is alone."""
    if len(group) < 2 or not size:
        return ()
    found = Traffic(operation=operation, group=tuple(group), waited=waited, times=times, bytes=size)
    return (found,)


def memory_of(strategy: Strategy, workload: Workload) -> MemoryEstimate:
    """Return the planner's estimate, or that of a rank that is alone where there is no planner."""
    planner: StrategyPlanner | None = getattr(strategy, "planner", None)
    if planner is None:
        return whole_memory(workload, replicas=1)
    return planner.memory(workload)


class EstimatedStrategy:
    """A strategy that is its own planner, and of which a rank computes the whole model."""

    @property
    def planner(self) -> StrategyPlanner:
        """See `Strategy.planner`."""
        return self

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """See `Strategy.settings`; plain torch has no configuration of its own."""
        return ()

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        return whole_memory(workload)

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """See `StrategyPlanner.part_of`."""


# -- the whole model -------------------------------------------------------------------------------


def whole_memory(
    workload: Workload, *, replicas: int | None = None, sum_bytes: int | None = None
) -> MemoryEstimate:
    """Estimate a rank whose gradients are those of `LocalGradients`, or of `SummedOverRanks`.

    Args:
        replicas: ranks that DDP makes replicas of; None: all of them.
        sum_bytes: of a number of the sums of gradients; None: of the type of reductions.
    """
    size, dtype = Sizes.of(workload), workload.precision.param_dtype
    replicas = replicas or workload.world_size
    masters = size.num_trained * size.master if size.compute != size.master else 0
    state = round(size.num_trained * workload.state_bytes)
    gradients = size.num_trained * (sum_bytes or size.reduce)
    held = {
        at.WEIGHTS: weight_bytes(size.model.parameters(), dtype) + scale_bytes(size.model),
        at.OPTIMIZER: masters + state,
    }
    if replicas > 1:
        # With `gradient_as_bucket_view`, DDP's Reducer keeps a place for each gradient.
        held[at.BUFFERS] = size.num_trained * size.compute
    sums = gradients if size.accumulates else 0
    one_type = size.compute == size.reduce

    def made(count: int) -> int:
        """Bytes of gradients where backward has made so many."""
        if replicas == 1 or size.accumulates:
            return sums + count * size.compute
        # A bucket is summed in a copy of another type, see `SummedOverRanks._reduce`.
        return 0 if one_type else count * size.reduce

    collect = made(size.num_trained)
    if replicas == 1 and not size.accumulates and not one_type:
        # `LocalGradients.collect` converts them one after another.
        collect = max(collect, gradients) + size.largest * min(size.compute, size.reduce)
    # In the update each gets the masters' type; `Tensor.to` makes nothing of what has it.
    summed = 0 if replicas > 1 and one_type else gradients
    again = 0 if size.reduce == size.master else size.num_trained * size.master
    beside = max(update_made(workload, (p.numel() for p in size.parameters)), again and summed)
    reductions = max(1, round(size.num_trained * size.compute / BUCKET))
    return MemoryEstimate(
        device=by_moment(
            held,
            masters,
            {at.GRADIENTS: sums},
            {
                at.BACKWARD: {at.GRADIENTS: made(size.head + size.layer)},
                at.END: {at.GRADIENTS: made(size.num_trained - size.embedding)},
                at.COLLECT: {at.GRADIENTS: collect},
                at.UPDATE: {at.GRADIENTS: again or summed, at.OPTIMIZER: beside},
            },
        ),
        host={at.SAVE: size.to_save},
        traffic=transfer("all_reduce", range(replicas), reductions, size.num_trained * size.reduce),
        other_bytes=size.update_traffic(size.num_trained, state),
    )
