"""What a rank holds at each moment under ZeRO, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime`` 0.19: ``stage_1_and_2.py``, ``bf16_optimizer.py`` and
``unfused_optimizer.py``; of stage 3, ``stage3.py``, ``partition_parameters.py`` and
``coalesced_collectives.py``. What lies on a disk stands in the host's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE, MemoryEstimate, Workload
from anygauge.interface import estimate as at
from anygauge.strategies.shared.flat import FlatSizes, not_flat
from anygauge.strategies.shared.footprint import (
    Kinds,
    Sizes,
    by_moment,
    item_size,
    scale_bytes,
    transfer,
    unique,
    update_made,
    weight_bytes,
)
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.zero.deepspeed_config import (
    DEFAULT_BUCKET,
    DEFAULT_LIVE,
    PERSISTENCE,
    ModelSizes,
    as_config,
    stage_of,
    zero_settings,
)
from anygauge.strategies.zero.spec import ZeroOptions

COPIED_BEFORE = 4
"""Bytes of the copy of each number in `Workload.update_bytes`, for optimizers that are stepped by
anygauge itself."""
NORM = 8
"""Norms are taken of each gradient as float64, see ``get_norm_dtype``."""

SUB_GROUP = 1_000_000_000
"""Default of ``sub_group_size``: numbers of a rank's part that are updated at once."""


def zero_memory(options: ZeroOptions, workload: Workload) -> MemoryEstimate:
    """What the workload's rank holds and sends, in any stage."""
    terms = Terms.of(options, workload)
    return sharded_memory(terms) if terms.stage == 3 else replicated_memory(terms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What the estimates of all stages are made of.

    Attributes:
        stage: that DeepSpeed has.
        flat: layers' frozen weights, where `FlatLayers` has them.
        zero: DeepSpeed's ``zero_optimization``.
        bucket: numbers that DeepSpeed reduces at once.
        part: numbers that a rank updates.
    """

    options: ZeroOptions
    size: Sizes
    stage: int
    flat: FlatSizes | None
    zero: Mapping[str, Any]
    bucket: int
    part: int

    @classmethod
    def of(cls, options: ZeroOptions, workload: Workload) -> Terms:
        """Those of a run."""
        size = Sizes.of(workload)
        sizes = ModelSizes.of(size.model)
        settings = zero_settings(options, workload, sizes)
        stage = stage_of(options, workload, sizes)
        zero, ranks = as_config(settings)["zero_optimization"], workload.world_size
        parts = {0: size.num_trained, 3: sum(of_ranks(p.numel(), ranks) for p in size.parameters)}
        return cls(
            options=options,
            size=size,
            stage=stage,
            flat=None if stage == options.stage else FlatSizes.of(size.model, ranks),
            zero=zero,
            bucket=int(zero.get("reduce_bucket_size", DEFAULT_BUCKET)),
            part=parts.get(stage, of_ranks(size.num_trained, ranks)),
        )

    @property
    def on_host(self) -> bool:
        """Whether the optimizer is."""
        return self.options.offload in ("optimizer", "both")

    @property
    def is_plain(self) -> bool:
        """Whether torch's own optimizer is handed through: stage 0 in the masters' type."""
        return self.stage == 0 and self.size.compute == self.size.master

    @property
    def masters(self) -> int:
        """Bytes of a rank's copies of trained weights."""
        return 0 if self.is_plain else self.part * self.size.master

    @property
    def state(self) -> int:
        """Bytes of a rank's part of the optimizer's state."""
        return round(self.part * self.size.workload.state_bytes)

    @property
    def reduce_extra(self) -> int:
        """Bytes of a gradient's number in the type of reductions, where it is another one."""
        return self.size.reduce if self.size.reduce != self.size.compute else 0

    def scratch(self, count: int) -> int:
        """Bytes that an update of so many numbers makes.

        DeepSpeed leaves an update out by itself: nothing is copied before.
        """
        if self.is_plain:
            return update_made(self.size.workload, (p.numel() for p in self.size.parameters))
        return round(count * max(0.0, self.size.workload.update_bytes - COPIED_BEFORE))

    def device_update(self, count: int) -> int:
        """Bytes beside gradients and state when so many numbers are updated on the device.

        Gradients are laid out as one vector, and get the masters' type.
        """
        size = self.size
        vector = size.reduce + (size.master if size.reduce != size.master else 0)
        return max(count * vector, 0 if self.on_host else count * size.master + self.scratch(count))

    @property
    def to_save(self) -> Kinds:
        """Masters that are put together on a device: one, while the last is there.

        A part comes from the host before, if it is there.
        """
        sizes = [p.numel() for p in self.size.parameters]
        most = max((a + b for a, b in zip((0, *sizes), sizes, strict=False)), default=0)
        part = of_ranks(self.size.largest, self.size.workload.world_size) if self.on_host else 0
        return {at.SAVED: (most + part) * self.size.master if self.stage else 0}

    @property
    def update_traffic(self) -> float:
        """Bytes that an update reads and writes: masters and state, gradients that are scaled and
        read, and weights that are copied."""
        size = self.size
        each = 4 * size.master + size.compute
        return 2.0 * (self.part * size.master + self.state) + self.part * each

    def on_the_host(self, always: Kinds, update: Kinds) -> dict[str, dict[str, int]]:
        """What an offloaded optimizer has there beside other things."""
        held = {**always, at.OPTIMIZER: self.masters + self.state}
        return by_moment(held, self.masters, {}, {at.UPDATE: update, at.SAVE: self.size.to_save})


def of_ranks(count: int, ranks: int) -> int:
    """What a rank has of so many numbers."""
    return -(-count // ranks)


# -- stages 0 to 2: each rank has all weights ------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """Gradients of an engine whose ranks have all weights, in bytes.

    Attributes:
        always: there from the first step on.
        summed: beside it from the first micro-batch of a step until its update.
        each: of `summed`, for each number; 0: all is there as soon as one is.
        bucket: beside these in backward, with gradients that do not fit in.
        exchanged: beside the bucket when it is emptied, or all are exchanged.
        update: beside what is always there until the update, and in it.
        host: on the host, always, if the optimizer is.
    """

    always: int = 0
    summed: int = 0
    each: int = 0
    bucket: int = 0
    exchanged: int = 0
    update: int = 0
    host: int = 0


def _gradients(terms: Terms) -> _Gradients:
    size, part, stage = terms.size, terms.part, terms.stage
    compute, reduce, widened = size.compute, size.reduce, terms.reduce_extra
    precision = size.workload.precision
    if stage == 0:
        # ``allreduce_no_retain`` of what autograd has summed: parameters until they are more than
        # 500 million numbers. An update has gradients in the masters' type beside those.
        summed = size.num_trained * compute
        at_once = min(size.num_trained, DEFAULT_BUCKET + size.largest)
        update = summed + terms.masters + terms.scratch(part)
        exchanged = summed + at_once * compute
        return _Gradients(summed=summed, each=compute, exchanged=exchanged, update=update)
    if stage == 2:
        # A bucket in the compute type is copied, and in the type of sums again. What a rank keeps
        # of it is summed in a vector of that type, or stays in copies.
        summed = part * reduce
        at_once = max(min(terms.bucket, size.num_trained), size.largest)
        beyond = size.largest * compute if size.largest > terms.bucket else 0
        return _Gradients(
            summed=summed,
            bucket=terms.bucket * compute + beyond,
            exchanged=summed + at_once * (compute + widened),
            update=max(
                summed + NORM * min(size.largest, part),
                (0 if widened else summed) + terms.device_update(part),
            ),
            host=part * compute if size.accumulates and not widened else 0,
        )
    summed = size.num_trained * reduce
    of_types = (precision.param_dtype, precision.reduce_dtype) == ("bfloat16", "float32")
    if of_types and not terms.on_host:
        # ``BF16_Optimizer`` has all sums as one vector, and keeps autograd's gradients, which it
        # sets to zero; the vector is copied to be reduced.
        always = summed + size.num_trained * compute
        return _Gradients(always=always, exchanged=summed, update=terms.scratch(part))
    # All gradients are summed as they are, and go through a bucket at the end. Those of a rank's
    # part are copied, and laid out as one vector for the update.
    copied = part * compute
    return _Gradients(
        summed=summed,
        each=reduce,
        bucket=terms.bucket * reduce,
        exchanged=summed + copied,
        update=max(summed + copied + NORM * size.largest, copied + terms.device_update(part)),
        host=summed if size.accumulates else 0,
    )


def replicated_memory(terms: Terms) -> MemoryEstimate:
    """Estimate a run with stage 0, 1 or 2."""
    size, stage, part = terms.size, terms.stage, terms.part
    workload, found = size.workload, _gradients(terms)
    turns = workload.accumulation
    optimizer = terms.masters + terms.state
    # ``temp_grad_buffer_for_gpu_offload``
    copied = size.largest * size.compute if terms.on_host else 0
    flat, dtype = terms.flat, workload.precision.param_dtype
    weights = weight_bytes(size.model.parameters(), dtype)
    if flat is not None:
        weights = weight_bytes((*size.parameters, *not_flat(size.model)), dtype)
        weights += flat.per_rank * size.compute
    held = {
        at.WEIGHTS: weights + scale_bytes(size.model),
        at.GATHERED: 0 if flat is None else flat.buffers * size.compute,
        at.OPTIMIZER: 0 if terms.on_host else optimizer,
        at.BUFFERS: found.always + copied,
    }
    step = {at.GRADIENTS: found.summed if size.accumulates else 0}
    overflows = size.num_trained > terms.bucket
    first, most = size.head + size.layer, size.num_trained - size.embedding

    def backward(count: int) -> Kinds:
        there = found.each * count
        if not found.each and overflows:
            there = found.summed
        return {at.GRADIENTS: (step[at.GRADIENTS] or there) + found.bucket}

    collect = {at.GRADIENTS: found.bucket + found.exchanged}
    # ``initialize_optimizer_states`` has a gradient of each master; stage 0 makes an update.
    initial = 0 if terms.on_host or found.always else terms.masters
    if stage == 0:
        initial += terms.state + terms.scratch(part)
    more = {
        at.LOAD: {at.GRADIENTS: initial},
        at.BACKWARD: backward(first),
        at.END: backward(most),
        at.COLLECT: collect,
        at.UPDATE: {at.GRADIENTS: found.update},
        at.SAVE: terms.to_save,
        # All gradients go through a bucket meanwhile, where they are more than it.
        at.REDUCE: collect if stage == 2 and overflows else step,
    }
    # Masters, their gradients and state; a copy of a part of the weights, and of one gradient.
    there = {
        at.GRADIENTS: part * size.master + found.host,
        at.BUFFERS: (part + size.largest) * size.compute,
    }
    host = {at.SAVE: size.to_save}
    if terms.on_host:
        host = terms.on_the_host(there, {at.OPTIMIZER: terms.scratch(part)})
    # Stage 2 keeps a part of the gradients alone, so it reduces after each micro-batch.
    times = turns if stage == 2 else 1
    summed = size.num_trained * size.reduce
    group = range(workload.world_size)
    buckets = times * of_ranks(size.num_trained, terms.bucket)
    gathers, gathered = 1, size.num_trained * size.compute
    if flat is not None:
        gathers += turns * flat.num_gathers
        gathered += turns * flat.num_gathered * size.compute
    added = turns * size.num_trained * (size.compute + 2.0 * size.reduce)
    return MemoryEstimate(
        device=by_moment(held, 0 if terms.on_host else terms.masters, step, more),
        host=host,
        traffic=(
            *transfer("all_reduce", group, buckets, times * summed),
            *(transfer("all_gather", group, gathers, gathered) if stage else ()),
        ),
        host_bytes=terms.update_traffic if terms.on_host else 0.0,
        copied_bytes=part * (size.compute + size.master) if terms.on_host else 0.0,
        other_bytes=added + times * 4.0 * summed + (0.0 if terms.on_host else terms.update_traffic),
    )


# -- stage 3: weights are sharded, too -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """Sizes of a model's weights, in bytes, whole and padded to a multiple of the ranks.

    Attributes:
        parts: of all, that a rank holds.
        resident: of those that stay whole.
        others: of all that do not.
        layer, embedding: of those that do not, the largest of a decoder layer, and the embedding.
        head: the same of the output layer; 0 where it is trained, since it is read at once again.
        trained: whether layers are: frozen ones, read to be recomputed, count among those ahead.
        ahead: that are there at the most before a module fetches what it lacks itself.
        calls: modules that fetch.
    """

    parts: int
    resident: int
    others: int
    layer: int
    embedding: int
    head: int
    trained: bool
    ahead: int
    calls: int

    @classmethod
    def of(cls, terms: Terms) -> _Weights:
        model: Any = terms.size.model
        workload, zero = terms.size.workload, terms.zero
        below = int(zero.get("stage3_param_persistence_threshold", PERSISTENCE))
        live = int(zero.get("stage3_max_live_parameters", DEFAULT_LIVE))
        layers = list(decoder_layers(model))

        def part(parameters: Iterable[nn.Parameter], *, resident: bool) -> int:
            return sum(
                of_ranks(p.numel(), workload.world_size)
                * item_size(p, workload.precision.param_dtype)
                for p in unique(parameters)
                if (p.numel() <= below) is resident
            )

        def passing(module: nn.Module | None) -> int:
            of_all = () if module is None else module.parameters()
            return workload.world_size * part(of_all, resident=False)

        resident = part(model.parameters(), resident=True)
        others = part(model.parameters(), resident=False)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        by_layer = terms.options.gather != "module"  # all of it at once, as a "leaf module"
        modules = [module for layer in layers for module in layer.modules()]
        fetching = layers if by_layer else modules
        return cls(
            parts=resident + others,
            resident=resident * workload.world_size,
            others=others * workload.world_size,
            layer=max(map(passing, layers)),
            embedding=passing(embedding),
            head=passing(head) if head is not None and not head.weight.requires_grad else 0,
            trained=any(p.requires_grad for p in layers[0].parameters() if p.numel() > below),
            ahead=live * terms.size.compute,
            calls=sum(passing(end) > 0 for end in (embedding, head))
            + sum(any(p.numel() > below for p in m.parameters(by_layer)) for m in fetching),
        )

    def full(self, more: int) -> int:
        """Count what is whole at once: what was fetched ahead, up to a limit, and is needed now."""
        return min(self.others, self.ahead + more)


def sharded_memory(terms: Terms) -> MemoryEstimate:
    """Estimate a run with stage 3.

    From the third micro-batch on DeepSpeed fetches weights ahead, and keeps what is used again
    soon, until so many are whole (``stage3_max_live_parameters``), beside what a module needs.
    """
    size, part, on_host = terms.size, terms.part, terms.on_host
    workload, weights = size.workload, _Weights.of(terms)
    ranks, turns = workload.world_size, workload.accumulation
    params_on_host = terms.options.offload in ("parameters", "both")
    # Numbers updated at once, see ``_create_fp16_sub_groups``: a group ends when it is long enough.
    group = int(terms.zero.get("sub_group_size", SUB_GROUP)) + of_ranks(size.largest, ranks)
    at_once = min(part, group)
    # ``grad_partitions_flat_buffer``, and a bucket as long as the engine lives
    sums, bucket = part * size.reduce, terms.bucket * size.reduce
    here = 0 if params_on_host else weights.parts
    # The second micro-batch of the first step fetches all that it will use in one gather, small
    # weights among it, which stay whole from the first on: they are there twice. The optimizer has
    # no state yet.
    state = 0 if on_host else terms.state
    again = max(0, weights.resident - state) if turns > 1 else 0
    held = {
        at.WEIGHTS: scale_bytes(size.model) + weights.resident + here,
        at.OPTIMIZER: 0 if on_host else terms.masters + terms.state,
        at.BUFFERS: bucket + (0 if on_host else sums),
    }
    outside, emptied = _beside_bucket(terms)
    # The gradient that the embedding's backward makes is in the trace.
    table: Any = size.model
    embedding = [p for p in table.get_input_embeddings().parameters() if p.requires_grad]
    traced = sum(p.numel() for p in embedding) * size.compute

    def having(gathered: int, gradients: int = 0) -> Kinds:
        return {at.GATHERED: gathered, at.GRADIENTS: gradients}

    in_step = {
        # A unit is whole before it is divided; each trained weight, to put its hooks on.
        at.LOAD: having(max(weights.layer, weights.embedding, size.largest * size.compute)),
        at.BEGIN: having(weights.full(0)),
        at.FORWARD: having(again + weights.full(weights.layer)),
        at.LOSS: having(again + weights.full(weights.head + weights.layer if weights.head else 0)),
        at.REDUCE: having(weights.full(0), emptied),
        at.BACKWARD: having(weights.full(weights.layer if weights.trained else 0), outside),
        at.END: having(weights.full(0), outside),
        at.EMBEDDING: having(weights.embedding, max(0, emptied - traced)),
        at.UPDATE: {at.OPTIMIZER: 0 if on_host else terms.device_update(at_once)},
        at.EVALUATION: having(weights.full(weights.layer)),
        at.SAVE: terms.to_save,
    }
    always = {at.WEIGHTS: weights.parts if params_on_host else 0}
    saving = {at.UPDATE: {}, at.SAVE: size.to_save}
    host = by_moment(always, 0, {}, saving) if params_on_host else {}
    if on_host:
        # A gradient in float32 for each, and the partitions' sums.
        there = {**always, at.GRADIENTS: part * size.master + sums}
        copied = at_once * size.compute + terms.scratch(at_once)
        host = terms.on_the_host(there, {at.BUFFERS: copied})
    # Weights are gathered in each micro-batch, resident ones after the update.
    everyone, gathered = range(ranks), turns * 2 * weights.others
    gathers = turns * 2 * weights.calls + (1 if weights.resident else 0)
    reduced = sum(of_ranks(p.numel(), ranks) * ranks for p in size.parameters)
    reductions = turns * of_ranks(reduced, max(1, terms.bucket))
    # Sums on the host go to the device and back in each micro-batch, and there again at its end.
    each = 2 * turns * size.reduce + size.master + size.compute
    moved = float(part * each) if on_host else 0.0
    # Gathered weights are copied out of what they came in; gradients into the bucket and by ranks.
    gradients = turns * size.num_trained * (size.compute + 6.0 * size.reduce)
    return MemoryEstimate(
        device=by_moment(held, 0 if on_host else terms.masters, {}, in_step),
        host={at.SAVE: size.to_save, **host},
        traffic=(
            *transfer("all_gather", everyone, gathers, gathered + weights.resident),
            *transfer("reduce_scatter", everyone, reductions, turns * reduced * size.reduce),
        ),
        host_bytes=terms.update_traffic if on_host else 0.0,
        copied_bytes=moved + (gathered / ranks if params_on_host else 0.0),
        other_bytes=2.0 * gathered + gradients + (0.0 if on_host else terms.update_traffic),
    )


def _beside_bucket(terms: Terms) -> tuple[int, int]:
    """Bytes of gradients beside the bucket: while backward makes them, and when it is emptied.

    One that does not fit lies outside, see ``__add_grad_to_ipg_bucket``. What is reduced is laid
    out by ranks in a tensor of its own (``reduce_scatter_coalesced``).
    """
    size = terms.size
    outside = size.largest * size.compute if size.largest > terms.bucket else 0
    at_once = min(max(terms.bucket, size.largest), size.num_trained)
    emptied = at_once * size.reduce
    if outside:
        emptied += outside + size.largest * terms.reduce_extra
    if size.workload.backend.device_type == HOST_DEVICE:
        emptied += at_once * size.reduce  # gloo copies what goes into ``_reduce_scatter_base``
    if terms.on_host:
        # Sums are brought back for their norm, see ``partition_grads``.
        emptied += of_ranks(size.largest, size.workload.world_size) * (size.reduce + NORM)
    return outside, emptied
