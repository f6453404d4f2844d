"""One rank that steps engines and counts what each hands to collectives, beside its footprint.

``python -m tests.strategies.footprint_rank OUTPUT CASES``: a JSON list of
``[strategy's name, options, LoRA, recomputed]``; all cases run in one process group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection, ModelSection, OptimizerSection
from anygauge.interface import Precision
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.registry.factories import load_options
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import batch_of, build_context
from tests.helpers.collective_bytes import CollectiveBytes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROWS, LENGTH, ACCUMULATION, STEPS = 2, 16, 2, 3


def main(output: Path, cases: list[list[Any]]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    registry = Registry.load()
    backend = registry.create_backend("cpu")
    device = backend.open(rank)
    meet = os.environ["RENDEZVOUS"]
    backend.collectives.open(
        rendezvous=meet, rank=rank, world_size=world, timeout_s=120, device=device
    )
    found = [counted(registry, backend, rank, world, *case) for case in cases]
    if rank == 0:
        output.write_text(json.dumps(found))
    backend.collectives.close()


def counted(
    registry: Registry, backend: Any, rank: int, world: int,
    name: str, fields: dict[str, Any], lora: bool, recomputed: bool,
) -> dict[str, Any]:  # fmt: skip
    provided = registry.find_strategy(name)
    kind = load_options(provided)
    options = None if kind is None else kind(**fields)
    strategy = registry.strategy(name)(options)
    context = build_context(
        factory=CausalModelFactory(
            ModelSection(config=CONFIG, tokenizer="none"),
            AdapterSection(r=4) if lora else None,
            attention="sdpa",
            dtype=torch.float32,
            seed=0,
            gradient_checkpointing=recomputed,
        ),
        optimizer=optimizer_factory(OptimizerSection()),
        precision=Precision(param_dtype="float32", reduce_dtype="float32"),
        backend=backend,
        rank=rank,
        world_size=world,
        micro_batch=ROWS,
        share=provided.spec.share(options, rank, world),
        accumulation=ACCUMULATION,
        length=LENGTH,
    )
    skeleton = context.factory.adapt(context.factory.skeleton())
    footprint = strategy.footprint(dataclasses.replace(context.workload, skeleton=skeleton))
    engine = strategy.build(context)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(1, 255, (ACCUMULATION, ROWS, LENGTH), generator=generator)
        counter = CollectiveBytes()
        with counter:
            engine.run_step([batch_of(each) for each in ids], model_loss, 100)
            engine.update(1e-3, 1.0)
        last = counter
    engine.close()
    return {
        "calls": last.calls,
        "bytes": last.bytes,
        "footprint": dataclasses.asdict(footprint),
        "parameters": sum(p.numel() for p in skeleton.parameters()),
        "trained": sum(p.numel() for p in skeleton.parameters() if p.requires_grad),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
