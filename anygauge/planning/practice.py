"""Real steps of small models: what a host that is its ranks' device reaches in training.

A processor's rates depend on what it is given: how large products are, whether what is added lies
in its caches, on how many threads. So they are not those of large matrices, but those that explain
best how long steps of several shapes take (`anygauge.planning.explain`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from anygauge.config import parse_run
from anygauge.config.precision import resolve_precision
from anygauge.config.schema import RunFile
from anygauge.interface import Backend
from anygauge.interface.strategy import BuildContext
from anygauge.kernels.choose import kernels_of_run
from anygauge.kernels.loss import model_loss
from anygauge.kernels.plan import plan_kernels
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.counting import Counter, Seen
from anygauge.planning.run import factory_of, rows_of
from anygauge.planning.work import Work
from anygauge.registry import Registry
from anygauge.training.optimizer import optimizer_factory
from anygauge.training.strategy import create_strategy, workload_of

STEPS = 7
"""Of each model, whose median counts; two before them are not timed."""
LORA: Mapping[str, Any] = {"adapter": {"r": 8}}
ALL: Mapping[str, Any] = {"adapter": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of a model, and of what it is given in a step."""

    width: int
    layers: int
    length: int
    rows: int = 1
    words: int = 2048


TINY = Shape(width=64, layers=4, length=16, words=128)
SHAPES = (
    Shape(width=256, layers=4, length=256, rows=2),
    Shape(width=512, layers=4, length=128, rows=2),
    Shape(width=768, layers=2, length=256),
    Shape(width=384, layers=2, length=512),
    Shape(width=256, layers=2, length=1536),
    Shape(width=384, layers=1, length=256, words=16_384),
)
"""None is a benchmark's; together they have what models have in other parts."""


def practice(registry: Registry, kinds: list[str], ranks: int) -> Iterator[RunFile]:
    """Runs for so many ranks: each strategy that `auto` takes because there are several.

    Args:
        kinds: types to compute in; the last alone with strategies besides the fastest.
    """
    fastest, *others = _strategies(registry, ranks)
    for kind in kinds:
        for shape in (TINY, *SHAPES):
            for trained in (LORA, ALL):
                yield _run(shape, kind, ranks, fastest, trained)
    for shape in (TINY, *SHAPES[:3]):
        for trained in (LORA, ALL):
            for other in others:
                yield _run(shape, kinds[-1], ranks, other, trained)


def _strategies(registry: Registry, ranks: int) -> list[Mapping[str, Any]]:
    """Sections of run files, the fastest first."""
    forms = [(form, one.spec.name) for one in registry.strategies for form in one.spec.auto]
    forms.sort(key=lambda one: (one[0].place, one[1]))
    alone = ranks == 1
    found: list[Mapping[str, Any]] = [
        {**form.options, "name": name} for form, name in forms if form.alone == alone
    ]
    return found[:1] if alone else found


def _run(
    shape: Shape, kind: str, ranks: int, strategy: Mapping[str, Any], trained: Mapping[str, Any]
) -> RunFile:
    config = {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": 3 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.width // 64 or 1,
        "vocab_size": shape.words,
        "max_position_embeddings": 2048,
    }
    return parse_run(
        json.dumps(
            {
                "model": {"config": config, "tokenizer": "none"},
                "data": {"train": {"path": "none.jsonl"}, "max_length": shape.length},
                "strategy": strategy,
                "precision": {"param_dtype": kind},
                "train": {
                    "steps": STEPS,
                    "micro_batch_size": shape.rows,
                    "global_batch_size": shape.rows * ranks,
                    "gradient_checkpointing": False,
                },
                "launch": {"devices": ranks},
                **trained,
            }
        )
    )


def practised(
    run: RunFile, registry: Registry, backend: Backend, rank: int, world_size: int
) -> tuple[Work, float]:
    """What a step of a run is of work, and how many seconds it takes.

    Args:
        backend: open, with its collectives.
    """
    precision = resolve_precision(run.precision, backend.support)
    factory = factory_of(CausalModelFactory, run, precision)
    kernels = plan_kernels(run, backend, kernels_of_run(run, backend, registry), factory)
    workload = workload_of(run, registry, backend, precision, rank, world_size)
    engine = create_strategy(registry, run).build(
        BuildContext(
            factory=factory.having(kernels.attention.name, kernels.model),
            optimizer=optimizer_factory(run.train.optimizer, kernels.adamw),
            workload=workload,
            clip_grad_norm=kernels.clip_grad_norm,
        )
    )
    device = backend.placement.device
    rows = rows_of(run, workload, precision)

    def step() -> float:
        backend.collectives.barrier()
        began = time.perf_counter()
        engine.run_step([rows(device)], model_loss, 1)
        engine.update(1e-4, workload.max_norm)
        return time.perf_counter() - began

    step()
    step()
    counter = Counter(device.type)
    with Seen(counter):
        step()
    seconds = median(step() for _ in range(STEPS))
    engine.close()
    return counter.taken(), seconds
