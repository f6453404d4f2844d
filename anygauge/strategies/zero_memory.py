"""What a rank holds at each moment under ZeRO, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime`` 0.19, in ``stage_1_and_2.py``, ``bf16_optimizer.py`` and
``unfused_optimizer.py``; those of stage 3 are in `zero_sharded`. What lies on a disk stands in the
host's part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE
from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    COLLECT,
    END,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOAD,
    LOSS,
    OPTIMIZER,
    REDUCE,
    SAVE,
    SAVED,
    UPDATE,
    WEIGHTS,
    MemoryEstimate,
    Traffic,
    Workload,
)
from anygauge.models.quantised import quantised_layers
from anygauge.strategies.footprint import (
    item_bytes,
    item_size,
    scale_bytes,
    update_made,
    weight_bytes,
)
from anygauge.strategies.materialise import units
from anygauge.strategies.whole_footprint import TrainedPlaces, beside_one, numbers_of, on_host
from anygauge.strategies.zero_footprint import zero_footprint
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_settings import (
    DEFAULT_BUCKET,
    ModelSizes,
    as_config,
    zero_settings,
)

COPIED_BEFORE = 4
"""Bytes of the copy of each number in `Workload.update_bytes`, for optimizers that are stepped by
anygauge itself."""
DRAWN = 4
"""Bytes of a number that is drawn."""
NORM = 8
"""Norms are taken of each gradient as float64, see ``get_norm_dtype``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What the estimates of all stages are made of.

    Attributes:
        zero: DeepSpeed's ``zero_optimization``.
        sizes: numbers of each trained parameter, in the model's order.
        bucket: numbers that DeepSpeed reduces at once.
        compute, reduce, master: bytes of a number, of each type.
    """

    options: ZeroOptions
    workload: Workload
    model: nn.Module
    zero: Mapping[str, Any]
    sizes: tuple[int, ...]
    bucket: int
    compute: int
    reduce: int
    master: int

    @classmethod
    def of(cls, options: ZeroOptions, workload: Workload) -> Terms:
        """Those of a run."""
        model, precision = workload.skeleton, workload.precision
        assert model is not None, "an estimate is made from the model"
        settings = zero_settings(options, workload, ModelSizes.of(model))
        zero = as_config(settings)["zero_optimization"]
        trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        return cls(
            options=options,
            workload=workload,
            model=model,
            zero=zero,
            sizes=tuple(trained.values()),
            bucket=int(zero.get("reduce_bucket_size", DEFAULT_BUCKET)),
            compute=item_bytes(precision.param_dtype),
            reduce=item_bytes(precision.reduce_dtype),
            master=item_bytes(precision.master_dtype),
        )

    @property
    def dtype(self) -> str:
        """The compute type."""
        return self.workload.precision.param_dtype

    @property
    def trained(self) -> int:
        """Numbers that are trained."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Numbers of the largest trained parameter."""
        return max(self.sizes, default=0)

    @property
    def on_host(self) -> bool:
        """Whether the optimizer is."""
        return self.options.offload in ("optimizer", "both")

    @property
    def pinned(self) -> bool:
        """Whether what is on the host is pinned, which DeepSpeed does by a copy."""
        return bool(self.zero.get("offload_optimizer", {}).get("pin_memory"))

    @property
    def plain(self) -> bool:
        """Whether torch's own optimizer is handed through: stage 0 in the masters' type."""
        return self.options.stage == 0 and self.compute == self.master

    @property
    def overflows(self) -> bool:
        """Whether not all gradients fit in a bucket."""
        return self.trained > self.bucket

    def of_part(self, part: int) -> int:
        """Bytes of the masters and the optimizer's state of so many numbers."""
        return part * self.master + round(part * self.workload.state_bytes)

    def made(self, numbers: int) -> int:
        """Bytes that an update of so many numbers makes.

        DeepSpeed leaves an update out by itself: nothing is copied before.
        """
        return round(numbers * max(0.0, self.workload.update_bytes - COPIED_BEFORE))

    def drawn(self, parts_of: int = 0) -> int:
        """Most bytes on the host while rank 0 draws a new model's values, see `materialise`.

        Those of a unit are in float32, and looked at for what is not a number; those of the unit
        before are still there. Stored values, which are read one by one, take less.

        Args:
            parts_of: ranks that each keep their part on the host; 0: it goes to the device.
        """
        if self.workload.backend.device_type == HOST_DEVICE:
            return 0  # more is there later
        most = before = kept = 0
        seen: set[int] = set()
        for _, unit in units(self.model):
            codes = quantised_layers(unit)
            sizes, whole = [0], 0
            for name, parameter in unit.named_parameters():
                if id(parameter) in seen or ".lora_" in name:
                    continue
                seen.add(id(parameter))
                plain = math.prod(codes[name].plain_shape) if name in codes else parameter.numel()
                sizes.append(plain)
                whole += parameter.numel() * item_size(parameter, self.dtype)
            most = max(most, before + sum(sizes) * DRAWN + max(sizes) + kept)
            before = sum(sizes) * DRAWN
            kept += whole // parts_of if parts_of else 0
        return most

    def saved(self) -> Mapping[str, int]:
        """What is put together on the host to be saved."""
        return on_host(self.workload)[SAVE]

    def gathered_to_save(self, ranks: int) -> int:
        """Bytes of the masters that are put together on a device: one, while the last is there.

        A part comes from the host before, if it is there.
        """
        pairs = zip((0, *self.sizes), self.sizes, strict=False)
        most = max((a + b for a, b in pairs), default=0)
        return (most + (-(-self.largest // ranks) if self.on_host else 0)) * self.master


class ZeroPlanner:
    """See `Strategy.planner`."""

    def __init__(self, options: ZeroOptions) -> None:
        self._options = options

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        terms = Terms.of(self._options, workload)
        if self._options.stage == 3:
            from anygauge.strategies.zero_sharded import sharded_memory

            return sharded_memory(terms)
        return _replicated_memory(terms)

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """See `StrategyPlanner.part_of`: a rank computes all of it."""


# -- stages 0 to 2: each rank has all weights ------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """Of an engine whose ranks have all weights, in bytes.

    Attributes:
        always: there from the first step on, which `loaded` of it is before.
        summed: beside it from the first micro-batch of a step until its update.
        each: of `summed`, for each number; 0: all is there as soon as one is.
        bucket: beside these in backward, with gradients that do not fit in.
        exchanged: beside the bucket when it is emptied, or all are exchanged.
        update: beside what is always there until the update, and in it.
        host: on the host, always.
    """

    always: int = 0
    loaded: int = 0
    summed: int = 0
    each: int = 0
    bucket: int = 0
    exchanged: int = 0
    update: int = 0
    host: int = 0


def _replicated_memory(terms: Terms) -> MemoryEstimate:
    workload, stage = terms.workload, terms.options.stage
    part = -(-terms.trained // workload.world_size) if stage else terms.trained
    weights = weight_bytes(terms.model.parameters(), workload.precision.param_dtype)
    weights += scale_bytes(terms.model)
    masters = 0 if terms.plain else part * terms.master
    optimizer = masters + round(part * workload.state_bytes)
    made = update_made(workload, terms.sizes) if terms.plain else terms.made(part)
    found = _gradients(terms, part, made)
    held = {
        WEIGHTS: weights,
        OPTIMIZER: 0 if terms.on_host else optimizer,
        # ``temp_grad_buffer_for_gpu_offload``
        BUFFERS: found.always + (terms.largest * terms.compute if terms.on_host else 0),
    }
    several = found.summed if workload.accumulation > 1 else 0
    trained = TrainedPlaces.of(terms.model)
    last = trained.layers[-1] if trained.layers else ()
    first = several or found.each * (numbers_of(trained.head) + beside_one(last))
    most = several or found.each * (terms.trained - numbers_of(trained.embedding))
    if not found.each and terms.overflows:
        first = most = found.summed
    collect = found.bucket + found.exchanged
    step = {**held, GRADIENTS: several}
    updated = updated_bytes(terms, part)
    return MemoryEstimate(
        device={
            LOAD: _replicated_load(terms, found, weights, part, made),
            BEGIN: step,
            FORWARD: step,
            LOSS: step,
            # All gradients go through a bucket meanwhile, where they are more than it.
            REDUCE: {**held, GRADIENTS: collect if stage == 2 and terms.overflows else several},
            BACKWARD: {**held, GRADIENTS: first + found.bucket},
            END: {**held, GRADIENTS: most + found.bucket},
            COLLECT: {**held, GRADIENTS: collect},
            UPDATE: {**held, GRADIENTS: found.update},
            EVALUATION: held,
            SAVE: {**held, SAVED: terms.gathered_to_save(workload.world_size) if stage else 0},
        },
        host=_replicated_host(terms, found, part, made),
        traffic=_replicated_traffic(terms),
        host_bytes=updated if terms.on_host else 0.0,
        copied_bytes=part * (terms.compute + terms.master) if terms.on_host else 0.0,
        other_bytes=_added_up(terms) + (0.0 if terms.on_host else updated),
    )


def _gradients(terms: Terms, part: int, made: int) -> _Gradients:
    if terms.options.stage == 0:
        return _unsharded(terms, made)
    if terms.options.stage == 2:
        return _reduced_at_once(terms, part, made)
    precision = terms.workload.precision
    of_types = (precision.param_dtype, precision.reduce_dtype) == ("bfloat16", "float32")
    if of_types and not terms.on_host:
        return _summed_whole(terms, made)
    return _reduced_at_the_end(terms, part, made)


def _unsharded(terms: Terms, made: int) -> _Gradients:
    """Stage 0: ``allreduce_no_retain`` of the gradients that autograd has summed.

    It takes parameters until they are more than 500 million numbers. An update has gradients in the
    masters' type beside those.
    """
    gradients = terms.trained * terms.compute
    at_once = min(terms.trained, DEFAULT_BUCKET + terms.largest)
    widened = 0 if terms.plain else terms.trained * terms.master
    return _Gradients(
        summed=gradients,
        each=terms.compute,
        exchanged=gradients + at_once * terms.compute,
        update=gradients + widened + made,
    )


def _summed_whole(terms: Terms, made: int) -> _Gradients:
    """Stage 1 in bfloat16 with sums in float32: ``BF16_Optimizer``.

    It has all sums as one vector, and keeps autograd's gradients, which it sets to zero; the vector
    is copied to be reduced.
    """
    sums = terms.trained * terms.reduce
    return _Gradients(
        always=sums + terms.trained * terms.compute, loaded=sums, exchanged=sums, update=made
    )


def _reduced_at_the_end(terms: Terms, part: int, made: int) -> _Gradients:
    """Stage 1: all gradients are summed as they are, and go through a bucket at the end.

    Those of a rank's part are copied, and laid out as one vector for the update.
    """
    each = terms.reduce
    summed, copied = terms.trained * each, part * terms.compute
    widened = terms.master if each != terms.master else 0
    # A gradient that is copied into the bucket lies there alone.
    outside = max(0, terms.trained - terms.bucket) * each
    return _Gradients(
        summed=summed,
        each=each,
        bucket=terms.bucket * each,
        exchanged=outside + min(terms.bucket, terms.trained) * each + copied,
        update=max(
            summed + copied + NORM * terms.largest,
            copied + part * (each + widened),
            0 if terms.on_host else part * terms.master + made,
        ),
        host=summed if terms.workload.accumulation > 1 else 0,
    )


def _reduced_at_once(terms: Terms, part: int, made: int) -> _Gradients:
    """Stage 2: a bucket of gradients in the compute type is copied, and in the type of sums again.

    What a rank keeps of it is summed in a vector of that type, or stays in copies.
    """
    compute, reduce = terms.compute, terms.reduce
    widened = reduce if reduce != compute else 0
    at_once = max(min(terms.bucket, terms.trained), terms.largest)
    beyond = terms.largest * compute if terms.largest > terms.bucket else 0
    summed = part * reduce
    return _Gradients(
        summed=summed,
        bucket=terms.bucket * compute + beyond,
        exchanged=summed + at_once * (compute + widened),
        update=max(
            summed + NORM * min(terms.largest, part),
            (0 if widened else summed)
            + part * (reduce + (terms.master if reduce != terms.master else 0)),
            0 if terms.on_host else part * terms.master + made,
        ),
        host=0 if widened or terms.workload.accumulation == 1 else part * compute,
    )


def _replicated_load(
    terms: Terms, found: _Gradients, weights: int, part: int, made: int
) -> dict[str, int]:
    """When the engine is made.

    Trained weights are put into one vector; through the host, where the device has no room for it.
    """
    masters = 0 if terms.on_host or terms.plain else part * terms.master
    ready = {WEIGHTS: weights, OPTIMIZER: masters, BUFFERS: found.loaded}
    if terms.on_host:
        ready[BUFFERS] = terms.largest * terms.compute
    elif not terms.plain and not found.loaded:
        # ``initialize_optimizer_states`` has a gradient of each; without ZeRO it makes an update.
        ready[GRADIENTS] = part * terms.master
        if terms.options.stage == 0:
            ready[OPTIMIZER] += round(part * terms.workload.state_bytes) + made
    return ready


def _replicated_host(
    terms: Terms, found: _Gradients, part: int, made: int
) -> dict[str, dict[str, int]]:
    """Masters, their gradients and state; a copy of a part of the weights, and of one gradient."""
    drawn = {BUFFERS: terms.drawn()}
    if not terms.on_host:
        return {LOAD: drawn, SAVE: dict(terms.saved())}
    always = {
        OPTIMIZER: terms.of_part(part),
        GRADIENTS: part * terms.master + found.host,
        BUFFERS: (part + terms.largest) * terms.compute,
    }
    return {
        LOAD: max(drawn, {**always, OPTIMIZER: part * terms.master}, key=total),
        **{moment: always for moment in (BEGIN, FORWARD, LOSS, BACKWARD, END, EVALUATION)},
        UPDATE: {**always, OPTIMIZER: always[OPTIMIZER] + made},
        SAVE: {**always, **terms.saved()},
    }


def _replicated_traffic(terms: Terms) -> tuple[Traffic, ...]:
    stage, turns = terms.options.stage, terms.workload.accumulation
    sent = zero_footprint(stage, 0, terms.workload).sent
    group = tuple(range(terms.workload.world_size))
    buckets = -(-terms.trained // terms.bucket) * (turns if stage == 2 else 1)
    return tuple(
        Traffic(
            operation=operation,
            group=group,
            waited=False,
            times=buckets if operation == "all_reduce" else 1,
            bytes=size,
        )
        for operation, size in sent.items()
    )


def _added_up(terms: Terms) -> float:
    """What is read and written to add gradients up, and to exchange them through copies."""
    turns = terms.workload.accumulation
    times = turns if terms.options.stage == 2 else 1
    summed = turns * terms.trained * (terms.compute + 2.0 * terms.reduce)
    return summed + times * 4.0 * terms.trained * terms.reduce


def total(kinds: Mapping[str, int]) -> int:
    """Bytes of all kinds."""
    return sum(kinds.values())


def updated_bytes(terms: Terms, part: int) -> float:
    """What an update of so many numbers reads and writes.

    Masters and state, gradients that are scaled and read, and weights that are copied.
    """
    return 2.0 * terms.of_part(part) + part * (4 * terms.master + terms.compute)
