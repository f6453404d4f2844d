"""What a rank that holds the whole model has at each moment: alone, or as one of DDP's replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    COLLECT,
    EMBEDDING,
    END,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOAD,
    LOSS,
    OPTIMIZER,
    SAVE,
    SAVED,
    UPDATE,
    WEIGHTS,
    MemoryEstimate,
    Traffic,
    Workload,
)
from anygauge.strategies.footprint import item_bytes, update_made, whole_model
from anygauge.strategies.materialise import decoder_layers

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DDP closes a bucket: the first one, others."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedPlaces:
    """A model's trained parameters by when backward has their gradients, each once.

    Attributes:
        head: of the output layer and the last norm: those first.
        layers: by decoder layer.
        embedding: that nothing but the embedding reads: those last.
    """

    head: tuple[nn.Parameter, ...]
    layers: tuple[tuple[nn.Parameter, ...], ...]
    embedding: tuple[nn.Parameter, ...]

    def in_backward(self) -> Iterator[nn.Parameter]:
        """As backward comes to them."""
        yield from reversed(self.head)
        for layer in reversed(self.layers):
            yield from reversed(layer)
        yield from self.embedding

    @classmethod
    def of(cls, model: nn.Module) -> TrainedPlaces:
        """Of an adapted model."""
        layers = tuple(
            tuple(p for p in layer.parameters() if p.requires_grad)
            for layer in decoder_layers(model)
        )
        inside = {id(p) for layer in layers for p in layer}
        outside = {id(p): p for p in model.parameters() if p.requires_grad and id(p) not in inside}
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        at_table = {id(p) for table in tables for p in table.parameters(recurse=False)}
        others = {
            id(p)
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        }
        last = {key for key in outside if key in at_table and key not in others}
        return cls(
            head=tuple(p for key, p in outside.items() if key not in last),
            layers=layers,
            embedding=tuple(outside[key] for key in last),
        )


def numbers_of(parameters: tuple[nn.Parameter, ...]) -> int:
    """How many numbers they hold."""
    return sum(p.numel() for p in parameters)


def beside_one(parameters: tuple[nn.Parameter, ...]) -> int:
    """Numbers of all but the largest: a traced layer has one gradient itself at a time."""
    return numbers_of(parameters) - max((p.numel() for p in parameters), default=0)


def on_host(workload: Workload) -> dict[str, dict[str, int]]:
    """What rank 0 has in the host's memory when it saves: every trained tensor, whole.

    `Engine.export_trained` gives them all at once; one more is on its way.
    """
    assert workload.skeleton is not None, "an estimate is made from the model"
    sizes = [p.numel() for p in TrainedPlaces.of(workload.skeleton).in_backward()]
    whole = (sum(sizes) + max(sizes, default=0)) * item_bytes(workload.precision.master_dtype)
    return {SAVE: {SAVED: whole if workload.rank == 0 else 0}}


def whole_memory(workload: Workload, *, replicas: int = 1) -> MemoryEstimate:
    """Of a rank whose gradients are those of `LocalGradients`, or of `SummedOverRanks`.

    Args:
        replicas: ranks over which DDP sums; 1: there is no DDP.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "an estimate is made from the model"
    footprint = whole_model(workload)
    trained = TrainedPlaces.of(model)
    everything = tuple({id(p): p for p in model.parameters() if p.requires_grad}.values())
    count = numbers_of(everything)
    own, reduced, master = (
        item_bytes(name)
        for name in (precision.param_dtype, precision.reduce_dtype, precision.master_dtype)
    )
    held = {WEIGHTS: footprint.weights, OPTIMIZER: footprint.masters + footprint.optimizer}
    loaded = {WEIGHTS: footprint.weights, OPTIMIZER: footprint.masters}
    if replicas > 1:
        # With `gradient_as_bucket_view`, DDP's Reducer keeps a place for each gradient.
        buckets = {BUFFERS: count * own}
        held, loaded = {**held, **buckets}, {**loaded, **buckets}
    several = workload.accumulation > 1
    sums = count * reduced if several else 0
    step = {**held, GRADIENTS: sums}
    last = trained.layers[-1] if trained.layers else ()
    at_first = numbers_of(trained.head) + beside_one(last)
    at_end = count - numbers_of(trained.embedding)
    if replicas == 1:
        backward, end = (sums + size * own for size in (at_first, at_end))
        collect = _converted(everything, own, reduced, sums)
    else:
        backward, end, collect = (
            _in_replica(trained, size, own, reduced, sums) for size in (at_first, at_end, count)
        )
    # Of one type, `Tensor.to` makes no second tensor.
    summed = 0 if replicas > 1 and reduced == own else count * reduced
    again = 0 if reduced == master else count * master
    made = update_made(workload, (p.numel() for p in everything))
    sends = replicas > 1
    return MemoryEstimate(
        device={
            LOAD: loaded,
            BEGIN: step,
            FORWARD: step,
            LOSS: step,
            BACKWARD: {**held, GRADIENTS: backward},
            END: {**held, GRADIENTS: end},
            EMBEDDING: {**held, GRADIENTS: end},
            COLLECT: {**held, GRADIENTS: collect},
            UPDATE: {
                **held,
                GRADIENTS: again or summed,
                OPTIMIZER: held[OPTIMIZER] + max(made, summed if again else 0),
            },
            EVALUATION: held,
            SAVE: held,
        },
        host=on_host(workload),
        traffic=(
            Traffic(
                operation="all_reduce",
                group=tuple(range(replicas)),
                waited=False,
                times=max(1, round(count * own / BUCKET)),
                bytes=count * reduced,
            ),
        )
        if sends and count
        else (),
        other_bytes=step_bytes(workload, count, footprint.optimizer),
    )


def _in_replica(trained: TrainedPlaces, size: int, own: int, reduced: int, sums: int) -> int:
    """Bytes of gradients under DDP beside its buckets, where backward has so many.

    A micro-batch that is not the last has gradients of its own. In the last one
    `SummedOverRanks._reduce` makes the sum of a bucket once all of it is there, in place of the sum
    before.
    """
    if sums:
        return sums + size * own
    if reduced == own:
        return 0
    done = at = 0
    for parameter in trained.in_backward():
        at += parameter.numel()
        if at > size:
            return done * reduced
        if (at - done) * own >= (BUCKET if done else FIRST_BUCKET):
            done = at
    return size * reduced


def _converted(parameters: tuple[nn.Parameter, ...], own: int, reduced: int, sums: int) -> int:
    """The most at once while `LocalGradients.collect` converts gradients one after another."""
    if sums or own == reduced:
        return sums + numbers_of(parameters) * own
    waiting, most, done = numbers_of(parameters) * own, 0, 0
    for parameter in parameters:
        done += parameter.numel() * reduced
        most = max(most, waiting + done)
        waiting -= parameter.numel() * own
    return most


def step_bytes(workload: Workload, count: int, state: int, *, masters: bool = True) -> float:
    """What a rank reads and writes in a step of so many trained numbers beside the model.

    Gradients are added to their sums, their norm is taken, they are scaled, and the optimizer
    reads them, and reads and writes masters and state; weights get the masters' values.

    Args:
        state: bytes of the optimizer's state.
        masters: whether they are others than the weights.
    """
    precision = workload.precision
    own, reduced, master = (
        item_bytes(name)
        for name in (precision.param_dtype, precision.reduce_dtype, precision.master_dtype)
    )
    added = workload.accumulation * (own + 2 * reduced)
    update = (1 + 2 + 1 + 2) * master + (own + master if masters else 0)
    return float(count * (added + update) + 2 * state)
