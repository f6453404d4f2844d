"""What a rank holds and sends under FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from anygauge.interface import HOST_DEVICE
from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    COLLECT,
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
    SAVE,
    SAVED,
    UPDATE,
    WEIGHTS,
    Footprint,
    MemoryEstimate,
    Traffic,
    Workload,
)
from anygauge.strategies.flat import BUFFERS as FLAT_BUFFERS
from anygauge.strategies.flat import flat_lengths, gathered_in_a_turn
from anygauge.strategies.footprint import (
    item_bytes,
    item_size,
    rows_of,
    scale_bytes,
    update_made,
)
from anygauge.strategies.fsdp_options import FsdpOptions
from anygauge.strategies.materialise import decoder_layers, units
from anygauge.strategies.whole_footprint import (
    TrainedPlaces,
    beside_one,
    numbers_of,
    on_host,
    step_bytes,
)


def fsdp_footprint(
    options: FsdpOptions, ranks: int, workload: Workload, *, flat: bool
) -> Footprint:
    """See `Strategy.footprint`; of the first rank, whose parts are the largest.

    Args:
        ranks: that hold the model together.
        flat: frozen layers are gathered by `FlatLayers`.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "a footprint is counted from the model"
    everything = list({id(p): p for p in model.parameters()}.values())
    trained = [p for p in everything if p.requires_grad]
    all_trained = len(trained) == len(everything)
    dtype, reduce = precision.param_dtype, item_bytes(precision.reduce_dtype)
    master = item_bytes(precision.master_dtype)
    layers = {id(p): p for layer in decoder_layers(model) for p in layer.parameters()}
    in_layers = _padded(layers.values(), ranks, dtype)
    in_root = _padded((p for p in everything if id(p) not in layers), ranks, dtype)
    part = sum(map(lambda p: rows_of(p, ranks), trained))
    frozen = sum(rows_of(p, ranks) * item_size(p, dtype) for p in everything if not p.requires_grad)
    turns = workload.accumulation
    once = options.gather == "step"
    gathers = in_layers + in_root if once else turns * (2 * in_layers + in_root)
    if flat:
        lengths = flat_lengths(model, ranks)
        gathers = gathered_in_a_turn(lengths) * item_bytes(dtype) + _padded(trained, ranks, dtype)
        gathers *= turns
        whole = [p for p in everything if id(p) not in layers and not p.requires_grad]
        frozen = sum(lengths) // ranks * item_bytes(dtype)
        frozen += sum(p.numel() * item_size(p, dtype) for p in whole)
    reductions = turns if all_trained else 1
    sums = reductions * _padded(trained, ranks, precision.reduce_dtype)
    sent = {"all_gather": gathers, "reduce_scatter": sums} if ranks > 1 else {}
    if options.dp_replicate > 1:
        sent["all_reduce"] = sums // ranks
    return Footprint(
        weights=frozen + part * master + scale_bytes(model),
        gradients=part * master if all_trained else sum(p.numel() for p in trained) * reduce,
        masters=0,
        optimizer=round(part * workload.state_bytes),
        sent=sent,
    )


def _padded(parameters: Iterable[nn.Parameter], ranks: int, dtype: str) -> int:
    """Bytes of parameters in a type, whose rows are made a multiple of the ranks."""
    return sum(rows_of(p, ranks) * ranks * item_size(p, dtype) for p in parameters)


@dataclass(frozen=True, slots=True)
class _Group:
    """What FSDP2 gathers and reduces together: a decoder layer, or the rest. In bytes.

    Attributes:
        whole: gathered, in the compute type.
        gradients: of all of its trained weights, in the compute type.
        reduced: what goes into a reduction, in the type of reductions.
        part: of the sums over ranks, those of a rank, in the masters' type.
    """

    whole: int = 0
    gradients: int = 0
    reduced: int = 0
    part: int = 0

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], ranks: int, workload: Workload) -> _Group:
        """Of parameters, each once."""
        precision = workload.precision
        every = list({id(p): p for p in parameters}.values())
        trained = [p for p in every if p.requires_grad]
        return cls(
            whole=_padded(every, ranks, precision.param_dtype),
            gradients=sum(p.numel() for p in trained) * item_bytes(precision.param_dtype),
            reduced=_padded(trained, ranks, precision.reduce_dtype),
            part=sum(rows_of(p, ranks) for p in trained) * item_bytes(precision.master_dtype),
        )


@dataclass(frozen=True, slots=True)
class _Most:
    """Gathered weights, gradients and buffers at one moment."""

    gathered: int = 0
    gradients: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.gradients + self.buffers

    def kinds(self, held: Mapping[str, int]) -> dict[str, int]:
        """With what is held all the time."""
        more = {GATHERED: self.gathered, GRADIENTS: self.gradients, BUFFERS: self.buffers}
        return {kind: held.get(kind, 0) + more.get(kind, 0) for kind in {**held, **more}}


def _most(*found: _Most) -> _Most:
    return max(found, key=lambda one: one.total)


def fsdp_memory(
    options: FsdpOptions, ranks: int, workload: Workload, *, flat: bool
) -> MemoryEstimate:
    """What the workload's rank holds and sends; parts are those of the first, the largest.

    Args:
        ranks: that hold the model together.
        flat: frozen layers are gathered by `FlatLayers`.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "an estimate is made from the model"
    held = fsdp_footprint(options, ranks, workload, flat=flat)
    trained = tuple({id(p): p for p in model.parameters() if p.requires_grad}.values())
    parts = sum(rows_of(p, ranks) for p in trained) * item_bytes(precision.master_dtype)
    offloaded = options.offload != "none"
    scales = scale_bytes(model)
    own = {WEIGHTS: held.weights - scales, OPTIMIZER: held.optimizer}
    device = {WEIGHTS: scales} if offloaded else {**own, WEIGHTS: held.weights}
    if flat:
        longest = max(flat_lengths(model, ranks)) * item_bytes(precision.param_dtype)
        device[GATHERED] = FLAT_BUFFERS * longest
        moments = _flat_moments(trained, ranks, workload)
    else:
        moments = _moments(options, ranks, workload)
    found = {moment: most.kinds(device) for moment, most in moments.items()}
    largest = max((p.numel() for p in trained), default=0) * item_bytes(precision.master_dtype)
    found[LOAD] = {kind: size for kind, size in device.items() if kind != OPTIMIZER}
    # Where the device is the host, all of them are there together, when one is whole at a time.
    apart = workload.backend.device_type != HOST_DEVICE
    found[SAVE] = {**found[SAVE], SAVED: SAVED_WHOLES * largest if apart else largest}
    made = update_made(workload, (rows_of(p, ranks) for p in trained))
    update = {GRADIENTS: parts, OPTIMIZER: held.optimizer + made}
    found[UPDATE] = device if offloaded else {**device, **update}
    read = values_read(model)
    host = {**on_host(workload), LOAD: {WEIGHTS: read}}
    work = step_bytes(
        workload, parts // item_bytes(precision.master_dtype), held.optimizer, masters=False
    )
    moved = 0.0
    if offloaded:
        several = {**own, GRADIENTS: parts if workload.accumulation > 1 else 0}
        host = {
            **{moment: several for moment in (BEGIN, FORWARD, LOSS)},
            **{moment: {**own, GRADIENTS: parts} for moment in (BACKWARD, END)},
            LOAD: {WEIGHTS: own[WEIGHTS] + read},
            UPDATE: {**own, **update},
            EVALUATION: own,
            SAVE: {**own, **host[SAVE]},
        }
        moved = _copied(options, ranks, workload, own[WEIGHTS], parts)
    copies = 3.0 * held.sent.get("all_gather", 0) + 2.0 * held.sent.get("reduce_scatter", 0)
    return MemoryEstimate(
        device=found,
        host=host,
        traffic=_traffic(options, ranks, workload, held.sent, flat=flat),
        host_bytes=work if offloaded else 0.0,
        copied_bytes=moved,
        other_bytes=moved + copies + (0.0 if offloaded else work),
    )


def values_read(model: nn.Module) -> int:
    """Bytes of values on the host while the model is made: `ModelFactory.values` of a unit, in
    float32 where they are drawn, while a tensor of the unit before is still there."""
    most = before = 0
    for _, unit in units(model):
        sizes = [p.numel() for p in unit.parameters()]
        most, before = max(most, before + sum(sizes)), sizes[-1]
    return 4 * most


SAVED_WHOLES = 3
"""Whole tensors that `Sharded.whole` has at once: what a gather gives out, a copy without what rows
were filled up with, and the tensor before, which its caller has still."""


def _moments(options: FsdpOptions, ranks: int, workload: Workload) -> dict[str, _Most]:
    """Of FSDP2's own groups: each layer, and what is outside of layers.

    From torch's `FSDPParamGroup` and `foreach_all_gather`: weights come together in one tensor, and
    are copied out of it into each parameter's. In forward that tensor stays until the next group
    was copied out; the one before it is let go of only then. In backward the next layer is gathered
    while one computes. The root stays whole between forward and backward. What goes into a
    reduction is kept until the next group's gradients are there (`reduce_scatter_states`), and
    after a micro-batch that is not the last into the next one.
    """
    model = workload.skeleton
    assert model is not None
    layers = list(decoder_layers(model))
    inside = {id(p) for layer in layers for p in layer.parameters()}
    every = [_Group.of(layer.parameters(), ranks, workload) for layer in layers]
    root = _Group.of((p for p in model.parameters() if id(p) not in inside), ranks, workload)
    largest = max(every, key=lambda one: one.whole, default=_Group())
    together = 1 if ranks > 1 else 0  # alone, there is nothing that comes together
    gathering = together * largest.whole
    first = root.whole * (1 + together) + gathering + largest.whole
    trained = TrainedPlaces.of(model)
    item = item_bytes(workload.precision.param_dtype)
    reduced_item = item_bytes(workload.precision.reduce_dtype)
    parts = root.part + sum(one.part for one in every)
    several, everything = workload.accumulation > 1, _all_trained(model)
    there = 0 if options.offload != "none" else 1
    # Those of all weights are reduced after each micro-batch, and the sums are parts; an adapter's
    # are added up whole before, and reduced once.
    sums = there * parts if several and everything else 0
    pending = numbers_of(tuple(trained.in_backward())) * reduced_item
    pending = pending if several and not everything else 0
    waiting = root.reduced if several and everything else 0
    gradients = sums + pending + waiting
    after = root.whole
    if options.gather == "step":
        kept = sum(one.whole for one in every)
        after += kept
        # Later micro-batches gather nothing, the first has no gradients before.
        gathered = {
            BEGIN: max(after if several else 0, first),
            GATHER: after + 2 * gathering,
            FORWARD: after + gathering,
            LOSS: after + gathering,
            BACKWARD: after,
            END: after if several else root.whole + largest.whole,
        }
        kept = kept if several else 0
    else:
        kept, two = 0, root.whole + gathering + largest.whole
        gathered = {
            BEGIN: first,
            GATHER: two + gathering,
            FORWARD: two,
            LOSS: root.whole + gathering,
            BACKWARD: two,
            END: two,
        }
    last = trained.layers[-1] if trained.layers else ()
    of_head, of_layer = numbers_of(trained.head) * item, beside_one(last) * item
    reducing = max((one.reduced for one in every), default=0)
    done = there * sum(one.part for one in every)
    # The last of them is added to a sum, or stays as it is; two layers are not there yet.
    before = sums + there * largest.part if several else max(0, done - 2 * there * largest.part)
    all_done = sums + there * largest.part if several else done
    before, all_done = before + pending, all_done + pending
    added = gradients if options.gather == "layer" else max(0, gradients - gathering)
    return {
        **{at: _Most(gathered[at], added) for at in (BEGIN, GATHER, FORWARD, LOSS)},
        BACKWARD: _Most(gathered[BACKWARD], gradients + of_head + of_layer),
        END: _Most(gathered[END], before + of_head + of_layer, reducing),
        EMBEDDING: _Most(root.whole + kept, all_done + of_head, reducing),
        COLLECT: _Most(kept, all_done + root.gradients, root.reduced),
        EVALUATION: _Most(gathered[FORWARD]),
        SAVE: _Most(after),
    }


def _flat_moments(
    trained: Sequence[nn.Parameter], ranks: int, workload: Workload
) -> dict[str, _Most]:
    """Where frozen layers are `FlatLayers` and FSDP2 has what is trained, in one group.

    It is whole from the first forward on, and its gradients are reduced when backward is done.
    """
    group = _Group.of(trained, ranks, workload)
    count = sum(p.numel() for p in trained)
    item = item_bytes(workload.precision.param_dtype)
    several = workload.accumulation > 1
    sums = count * item_bytes(workload.precision.reduce_dtype) if several else 0
    both = 2 * group.whole if ranks > 1 else group.whole
    collect = group.gradients + group.reduced
    if several:
        collect = max(sums + count * item, sums + group.reduced)
    return {
        **dict.fromkeys((BEGIN, FORWARD, LOSS), _Most(both, sums)),
        BACKWARD: _Most(group.whole, sums),
        END: _Most(group.whole, sums + group.gradients),
        COLLECT: _Most(0, collect),
        EVALUATION: _Most(both),
        SAVE: _Most(group.whole),
    }


def _all_trained(model: nn.Module) -> bool:
    return all(p.requires_grad for p in model.parameters())


def _copied(
    options: FsdpOptions, ranks: int, workload: Workload, weights: int, parts: int
) -> float:
    """Bytes that a step copies: parts of weights before each gather, and sums to the host."""
    model = workload.skeleton
    assert model is not None
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    master, dtype = item_bytes(workload.precision.master_dtype), workload.precision.param_dtype
    root = sum(
        rows_of(p, ranks) * (master if p.requires_grad else item_size(p, dtype))
        for p in model.parameters()
        if id(p) not in inside
    )
    if options.gather == "step":
        return float(weights + parts)
    turns = workload.accumulation
    return float(turns * (2 * (weights - root) + root) + parts * _reductions(workload))


def _reductions(workload: Workload) -> int:
    """How often gradients are reduced in a step."""
    assert workload.skeleton is not None
    return workload.accumulation if _all_trained(workload.skeleton) else 1


def _traffic(
    options: FsdpOptions, ranks: int, workload: Workload, sent: Mapping[str, int], *, flat: bool
) -> tuple[Traffic, ...]:
    """Of a footprint, by the ranks that take part. FSDP2 waits for none of them at once."""
    model = workload.skeleton
    assert model is not None
    layers = list(decoder_layers(model))
    trained = sum(any(p.requires_grad for p in layer.parameters()) for layer in layers)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    root = any(p.requires_grad and id(p) not in inside for p in model.parameters())
    turns, count = workload.accumulation, len(layers)
    gathers: float = turns * (2 * count + 1)
    if options.gather == "step":
        gathers = count + 1
    elif flat:
        gathers = turns * (2 * max(0, count - FLAT_BUFFERS) + 1)
    reductions = _reductions(workload) * (1 if flat else trained + root)
    times = {"all_gather": gathers, "reduce_scatter": reductions, "all_reduce": reductions}
    first = workload.rank // ranks * ranks
    beside = tuple(range(first, first + ranks))
    replicas = tuple(range(workload.rank % ranks, workload.world_size, ranks))
    return tuple(
        Traffic(
            operation=operation,
            group=replicas if operation == "all_reduce" else beside,
            waited=False,
            times=times[operation],
            bytes=size,
        )
        for operation, size in sent.items()
        if size
    )
