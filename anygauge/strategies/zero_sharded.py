"""What a rank holds at each moment under ZeRO-3, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime/zero`` 0.19: ``stage3.py``, ``partition_parameters.py`` and
``coalesced_collectives.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anygauge.interface import HOST_DEVICE
from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    EMBEDDING,
    END,
    EVALUATION,
    FORWARD,
    GATHERED,
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
)
from anygauge.strategies.footprint import item_size, scale_bytes
from anygauge.strategies.materialise import decoder_layers, units
from anygauge.strategies.zero_memory import NORM, Terms, total, updated_bytes
from anygauge.strategies.zero_settings import DEFAULT_LIVE, DEFAULT_PERSISTENCE

SUB_GROUP = 1_000_000_000
"""Default of ``sub_group_size``: numbers of a rank's part that are updated at once."""
SWAPPED_AT_ONCE = 4
"""Default of ``offload_optimizer.buffer_count``: pinned buffers for what lies on a disk."""


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
        model: Any = terms.model
        ranks, zero = terms.workload.world_size, terms.zero
        below = int(zero.get("stage3_param_persistence_threshold", DEFAULT_PERSISTENCE))
        live = int(zero.get("stage3_max_live_parameters", DEFAULT_LIVE))
        every = {id(p): p for p in model.parameters()}.values()
        of_layers = list(decoder_layers(model))

        def size(*parameters: nn.Parameter) -> int:
            return sum(
                _part(p.numel(), ranks) * ranks * item_size(p, terms.dtype) for p in parameters
            )

        def passing(module: nn.Module | None) -> int:
            if module is None:
                return 0
            found = {id(p): p for p in module.parameters() if p.numel() > below}
            return size(*found.values())

        head = model.get_output_embeddings()
        fetching = of_layers
        if terms.options.gather != "layer":
            fetching = [module for layer in of_layers for module in layer.modules()]
        return cls(
            parts=size(*every) // ranks,
            resident=size(*(p for p in every if p.numel() <= below)),
            others=size(*(p for p in every if p.numel() > below)),
            layer=max(map(passing, of_layers)),
            embedding=passing(model.get_input_embeddings()),
            head=passing(head) if head is not None and not head.weight.requires_grad else 0,
            trained=any(p.requires_grad for p in of_layers[0].parameters() if p.numel() > below),
            ahead=live * terms.compute,
            calls=sum(passing(end) > 0 for end in (model.get_input_embeddings(), head))
            + sum(any(p.numel() > below for p in m.parameters(False)) for m in fetching),
        )

    def whole(self, more: int) -> int:
        """What is whole at once: what was fetched ahead, up to a limit, and what is needed now."""
        return min(self.others, self.ahead + more)


def sharded_memory(terms: Terms) -> MemoryEstimate:
    """Of a run with stage 3.

    From the third micro-batch on DeepSpeed fetches weights ahead, and keeps what is used again
    soon, until so many are whole (``stage3_max_live_parameters``), beside what a module needs.
    """
    workload = terms.workload
    ranks = workload.world_size
    weights = _Weights.of(terms)
    part = sum(_part(size, ranks) for size in terms.sizes)
    groups = sub_groups(terms, ranks)
    params_on_host = terms.options.offload in ("parameters", "both")
    # ``grad_partitions_flat_buffer``, and a bucket as long as the engine lives
    held = {
        WEIGHTS: scale_bytes(terms.model)
        + weights.resident
        + (0 if params_on_host else weights.parts),
        OPTIMIZER: 0 if terms.on_host else terms.of_part(part),
        BUFFERS: terms.bucket * terms.reduce + (0 if terms.on_host else part * terms.reduce),
    }
    here = {**held, WEIGHTS: held[WEIGHTS] - weights.resident}
    beside, emptied = _beside_bucket(terms)

    def at(gathered: int, gradients: int = 0) -> dict[str, int]:
        return {**held, GATHERED: gathered, GRADIENTS: gradients}

    work = _work(terms, weights, part, params_on_host=params_on_host)
    return MemoryEstimate(
        device={
            LOAD: _loaded(terms, here, part, groups, params_on_host=params_on_host),
            BEGIN: at(weights.whole(0)),
            FORWARD: at(weights.whole(weights.layer)),
            LOSS: at(weights.whole(weights.head + weights.layer if weights.head else 0)),
            REDUCE: at(weights.whole(0), emptied),
            BACKWARD: at(weights.whole(weights.layer if weights.trained else 0), beside),
            END: at(weights.whole(0), beside),
            # The gradient that the embedding's backward makes is in the trace.
            EMBEDDING: at(weights.embedding, max(0, emptied - _embedding_gradient(terms))),
            UPDATE: _updated(terms, held, here, part, groups),
            EVALUATION: at(weights.whole(weights.layer)),
            SAVE: {**held, SAVED: terms.gathered_to_save(ranks)},
        },
        host=_host(terms, weights.parts if params_on_host else 0, part, groups),
        traffic=_traffic(terms, weights),
        host_bytes=work["host_bytes"],
        copied_bytes=work["copied_bytes"],
        other_bytes=work["other_bytes"],
    )


def _embedding_gradient(terms: Terms) -> int:
    model: Any = terms.model
    table = model.get_input_embeddings()
    return sum(p.numel() * terms.compute for p in table.parameters() if p.requires_grad)


def _beside_bucket(terms: Terms) -> tuple[int, int]:
    """Bytes of gradients beside the bucket: while backward makes them, and when it is emptied.

    One that does not fit lies outside, see ``__add_grad_to_ipg_bucket``. What is reduced is laid
    out by ranks in a tensor of its own (``reduce_scatter_coalesced``).
    """
    ranks = terms.workload.world_size
    outside = terms.largest * terms.compute if terms.largest > terms.bucket else 0
    widened = terms.reduce if terms.reduce != terms.compute else 0
    at_once = min(max(terms.bucket, terms.largest), terms.trained)
    emptied = at_once * terms.reduce
    if outside:
        emptied += outside + terms.largest * widened
    if terms.workload.backend.device_type == HOST_DEVICE:
        emptied += at_once * terms.reduce  # gloo copies what goes into ``_reduce_scatter_base``
    if terms.on_host:
        # Sums are brought back for their norm, see ``partition_grads``.
        emptied += _part(terms.largest, ranks) * (terms.reduce + NORM)
    return outside, emptied


def _part(numbers: int, ranks: int) -> int:
    return -(-numbers // ranks)


def sub_groups(terms: Terms, ranks: int) -> list[int]:
    """Numbers of a rank's part that are updated at once, see ``_create_fp16_sub_groups``."""
    most = int(terms.zero.get("sub_group_size", SUB_GROUP))
    found, numbers = [], 0
    for size in terms.sizes:
        numbers += _part(size, ranks)
        if numbers >= most:
            found.append(numbers)
            numbers = 0
    return [*found, numbers] if numbers else found


# -- the model, the update, the host ---------------------------------------------------------------


def _loaded(
    terms: Terms,
    here: Mapping[str, int],
    part: int,
    groups: Sequence[int],
    *,
    params_on_host: bool,
) -> dict[str, int]:
    """While units are loaded whole and divided one by one, or when the engine is made."""
    ranks = terms.workload.world_size
    loading, parts = 0, 0
    seen: set[int] = set()
    for _, unit in units(terms.model):
        mine = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, mine))
        sizes = [p.numel() * item_size(p, terms.dtype) for p in mine]
        largest = max(sizes, default=0) // ranks
        loading = max(loading, sum(sizes) + (0 if params_on_host else parts + largest))
        parts += sum(sizes) // ranks
    weights, masters = here[WEIGHTS], 0 if terms.on_host else part * terms.master
    made = max(groups, default=0) * terms.master
    # To put its hooks on, each trained weight is gathered, when all else is there.
    largest = terms.largest * terms.compute
    ready = {
        **here,
        OPTIMIZER: masters,
        GATHERED: largest + (largest // ranks if params_on_host else 0),
    }
    # ``initialize_optimizer_states`` has a gradient of the largest group; so has the conversion.
    return max(
        {WEIGHTS: loading},
        {WEIGHTS: weights, OPTIMIZER: masters + (0 if terms.on_host else made)},
        ready,
        key=total,
    )


def _updated(
    terms: Terms,
    held: Mapping[str, int],
    here: Mapping[str, int],
    part: int,
    groups: Sequence[int],
) -> dict[str, int]:
    """Resident weights are let go of, and gathered again when all groups were updated."""
    if terms.on_host:
        return dict(held)
    norm = _part(terms.largest, terms.workload.world_size) * NORM
    widened = terms.master if terms.reduce != terms.master else 0
    made = max(
        (
            max(numbers * (terms.reduce + widened), numbers * terms.master + terms.made(numbers))
            for numbers in groups
        ),
        default=0,
    )
    # Of gradients in float16, it is looked up where each is not finite.
    looked = part if terms.workload.precision.scales_loss else 0
    updating = {**here, OPTIMIZER: here[OPTIMIZER] + max(made, norm, looked)}
    return max(dict(held), updating, key=total)


def _host(
    terms: Terms, weights: int, part: int, groups: Sequence[int]
) -> dict[str, dict[str, int]]:
    """Weights, masters and state, with a gradient in float32 and the partitions' sums."""
    saved = terms.saved()
    drawn = {BUFFERS: terms.drawn(terms.workload.world_size if weights else 0)}
    if not terms.on_host:
        always = {WEIGHTS: weights}
        # ``defragment`` takes trained parts through the host.
        loaded = {WEIGHTS: weights, BUFFERS: 0 if weights else part * terms.compute}
        loaded = max(drawn, loaded, key=total)
        found = {LOAD: loaded, SAVE: {**always, **saved}}
        moments = (BEGIN, FORWARD, LOSS, BACKWARD, END, UPDATE, EVALUATION) if weights else ()
        return {**{moment: always for moment in moments}, **found}
    largest = max(groups, default=0)
    buffers = 0
    if terms.options.nvme is not None:
        buffers = SWAPPED_AT_ONCE * largest * terms.master
    sums = part * terms.reduce
    always = {
        WEIGHTS: weights,
        OPTIMIZER: terms.of_part(part),
        GRADIENTS: part * terms.master + sums,
        BUFFERS: buffers,
    }
    copied = largest * terms.compute + max((terms.made(size) for size in groups), default=0)
    loaded = {
        **always,
        OPTIMIZER: part * terms.master,
        BUFFERS: buffers + (max(sums, largest * terms.master) if terms.pinned else 0),
    }
    return {
        LOAD: max(drawn, loaded, key=total),
        **{moment: always for moment in (BEGIN, FORWARD, LOSS, BACKWARD, END, EVALUATION)},
        UPDATE: {**always, BUFFERS: buffers + copied},
        SAVE: {**always, **saved},
    }


# -- traffic and work ------------------------------------------------------------------------------


def _traffic(terms: Terms, weights: _Weights) -> tuple[Traffic, ...]:
    """Of a step: weights are gathered in each micro-batch, resident ones after the update."""
    turns, ranks = terms.workload.accumulation, terms.workload.world_size
    group = tuple(range(ranks))
    gradients = sum(_part(size, ranks) * ranks for size in terms.sizes)
    resident = weights.resident
    return (
        Traffic(
            operation="all_gather",
            group=group,
            waited=False,
            times=turns * 2 * weights.calls + (1 if resident else 0),
            bytes=turns * 2 * weights.others + resident,
        ),
        Traffic(
            operation="reduce_scatter",
            group=group,
            waited=False,
            times=turns * -(-gradients // max(1, terms.bucket)),
            bytes=turns * gradients * terms.reduce,
        ),
    )


def _work(terms: Terms, weights: _Weights, part: int, *, params_on_host: bool) -> dict[str, float]:
    """Gathered weights are copied out of what they came in; gradients into the bucket and by ranks.

    Sums on the host go to the device and back in each micro-batch, and there again at its end.
    """
    turns, ranks = terms.workload.accumulation, terms.workload.world_size
    gathered = turns * 2 * weights.others
    gradients = turns * terms.trained * (terms.compute + 6.0 * terms.reduce)
    updated = updated_bytes(terms, part)
    copied = 0.0
    if terms.on_host:
        copied += part * (2 * turns * terms.reduce + terms.master + terms.compute)
    if params_on_host:
        copied += gathered / ranks
    return {
        "host_bytes": updated if terms.on_host else 0.0,
        "copied_bytes": copied,
        "other_bytes": 2.0 * gathered + gradients + (0.0 if terms.on_host else updated),
    }
