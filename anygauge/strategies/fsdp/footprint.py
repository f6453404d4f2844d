"""What a rank holds and sends under FSDP2; parts are those of the first rank, the largest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from anygauge.interface import MemoryEstimate, Traffic
from anygauge.interface import estimate as at
from anygauge.strategies.fsdp.spec import FsdpOptions
from anygauge.strategies.shared.flat import FlatSizes, not_flat
from anygauge.strategies.shared.footprint import (
    Kinds,
    Sizes,
    add_kinds,
    by_moment,
    item_size,
    rows_of,
    scale_bytes,
    transfer,
    unique,
    update_made,
    weight_bytes,
)
from anygauge.strategies.shared.materialize import decoder_layers

SAVED_WHOLES = 3
"""Whole tensors that `ShardLayout.gather` has at once: what a gather gives out, a copy without what
rows were filled up with, and the tensor before, which its caller has still."""


@dataclass(frozen=True, slots=True)
class _Group:
    """What FSDP2 gathers and reduces together: a decoder layer, or the rest. In bytes.

    Attributes:
        whole: gathered, in the compute type.
        gradients: of all of its trained weights, in the compute type.
        reduced: what goes into a reduction, in the type of reductions.
        part: a rank's of the trained weights, in the masters' type, and of their sums.
        frozen: a rank's of the other weights.
    """

    whole: int
    gradients: int
    reduced: int
    part: int
    frozen: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], ranks: int, size: Sizes) -> _Group:
        dtype, every = size.workload.precision.param_dtype, unique(parameters)
        trained = [p for p in every if p.requires_grad]
        rows = sum(rows_of(p, ranks) for p in trained)
        own = sum(rows_of(p, ranks) * item_size(p, dtype) for p in every)
        return cls(
            whole=own * ranks,
            gradients=sum(p.numel() for p in trained) * size.compute,
            reduced=rows * ranks * size.reduce,
            part=rows * size.master,
            frozen=own - rows * size.compute,
        )


@dataclass(frozen=True, slots=True)
class _Shards:
    """A model in such groups.

    Attributes:
        ranks: that hold the model together.
        root: what is outside of layers.
        every, trained: all weights, and all that are trained, as if they were one group.
        flat: layers' frozen weights, where `FlatLayers` has them, and FSDP2 what is trained, which
            is one group then.
    """

    options: FsdpOptions
    size: Sizes
    ranks: int
    layers: list[_Group]
    root: _Group
    every: _Group
    trained: _Group
    flat: FlatSizes | None

    @property
    def on_host(self) -> bool:
        return self.options.offload != "none"

    @property
    def every_time(self) -> bool:
        """Whether gradients are reduced in each micro-batch: those of all weights."""
        return all(p.requires_grad for p in self.size.model.parameters())

    @property
    def weights(self) -> int:
        """Bytes of a rank's weights."""
        if self.flat is None:
            return self.every.part + self.every.frozen
        whole = weight_bytes(not_flat(self.size.model), self.size.workload.precision.param_dtype)
        return self.trained.part + self.flat.per_rank * self.size.compute + whole

    def in_step(self) -> dict[str, Kinds]:
        """Count what is there beside what is always held.

        From torch's `FSDPParamGroup` and `foreach_all_gather`: weights come together in one tensor,
        and are copied out of it into each parameter's. In forward that tensor stays until the next
        group was copied out; the one before it is let go of only then. In backward the next layer
        is gathered while one computes. The root stays whole between forward and backward. What goes
        into a reduction is kept until the next group's gradients are there
        (`reduce_scatter_states`), and after a micro-batch that is not the last into the next one.
        """
        size, root, several = self.size, self.root, self.size.accumulates
        largest = max(self.layers, key=lambda one: one.whole)
        at_once = self.options.gather == "step"
        together = 1 if self.ranks > 1 else 0  # alone, there is nothing that comes together
        gathering, kept = together * largest.whole, self.every.whole - root.whole
        whole = root.whole + (kept if at_once else largest.whole)
        first = root.whole * (1 + together) + gathering + largest.whole
        backward = whole + (0 if at_once else gathering)
        # Sums of all weights are parts; an adapter's are added up whole, and reduced once.
        there = 0 if self.on_host else 1
        added = 0
        if several:
            full = size.num_trained * size.reduce
            added = there * self.trained.part if self.every_time else full
        waiting = root.reduced if several and self.every_time else 0
        done, one = there * (self.trained.part - root.part), there * largest.part
        # The last of them is added to a sum, or stays as it is; two layers are not there yet.
        before, complete = (one, one) if several else (max(0, done - 2 * one), done)
        head, last = size.head * size.compute, size.layer * size.compute
        reducing = max(layer.reduced for layer in self.layers)

        def having(gathered: int, gradients: int, buffers: int = 0) -> Kinds:
            return {at.GATHERED: gathered, at.GRADIENTS: gradients, at.BUFFERS: buffers}

        gradients = added + waiting
        end = root.whole + largest.whole if at_once and not several else backward
        return {
            at.BEGIN: having(max(first, whole if at_once and several else 0), gradients),
            at.GATHER: having(whole + 2 * gathering, gradients),
            at.FORWARD: having(whole + gathering, gradients),
            at.LOSS: having((whole if at_once else root.whole) + gathering, gradients),
            at.BACKWARD: having(backward, gradients + head + last),
            at.END: having(end, added + before + head + last, reducing),
            at.EMBEDDING: having(
                whole if at_once and several else root.whole, added + complete + head, reducing
            ),
            at.COLLECT: having(
                kept if at_once and several else 0,
                added + complete + root.gradients,
                root.reduced,
            ),
            at.EVALUATION: {at.GATHERED: whole + gathering},
            at.SAVE: {at.GATHERED: whole if at_once else root.whole},
        }

    def in_flat_step(self) -> dict[str, Kinds]:
        """Count the same of `FlatLayers`.

        The group of what is trained is whole from the first forward on, and its gradients are
        reduced when backward is done.
        """
        size, group = self.size, self.trained
        sums = size.num_trained * size.reduce if size.accumulates else 0
        step = {at.GATHERED: 2 * group.whole, at.GRADIENTS: sums}
        return {
            **dict.fromkeys((at.BEGIN, at.FORWARD, at.LOSS), step),
            at.BACKWARD: {at.GATHERED: group.whole, at.GRADIENTS: sums},
            at.END: {at.GATHERED: group.whole, at.GRADIENTS: sums + group.gradients},
            at.COLLECT: {at.GRADIENTS: sums + group.gradients + group.reduced},
            at.EVALUATION: {at.GATHERED: 2 * group.whole},
            at.SAVE: {at.GATHERED: group.whole},
        }

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the traffic of a step. FSDP2 waits for none of it at once."""
        size, layers, root = self.size, self.layers, self.root
        rank, turns = size.workload.rank, size.workload.accumulation
        gathered = turns * (2 * self.every.whole - root.whole)
        gathers: float = turns * (2 * len(layers) + 1)
        groups = sum(one.reduced > 0 for one in (*layers, root))
        if self.options.gather == "step":
            gathered = self.every.whole
            gathers = len(layers) + 1
        elif self.flat is not None:
            gathered = turns * (self.flat.num_gathered * size.compute + self.trained.whole)
            gathers = turns * (self.flat.num_gathers + 1)
            groups = 1
        reductions = turns if self.every_time else 1
        reduced = reductions * self.trained.reduced
        first = rank // self.ranks * self.ranks
        beside = range(first, first + self.ranks)
        replicas = range(rank % self.ranks, size.workload.world_size, self.ranks)
        return (
            *transfer("all_gather", beside, gathers, gathered),
            *transfer("reduce_scatter", beside, reductions * groups, reduced),
            *transfer("all_reduce", replicas, reductions * groups, reduced // self.ranks),
        )

    def bytes_copied(self) -> float:
        """Bytes that a step copies: parts of weights before each gather, and sums to the host."""
        if not self.on_host:
            return 0.0
        if self.options.gather == "step":
            return float(self.weights + self.trained.part)
        turns, root = self.size.workload.accumulation, self.root.part + self.root.frozen
        sums = (turns if self.every_time else 1) * self.trained.part
        return float(turns * (2 * self.weights - root) + sums)


def fsdp_memory(options: FsdpOptions, ranks: int, size: Sizes, *, flat: bool) -> MemoryEstimate:
    """What the workload's rank holds and sends.

    Args:
        ranks: that hold the model together.
        flat: frozen layers are gathered by `FlatLayers`.
    """
    workload, model = size.workload, size.model
    layers = [list(layer.parameters()) for layer in decoder_layers(model)]
    inside = {id(p) for layer in layers for p in layer}
    outside = [p for p in model.parameters() if id(p) not in inside]
    shards = _Shards(
        options,
        size,
        ranks,
        [_Group.of(layer, ranks, size) for layer in layers],
        _Group.of(outside, ranks, size),
        _Group.of(model.parameters(), ranks, size),
        _Group.of(size.parameters, ranks, size),
        FlatSizes.of(model, ranks) if flat else None,
    )
    part = shards.trained.part
    count = part // size.master
    own = {at.WEIGHTS: shards.weights, at.OPTIMIZER: round(count * workload.state_bytes)}
    held = {at.WEIGHTS: scale_bytes(model)}
    moments = shards.in_step()
    if shards.flat is not None:
        held[at.GATHERED] = shards.flat.buffers * size.compute
        moments = shards.in_flat_step()
    saved = {at.SAVED: SAVED_WHOLES * size.largest * size.master}
    made = update_made(workload, (rows_of(p, ranks) for p in size.parameters))
    update = {at.GRADIENTS: part, at.OPTIMIZER: made}
    more = {**moments, at.SAVE: add_kinds(moments[at.SAVE], saved)}
    host = {at.SAVE: size.to_save}
    if shards.on_host:
        there = {at.GRADIENTS: part}
        in_step = there if size.accumulates else {}
        backward = {at.BACKWARD: there, at.END: there, at.UPDATE: update, at.SAVE: size.to_save}
        host = by_moment(own, 0, in_step, backward)
    else:
        held, more = add_kinds(held, own), {**more, at.UPDATE: update}
    work = size.update_traffic(count, own[at.OPTIMIZER], masters=False)
    traffic, moved = shards.traffic(), shards.bytes_copied()
    copies = {"all_gather": 3.0, "reduce_scatter": 2.0}
    return MemoryEstimate(
        device=by_moment(held, 0, {}, {at.UPDATE: {}, **more}),
        host=host,
        traffic=traffic,
        host_bytes=work if shards.on_host else 0.0,
        copied_bytes=moved,
        other_bytes=moved
        + sum(copies.get(one.operation, 0.0) * one.bytes for one in traffic)
        + (0.0 if shards.on_host else work),
    )
