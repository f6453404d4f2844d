"""What a strategy is given to build and step with, for tests that do without a run file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anygauge.interface import Backend, Precision, Share
from anygauge.interface.strategy import (
    BuildContext,
    DeviceBatch,
    ModelFactory,
    OptimizerFactory,
    Workload,
)
from anygauge.models.inputs import shift_labels


def build_context(
    *,
    factory: ModelFactory,
    optimizer: OptimizerFactory,
    precision: Precision,
    backend: Backend,
    rank: int,
    world_size: int,
    micro_batch: int,
    max_norm: float = 1.0,
    share: Share | None = None,
    accumulation: int = 1,
    length: int = 32,
    **more: Any,
) -> BuildContext:
    """Of a rank that reads rows of its own, unless `share` says otherwise."""
    return BuildContext(
        factory=factory,
        optimizer=optimizer,
        workload=Workload(
            backend=backend,
            precision=precision,
            skeleton=None,
            world_size=world_size,
            share=share or Share(rank, world_size),
            micro_batch=micro_batch,
            accumulation=accumulation,
            length=length,
            max_norm=max_norm,
            recomputes=factory.recomputes,
        ),
        rank=rank,
        **more,
    )


def batch_of(ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> DeviceBatch:
    """A micro-batch of (B, T) tokens, all of them learned unless `labels` says otherwise."""
    learned = shift_labels(ids if labels is None else labels)
    return DeviceBatch({"input_ids": ids, "shift_labels": learned, "use_cache": False, **inputs})
