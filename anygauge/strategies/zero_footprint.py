"""What a rank holds and sends under ZeRO, by DeepSpeed's own rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from anygauge.interface.strategy import Footprint, Workload
from anygauge.strategies.footprint import (
    item_bytes,
    item_size,
    scale_bytes,
    trained_numbers,
    whole_model,
)


def zero_footprint(stage: int, resident: int, workload: Workload) -> Footprint:
    """See `Strategy.footprint`.

    Args:
        resident: stage 3: most numbers of a parameter that stays whole on every rank.
    """
    model, ranks, precision = workload.skeleton, workload.world_size, workload.precision
    whole = whole_model(workload)
    assert model is not None
    trained = trained_numbers(model)
    part = -(-trained // ranks) if stage else trained
    held = _held(model, ranks, resident, precision.param_dtype) + scale_bytes(model)
    return dataclasses.replace(
        whole,
        weights=held if stage == 3 else whole.weights,
        gradients=(part if stage >= 2 else trained) * item_bytes(precision.reduce_dtype),
        # Stages above 0 keep a copy even of weights that have the masters' type.
        masters=part * item_bytes(precision.master_dtype) if stage else whole.masters,
        optimizer=round(part * workload.state_bytes),
        sent=_sent(stage, resident, workload, model, trained),
    )


def _held(model: nn.Module, ranks: int, resident: int, dtype: str) -> int:
    """Bytes that a rank holds of a model of which each parameter is divided by itself."""
    return sum(
        (-(-p.numel() // ranks) + (p.numel() if p.numel() <= resident else 0)) * item_size(p, dtype)
        for p in model.parameters()
    )


def _sent(
    stage: int, resident: int, workload: Workload, model: nn.Module, trained: int
) -> Mapping[str, int]:
    """Bytes by collective; stage 3 gathers twice at most, and this says twice."""
    param = item_bytes(workload.precision.param_dtype)
    gradients = trained * item_bytes(workload.precision.reduce_dtype)
    turns = workload.accumulation
    if stage == 0:
        return {"all_reduce": gradients}
    if stage < 3:
        # Stage 2 keeps a part of the gradients alone, so it reduces after each micro-batch.
        times = turns if stage == 2 else 1
        return {"all_reduce": times * gradients, "all_gather": trained * param}
    dtype = workload.precision.param_dtype
    gathered = sum(
        (1 if p.numel() <= resident else 2 * turns) * p.numel() * item_size(p, dtype)
        for p in model.parameters()
    )
    return {"reduce_scatter": turns * gradients, "all_gather": gathered}
