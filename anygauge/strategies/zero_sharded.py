"""What a rank holds at each moment under ZeRO-3, and what it sends, by DeepSpeed's own rules.

Terms are those of DeepSpeed's ``runtime/zero`` 0.19: ``stage3.py``, ``partition_parameters.py`` and
``coalesced_collectives.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.interface import HOST_DEVICE
from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    EMBEDDING,
    END,
    EVALUATION,
    FORWARD,
    GATHER,
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
from anygauge.strategies import zero_gathering as gathering
from anygauge.strategies.footprint import item_size, scale_bytes
from anygauge.strategies.materialise import units
from anygauge.strategies.zero_gathering import Gathering, Pieces, Weight, Whole
from anygauge.strategies.zero_memory import NORM, Terms, total, updated_bytes
from anygauge.strategies.zero_settings import DEFAULT_LIVE, DEFAULT_PERSISTENCE, DEFAULT_PREFETCH

SUB_GROUP = 1_000_000_000
"""Default of ``sub_group_size``: numbers of a rank's part that are updated at once."""
SWAPPED_AT_ONCE = 4
"""Default of ``offload_optimizer.buffer_count``: pinned buffers for what lies on a disk."""


def sharded_memory(terms: Terms) -> MemoryEstimate:
    """Of a run with stage 3."""
    workload, zero = terms.workload, terms.zero
    ranks, dtype = workload.world_size, workload.precision.param_dtype

    def size(parameter: Any) -> int:
        padded: int = -(-parameter.numel() // ranks) * ranks
        return padded * item_size(parameter, dtype)

    resident_below = int(zero.get("stage3_param_persistence_threshold", DEFAULT_PERSISTENCE))
    pieces = Pieces(terms.model, size, resident_below, by_layer=terms.options.gather == "layer")
    recomputes = [workload.activations.recomputes(at) for at in range(len(pieces.layers))]
    coordinator = Gathering(
        pieces.step(recomputes),
        prefetch=int(zero.get("stage3_prefetch_bucket_size", DEFAULT_PREFETCH)),
        live=int(zero.get("stage3_max_live_parameters", DEFAULT_LIVE)),
        reuse=int(zero.get("stage3_max_reuse_distance", DEFAULT_LIVE)),
    )
    step = _Step(pieces, coordinator.run(), _least_kept(terms))
    buckets = _Buckets(terms, step)
    weights = pieces.weights.values()
    parts = sum(one.size for one in weights) // ranks
    resident = sum(one.size for one in weights if one.resident)
    part = sum(_part(one.numbers, ranks) for one in weights if one.trained)
    groups = sub_groups(terms, ranks)
    params_on_host = terms.options.offload in ("parameters", "both")
    scales = scale_bytes(terms.model)
    # ``grad_partitions_flat_buffer``, and a bucket as long as the engine lives
    flat = part * terms.reduce
    bucket = terms.bucket * terms.reduce
    optimizer = terms.of_part(part)
    held = {
        WEIGHTS: scales + resident + (0 if params_on_host else parts),
        OPTIMIZER: 0 if terms.on_host else optimizer,
        BUFFERS: bucket + (0 if terms.on_host else flat),
    }
    here = {**held, WEIGHTS: held[WEIGHTS] - resident}

    def at(gathered: int, gradients: int = 0) -> dict[str, int]:
        return {**held, GATHERED: gathered, GRADIENTS: gradients}

    turns, updated = workload.accumulation, updated_bytes(terms, part)
    # Weights are copied out of what they came in; gradients into the bucket, and by ranks.
    gathered = turns * coordinator.gathered
    added_up = turns * terms.trained * (terms.compute + 6.0 * terms.reduce)
    return MemoryEstimate(
        device={
            LOAD: _loaded(terms, pieces, here, part, groups, params_on_host=params_on_host),
            BEGIN: at(step.begin),
            GATHER: at(step.gather),
            FORWARD: at(step.forward),
            LOSS: at(step.loss),
            REDUCE: at(*buckets.exchanging),
            BACKWARD: at(*buckets.computing),
            END: at(step.first, buckets.beside_first),
            EMBEDDING: at(step.embedding, max(buckets.beside_first, buckets.at_last)),
            UPDATE: _updated(terms, held, here, part, groups),
            EVALUATION: at(step.evaluation),
            SAVE: {**held, SAVED: terms.gathered_to_save(ranks)},
        },
        host=_host(terms, parts if params_on_host else 0, part, groups),
        traffic=_traffic(terms, coordinator, buckets, resident),
        host_bytes=updated if terms.on_host else 0.0,
        copied_bytes=_copied(terms, coordinator, part, params_on_host=params_on_host),
        other_bytes=2.0 * gathered + added_up + (0.0 if terms.on_host else updated),
    )


def _least_kept(terms: Terms) -> int:
    """Bytes that a layer keeps of a micro-batch on the device at the least: its input."""
    table: Any = terms.model.get_input_embeddings()  # type: ignore[operator]
    workload = terms.workload
    tokens = workload.micro_batch * workload.length
    return 0 if workload.activations.offload else tokens * table.weight.shape[1] * terms.compute


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


class _Step:
    """Whole weights by moment, in bytes.

    Args:
        least: bytes that a layer keeps at the least. So much less than the last layer, each of
            those before it has beside weights.
    """

    def __init__(self, pieces: Pieces, found: Sequence[Whole], least: int) -> None:
        below = {layer: at for at, layer in enumerate(reversed(pieces.layers))}

        def less(one: Whole) -> int:
            return below[one.stop.layer] * least if one.stop.layer is not None else 0

        self.less = less
        forward = [one for one in found if one.passing == gathering.FORWARD]
        self.backward = found[len(forward) :]
        of_layers = [at for at, one in enumerate(forward) if one.stop.layer is not None]
        before, layers = forward[: of_layers[0]], forward[of_layers[0] : of_layers[-1] + 1]
        after = forward[of_layers[-1] + 1 :]
        first_back = next(at for at, o in enumerate(self.backward) if o.stop.layer is not None)
        # Only trained, the output layer takes part in backward.
        head = [at for at in range(first_back) if self.backward[at].stop is after[-1].stop]
        back = self.backward[: head[0] + 1] if head else []
        self.begin = max(max(one.fetching, one.computing) for one in before)
        self.gather = max(one.fetching - less(one) for one in (*layers, *after))
        self.forward = max(one.computing - less(one) for one in layers)
        self.loss = max(one.computing for one in (*after[-1:], *back))
        first = [at for at, o in enumerate(self.backward) if o.stop.layer is pieces.layers[0]]
        embedding = self.backward[first[-1] + 1 :]
        self.first = max(self.backward[at].computing for at in first)
        self.embedding = max((max(o.fetching, o.computing) for o in embedding), default=0)
        self.evaluation = max(one.computing for one in forward)


class _Buckets:
    """Gradients on their way through the bucket, beside it, in bytes.

    Gradients of a piece are there until its backward is over; they are copied into the bucket one
    by one, but for one that does not fit, see ``__add_grad_to_ipg_bucket``. When the next does not
    fit, what is in it is laid out by ranks in a tensor of its own (``reduce_scatter_coalesced``).

    Attributes:
        exchanging: whole weights and gradients at the most when a bucket is emptied, or weights are
            fetched.
        computing: the same while a layer computes; the largest of its gradients is not in it.
        beside_first: gradients while the first layer computes.
        at_last: gradients when the last bucket is emptied, but for one that the embedding's
            backward has made.
        emptied: how often, in a micro-batch.
    """

    def __init__(self, terms: Terms, step: _Step) -> None:
        self._terms = terms
        self._waiting: list[tuple[Weight, bool]] = []
        self._numbers = 0
        self.emptied = 0
        exchanging, computing = [(0, 0)], [(0, 0)]
        last = {one.stop: at for at, one in enumerate(step.backward)}
        reader = {weight: one.stop for one in step.backward for weight in one.stop.own}
        for at, one in enumerate(step.backward):
            less = step.less(one)
            exchanging.append((one.fetching - less, self._outside()))
            # Of a layer that is recomputed, gradients are made after that.
            mine = [w for w in one.stop.own if w.trained and reader[w] is one.stop]
            mine = mine if last[one.stop] == at else []
            left = sum(weight.numbers for weight in mine) * terms.compute
            if one.stop.layer is not None:
                largest = max((weight.numbers for weight in mine), default=0) * terms.compute
                computing.append((one.computing - less, self._outside() + left - largest))
            for weight in sorted(mine, key=lambda each: each.place):
                if self._waiting and self._numbers + weight.numbers > terms.bucket:
                    exchanging.append((one.computing - less, left + self._emptied()))
                self._numbers += weight.numbers
                fits = self._numbers <= terms.bucket
                self._waiting.append((weight, fits))
                left -= weight.numbers * terms.compute if fits else 0
        self.exchanging = max(exchanging, key=sum)
        self.computing = max(computing, key=sum)
        self.beside_first = computing[-1][1]
        made = sum(w.numbers for w, _ in self._waiting if w in step.backward[-1].stop.own)
        emptied = self._emptied() if self._waiting else 0
        self.at_last = max(0, emptied - made * terms.compute)

    def _outside(self) -> int:
        return sum(w.numbers for w, fits in self._waiting if not fits) * self._terms.compute

    def _emptied(self) -> int:
        terms, ranks = self._terms, self._terms.workload.world_size
        found = self._outside()
        if terms.reduce != terms.compute:
            found += sum(w.numbers for w, fits in self._waiting if not fits) * terms.reduce
        if len(self._waiting) > 1 or self._waiting[0][0].numbers % ranks:
            padded = sum(_part(weight.numbers, ranks) * ranks for weight, _ in self._waiting)
            found += padded * terms.reduce
        if terms.workload.backend.device_type == HOST_DEVICE:
            # Gloo copies what goes into ``_reduce_scatter_base``.
            found += sum(_part(weight.numbers, ranks) * ranks for weight, _ in self._waiting) * (
                terms.reduce
            )
        if terms.on_host:
            # Sums are brought back for their norm, see ``partition_grads``.
            part = max(_part(weight.numbers, ranks) for weight, _ in self._waiting)
            found += part * (terms.reduce + NORM)
        self._waiting, self._numbers = [], 0
        self.emptied += 1
        return found


# -- the model, the update, the host ---------------------------------------------------------------


def _loaded(
    terms: Terms,
    pieces: Pieces,
    here: Mapping[str, int],
    part: int,
    groups: Sequence[int],
    *,
    params_on_host: bool,
) -> dict[str, int]:
    """While units are loaded whole and divided one by one, or when the engine is made."""
    ranks = terms.workload.world_size
    loading, parts = 0, 0
    seen: set[Weight] = set()
    for _, unit in units(terms.model):
        mine = {pieces.weights[p] for p in unit.parameters()} - seen
        seen |= mine
        whole = sum(weight.size for weight in mine)
        largest = max((weight.size for weight in mine), default=0) // ranks
        loading = max(loading, whole + (0 if params_on_host else parts + largest))
        parts += whole // ranks
    weights, masters = here[WEIGHTS], 0 if terms.on_host else part * terms.master
    made = max(groups, default=0) * terms.master
    # To put its hooks on, each trained weight is gathered, when all else is there.
    trained = [weight for weight in pieces.weights.values() if weight.trained]
    largest = max((weight.size for weight in trained), default=0)
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


def _traffic(
    terms: Terms, coordinator: Gathering, buckets: _Buckets, resident: int
) -> tuple[Traffic, ...]:
    """Of a step: weights are gathered in each micro-batch, resident ones after the update."""
    turns, ranks = terms.workload.accumulation, terms.workload.world_size
    group = tuple(range(ranks))
    gradients = sum(_part(size, ranks) * ranks for size in terms.sizes) * terms.reduce
    return (
        Traffic(
            operation="all_gather",
            group=group,
            waited=False,
            times=turns * coordinator.calls + (1 if resident else 0),
            bytes=turns * coordinator.gathered + resident,
        ),
        Traffic(
            operation="reduce_scatter",
            group=group,
            waited=False,
            times=turns * buckets.emptied,
            bytes=turns * gradients,
        ),
    )


def _copied(terms: Terms, coordinator: Gathering, part: int, *, params_on_host: bool) -> float:
    """Bytes between device and host in a step.

    Sums on the host go to the device and back in each micro-batch, and there again at its end.
    """
    turns, ranks = terms.workload.accumulation, terms.workload.world_size
    copied = 0.0
    if terms.on_host:
        copied += part * (2 * turns * terms.reduce + terms.master + terms.compute)
    if params_on_host:
        copied += turns * coordinator.gathered / ranks
    return copied
