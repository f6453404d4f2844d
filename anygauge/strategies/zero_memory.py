"""What a rank holds at each moment under ZeRO, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime`` 0.19, in ``stage_1_and_2.py``, ``bf16_optimizer.py`` and
``unfused_optimizer.py``; those of stage 3 are in `zero_sharded`. What lies on a disk stands in the
host's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
from anygauge.strategies.footprint import item_bytes, scale_bytes, update_made, weight_bytes
from anygauge.strategies.whole_footprint import on_host
from anygauge.strategies.zero_footprint import zero_footprint
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_settings import (
    DEFAULT_BUCKET,
    ModelSizes,
    as_config,
    zero_settings,
)

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

    def of_part(self, part: int) -> int:
        """Bytes of the masters and the optimizer's state of so many numbers."""
        return part * self.master + round(part * self.workload.state_bytes)

    def made(self, *sizes: int) -> int:
        """Bytes that an update of tensors of so many numbers makes."""
        return update_made(self.workload, sizes)

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
        always: there from the first step on.
        summed: beside it from the first micro-batch of a step until its update.
        backward: beside these while backward makes them: the bucket, and what is not in it.
        exchanged: made when a bucket is exchanged.
        update: beside what is there always, at the most in an update.
        host: on the host, always.
    """

    always: int = 0
    summed: int = 0
    backward: int = 0
    exchanged: int = 0
    update: int = 0
    host: int = 0


def _replicated_memory(terms: Terms) -> MemoryEstimate:
    workload, stage, trained = terms.workload, terms.options.stage, terms.trained
    part = -(-trained // workload.world_size) if stage else trained
    weights = weight_bytes(terms.model.parameters(), workload.precision.param_dtype)
    weights += scale_bytes(terms.model)
    plain = stage == 0 and workload.precision.param_dtype == workload.precision.master_dtype
    masters = 0 if plain else part * terms.master
    optimizer = masters + round(part * workload.state_bytes)
    immediate = stage == 1 and workload.precision.param_dtype == "bfloat16"
    if stage == 0:
        found = _unsharded(terms)
    elif immediate and workload.precision.reduce_dtype == "float32" and not terms.on_host:
        found = _summed_whole(terms)
    elif stage == 1:
        found = _reduced_at_the_end(terms, part)
    else:
        found = _reduced_at_once(terms, part)
    held = {WEIGHTS: weights, OPTIMIZER: 0 if terms.on_host else optimizer}
    held[GRADIENTS] = found.always
    host: dict[str, int] = {}
    if terms.on_host:
        # fp32 weights and their gradients, their copy in the compute type, and a gradient
        host = {
            OPTIMIZER: optimizer,
            GRADIENTS: part * terms.master + found.host,
            BUFFERS: part * terms.compute + terms.largest * terms.compute,
        }
        # ``temp_grad_buffer_for_gpu_offload``
        held[BUFFERS] = terms.largest * terms.compute
    several = found.summed if workload.accumulation > 1 else 0
    step = {**held, GRADIENTS: found.always + several}
    backward = {**held, GRADIENTS: found.always + several + found.backward}
    end = {**held, GRADIENTS: found.always + max(found.summed, several) + found.backward}
    rest = {**end, GRADIENTS: end[GRADIENTS] + found.exchanged}
    exchanges = trained > terms.bucket and stage == 2
    made = terms.made(part) if stage else terms.made(*terms.sizes)
    update = found.update
    if not terms.on_host:
        update = max(update, found.summed + part * terms.master + made)
    loaded = {
        WEIGHTS: weights + (trained * terms.compute if stage else 0),
        OPTIMIZER: 0 if terms.on_host else masters,
    }
    ready = {WEIGHTS: weights, OPTIMIZER: 0 if terms.on_host else masters}
    ready[GRADIENTS] = found.always
    if not plain and not found.always:
        # ``initialize_optimizer_states`` has a gradient of each; without ZeRO it makes an update.
        ready[GRADIENTS] = 0 if terms.on_host else part * terms.master
        if stage == 0:
            ready[OPTIMIZER] += round(part * workload.state_bytes) + made
    return MemoryEstimate(
        device={
            LOAD: max(loaded, ready, key=lambda kinds: sum(kinds.values())),
            BEGIN: step,
            FORWARD: step,
            LOSS: step,
            BACKWARD: backward,
            END: end,
            **({REDUCE: rest} if exchanges else {}),
            COLLECT: rest,
            UPDATE: {**held, GRADIENTS: found.always, OPTIMIZER: held[OPTIMIZER] + update},
            EVALUATION: held,
            SAVE: {**held, SAVED: terms.gathered_to_save(workload.world_size) if stage else 0},
        },
        host={
            **{moment: host for moment in (BEGIN, FORWARD, LOSS, BACKWARD, END, EVALUATION)},
            **({UPDATE: {**host, BUFFERS: host[BUFFERS] + made}} if host else {}),
            SAVE: {**host, **terms.saved()},
        },
        traffic=_replicated_traffic(terms),
        **_replicated_work(terms, part),
    )


def _unsharded(terms: Terms) -> _Gradients:
    """Stage 0: ``allreduce_no_retain`` of the gradients that autograd has summed.

    It takes parameters until they are more than 500 million numbers.
    """
    gradients = terms.trained * terms.compute
    at_once = min(terms.trained, DEFAULT_BUCKET + terms.largest)
    return _Gradients(summed=gradients, exchanged=at_once * terms.compute)


def _summed_whole(terms: Terms) -> _Gradients:
    """Stage 1 in bfloat16 with sums in float32: ``BF16_Optimizer``.

    It has all sums as one vector, and keeps autograd's gradients, which it sets to zero; the vector
    is copied to be reduced.
    """
    sums = terms.trained * terms.reduce
    return _Gradients(
        always=sums + terms.trained * terms.compute,
        exchanged=max(sums, terms.largest * terms.reduce),
        update=0,
    )


def _reduced_at_the_end(terms: Terms, part: int) -> _Gradients:
    """Stage 1: all gradients are summed as they are, and go through a bucket at the end."""
    item = terms.reduce
    bucket = terms.bucket * item
    exchanged = min(terms.bucket, terms.trained) * item
    copied = part * terms.compute
    return _Gradients(
        summed=terms.trained * item,
        backward=bucket,
        exchanged=exchanged + copied,
        update=part * (item + (terms.master if item != terms.master else 0)) + copied,
        host=terms.trained * terms.compute if terms.workload.accumulation > 1 else 0,
    )


def _reduced_at_once(terms: Terms, part: int) -> _Gradients:
    """Stage 2: a bucket of gradients in the compute type is copied, and in the type of sums again.

    What a rank keeps of it is summed in a vector of that type, or stays in copies.
    """
    compute, reduce = terms.compute, terms.reduce
    widened = reduce if reduce != compute else 0
    at_once = max(min(terms.bucket, terms.trained), terms.largest)
    beyond = terms.largest * compute if terms.largest > terms.bucket else 0
    return _Gradients(
        summed=part * reduce,
        backward=terms.bucket * compute + beyond,
        exchanged=at_once * (compute + widened),
        update=part * (reduce + (terms.master if reduce != terms.master else 0)),
        host=0 if widened or terms.workload.accumulation == 1 else part * compute,
    )


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


def _replicated_work(terms: Terms, part: int) -> dict[str, float]:
    """Gradients are read and written by each sum and each copy, what is updated once."""
    stage, turns = terms.options.stage, terms.workload.accumulation
    times = turns if stage == 2 else 1
    sums = turns * terms.trained * (terms.compute + 2 * terms.reduce)
    exchanged = times * 4 * terms.trained * terms.reduce
    updated = updated_bytes(terms, part)
    copied = part * (terms.compute + terms.master) if terms.on_host else 0
    return {
        "host_bytes": updated if terms.on_host else 0,
        "copied_bytes": copied,
        "other_bytes": sums + exchanged + (0 if terms.on_host else updated),
    }


def updated_bytes(terms: Terms, part: int) -> float:
    """What an update of so many numbers reads and writes.

    Masters and state, gradients that are scaled and read, and weights that are copied.
    """
    return 2.0 * terms.of_part(part) + part * (4 * terms.master + terms.compute)


def trained_parts(model: nn.Module, ranks: int) -> int:
    """Numbers of a rank's parts of trained parameters that are divided one by one."""
    parameters = {id(p): p for p in model.parameters() if p.requires_grad}
    return sum(-(-p.numel() // ranks) for p in parameters.values())
