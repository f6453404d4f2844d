"""What a strategy is given to build and step with, for tests that do without a run file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import OptimizerSection
from anygauge.interface import (
    Activations,
    Backend,
    BuildContext,
    DeviceBatch,
    ModelFactory,
    OptimizerFactory,
    Precision,
    Share,
    Strategy,
    Workload,
)
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.registry.specs import load_factory, load_options
from anygauge.strategies.shared.materialize import materialize
from anygauge.training.build_strategy import adapter_kind
from anygauge.training.optimizer import optimizer_factory

FLOAT32 = Precision(param_dtype="float32", reduce_dtype="float32")


def open_rank(backend: Backend, *, alone: bool = True) -> tuple[int, int]:
    """Open the device of a rank of `run_ranks`, and its group: its place, and how many there are.

    Args:
        alone: a rank without others has a process group, too.
    """
    rank, world = rank_of_world()
    device = backend.open(rank)
    if alone or world > 1:
        backend.collectives.open(
            rendezvous=os.environ["RENDEZVOUS"],
            rank=rank,
            world_size=world,
            timeout_s=120,
            device=device,
        )
    return rank, world


def rank_of_world() -> tuple[int, int]:
    """Of this process, which `run_ranks` started."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def optimizer_section(**fields: Any) -> OptimizerSection:
    """The section ``train.optimizer`` of a run file; fields of None are left out."""
    return OptimizerSection.model_validate({k: v for k, v in fields.items() if v is not None})


def strategy_of(
    name: str, options: Mapping[str, Any], rank: int, world: int
) -> tuple[Strategy, Share]:
    """An installed strategy with its options, and what a rank reads under it."""
    registry = Registry.load()
    provided = registry.find_strategy(name)
    chosen = load_options(provided)(**options)
    return load_factory(provided)(chosen), provided.spec.share(chosen, rank, world)


def a_workload(backend: Backend, precision: Precision, **changes: Any) -> Workload:
    """Of the first of two ranks, without a model."""
    fields: dict[str, Any] = {
        "skeleton": None,
        "world_size": 2,
        "share": Share(0, 2),
        "micro_batch": 2,
        "accumulation": 1,
        "length": 32,
        "max_norm": 1.0,
        "activations": Activations(every=1),
    }
    return Workload(backend=backend, precision=precision, **(fields | changes))


def model_factory(
    model: ModelSection | Mapping[str, Any] | Path,
    adapter: AdapterSection | None = None,
    **changes: Any,
) -> CausalModelFactory:
    """Of a model's folder or sizes: in float32, its draws from seed 0, nothing computed again."""
    if isinstance(model, Path):
        model = ModelSection(name=str(model))
    elif not isinstance(model, ModelSection):
        model = ModelSection(config=dict(model), tokenizer="none")
    fields = {"dtype": torch.float32, "seed": 0, "gradient_checkpointing": False, **changes}
    return CausalModelFactory(model, adapter, **fields)


def on_host(factory: CausalModelFactory, dtype: torch.dtype = torch.float32) -> Any:
    """The model, without its adapter, with its weights in the host's memory."""
    model = factory.skeleton()
    materialize(model, factory, device=torch.device("cpu"), dtype=dtype)
    return model


def build_context(
    *,
    factory: ModelFactory,
    optimizer: OptimizerFactory | None = None,
    precision: Precision = FLOAT32,
    backend: Backend,
    rank: int | None = None,
    world_size: int | None = None,
    micro_batch: int = 1,
    max_norm: float = 1.0,
    share: Share | None = None,
    accumulation: int = 1,
    length: int = 32,
    offload: bool = False,
    **more: Any,
) -> BuildContext:
    """Of a rank that reads rows of its own, unless `share` says otherwise.

    Args:
        optimizer: None: what a run file gets that names none.
        rank, world_size: None: those of this process, which `run_ranks` started.
        offload: of activations.
    """
    if rank is None or world_size is None:
        rank, world_size = rank_of_world()
    return BuildContext(
        factory=factory,
        optimizer=optimizer or optimizer_factory(optimizer_section()),
        workload=a_workload(
            backend,
            precision,
            world_size=world_size,
            rank=rank,
            share=share or Share(rank, world_size),
            micro_batch=micro_batch,
            accumulation=accumulation,
            length=length,
            max_norm=max_norm,
            activations=dataclasses.replace(factory.activations, offload=offload),
            adapter=adapter_kind(getattr(factory, "adapter", None)),
        ),
        **{"clip_grad_norm": nn.utils.clip_grad_norm_, **more},
    )


def shift_labels(labels: Tensor) -> Tensor:
    """What each position is to predict: the label of the next one, and -100 at the end."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def batch_of(ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> DeviceBatch:
    """A micro-batch of (B, T) tokens, all of them loss tokens unless `labels` says otherwise."""
    targets = shift_labels(ids if labels is None else labels)
    return {"input_ids": ids, "shift_labels": targets, "use_cache": False, **inputs}
