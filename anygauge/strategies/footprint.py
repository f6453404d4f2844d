"""What a rank holds and sends, in bytes, counted from a model on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
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
    Footprint,
    MemoryEstimate,
    Strategy,
    Traffic,
    Workload,
)
from anygauge.strategies.common import torch_dtype


def item_bytes(name: str) -> int:
    """Bytes of one number of a type of torch's, by its name."""
    return torch.empty((), dtype=torch_dtype(name), device="meta").element_size()


def numbers(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers parameters hold; a tied one is counted once."""
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def item_size(parameter: nn.Parameter, dtype: str) -> int:
    """Bytes of one of its numbers in a model of a type; codes stay what they are."""
    return item_bytes(dtype) if parameter.is_floating_point() else parameter.element_size()


def weight_bytes(parameters: Iterable[nn.Parameter], dtype: str) -> int:
    """Bytes of parameters in a type; a tied one is counted once."""
    return sum(p.numel() * item_size(p, dtype) for p in {id(p): p for p in parameters}.values())


def scale_bytes(model: nn.Module) -> int:
    """Bytes of what belongs to codes, which every rank has whole: buffers that come with values."""
    return sum(b.numel() * b.element_size() for b in model.buffers() if b.is_meta)


def trained_numbers(model: nn.Module) -> int:
    """How many numbers of a model are trained."""
    return numbers(p for p in model.parameters() if p.requires_grad)


def rows_of(parameter: nn.Parameter, ranks: int) -> int:
    """Numbers in the first rank's rows of a parameter."""
    return -(-parameter.shape[0] // ranks) * (parameter.numel() // parameter.shape[0])


def update_made(workload: Workload, sizes: Iterable[int]) -> int:
    """Bytes that an update makes on a rank that holds trained tensors of such sizes.

    As `anygauge.training.undo.parts` takes them: some at once, or one that is larger.
    """
    most = at_once = 0
    for size in sizes:
        if at_once + size > workload.updated_at_once > 0:
            at_once = 0
        at_once += size
        most = max(most, at_once)
    return round(most * workload.update_bytes)


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The bytes of two sets of collectives together."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def whole_model(workload: Workload) -> Footprint:
    """Of a rank that holds the whole model and sends nothing."""
    assert workload.skeleton is not None, "a footprint is counted from the model"
    precision = workload.precision
    trained = trained_numbers(workload.skeleton)
    own_masters = precision.master_dtype != precision.param_dtype
    return Footprint(
        weights=weight_bytes(workload.skeleton.parameters(), precision.param_dtype)
        + scale_bytes(workload.skeleton),
        gradients=trained * item_bytes(precision.reduce_dtype),
        masters=trained * item_bytes(precision.master_dtype) if own_masters else 0,
        optimizer=round(trained * workload.state_bytes),
        sent={},
    )


def memory_of(strategy: Strategy, workload: Workload) -> MemoryEstimate:
    """What a strategy's planner says, or what its footprint implies where it has none."""
    planner = getattr(strategy, "planner", None)
    if planner is not None:
        found: MemoryEstimate = planner.memory(workload)
        return found
    return of_footprint(strategy.footprint(workload), workload)


def of_footprint(
    footprint: Footprint, workload: Workload, *, backward: int | None = None
) -> MemoryEstimate:
    """Of an engine that holds all that its footprint says on the device, and has gradients whole.

    Args:
        backward: bytes of gradients beside their sums while backward makes them; None: of all
            trained weights, in the compute type.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "an estimate is made from the model"
    trained = trained_numbers(model)
    if backward is None:
        backward = trained * item_bytes(precision.param_dtype)
    held = {WEIGHTS: footprint.weights, OPTIMIZER: footprint.masters + footprint.optimizer}
    sums = footprint.gradients if workload.accumulation > 1 else 0
    step = {**held, GRADIENTS: sums}
    largest = max((p.numel() for p in model.parameters() if p.requires_grad), default=0)
    whole = tuple(range(workload.world_size))
    return MemoryEstimate(
        device={
            LOAD: {WEIGHTS: footprint.weights, OPTIMIZER: footprint.masters},
            BEGIN: step,
            FORWARD: step,
            LOSS: step,
            BACKWARD: step,
            END: {**held, GRADIENTS: max(footprint.gradients, sums + backward)},
            UPDATE: {
                WEIGHTS: footprint.weights,
                GRADIENTS: footprint.gradients,
                OPTIMIZER: held[OPTIMIZER]
                + update_made(workload, (p.numel() for p in model.parameters() if p.requires_grad)),
            },
            EVALUATION: held,
            SAVE: {**held, SAVED: largest * item_bytes(precision.master_dtype)},
        },
        traffic=tuple(
            Traffic(operation=name, group=whole, waited=False, times=1, bytes=size)
            for name, size in footprint.sent.items()
        ),
        other_bytes=2.0 * (footprint.masters + footprint.optimizer + footprint.gradients),
    )
