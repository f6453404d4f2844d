"""One of several ranks: each kind of adapter under ZeRO-3 and in one process, step by step.

Run as a script: ``adapter_rank.py OUTPUT``. Every rank also trains the whole batch by itself, with
the `single` strategy; losses, gradient norms and adapters of both are written as JSON by rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection
from anygauge.config.sections import AdapterGroup
from anygauge.kernels.loss import model_loss
from anygauge.models.export import adapter_state
from anygauge.registry import Registry
from anygauge.strategies.single import Single
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.training.setup import trained_shapes
from tests.helpers.build import batch_of, build_context, model_factory, on_one_rank, open_rank
from tests.helpers.runs import TINY
from tests.models.test_adapter_kinds import GPT2

STEPS = 2
NOTHING_RESIDENT = ZeroOptions(options={"stage3_param_persistence_threshold": 0})
"""Otherwise DeepSpeed keeps weights of a tiny model whole: nothing would be gathered."""

EVERYTHING: dict[str, Any] = {"r": 4, "dora": True, "targets": ".*"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Zero, bool]] = {
    "dora": (TINY, EVERYTHING, Zero(NOTHING_RESIDENT), True),
    "dora, factors resident": (TINY, EVERYTHING, Zero(ZeroOptions(stage=3)), True),
    "dora, no recomputation": (TINY, EVERYTHING, Zero(NOTHING_RESIDENT), False),
    "dora, stage 2": (TINY, EVERYTHING, Zero(ZeroOptions(stage=2)), True),
    "dora, dropout": (TINY, {**EVERYTHING, "dropout": 0.2}, Zero(NOTHING_RESIDENT), True),
    "dora, biases, conv1d, tied": (GPT2, EVERYTHING, Zero(NOTHING_RESIDENT), True),
    "rslora in groups": (
        TINY,
        {
            "r": 4,
            "rslora": True,
            "targets": ["q_proj"],
            "groups": [AdapterGroup(targets=["embed_tokens", "lm_head"], r=2, alpha=128)],
        },
        Zero(NOTHING_RESIDENT),
        True,
    ),
}


def main(output: Path) -> None:
    backend = Registry.load().create_backend("cpu")
    rank, world = open_rank(backend)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (world, 2, 12), generator=generator)
    batches = [batch_of(part) for part in ids]
    tokens = world * 2 * 11
    results: dict[str, Any] = {}
    for name, (config, adapter, zero, recompute) in CASES.items():
        context = build_context(
            factory=model_factory(
                {**config, **NO_DROPOUT},
                AdapterSection(**adapter),
                attention="eager",
                gradient_checkpointing=recompute,
            ),
            backend=backend,
            rank=rank,
            world_size=world,
            micro_batch=2,
            max_norm=1.0,
        )
        one = Single().build(on_one_rank(context))
        many = zero.build(context)
        found: dict[str, list[list[float]]] = {"loss": [], "norm": []}
        for step in range(STEPS):
            whole: list[torch.Tensor] = []
            for part, batch in enumerate(batches):
                torch.manual_seed(1000 * step + part)  # of dropout, apart on each rank
                whole += one.run_step([batch], model_loss, tokens).loss_sums
            torch.manual_seed(1000 * step + rank)
            own = many.run_step([batches[rank]], model_loss, tokens).loss_sums
            (total,) = backend.collectives.sum_on_host([float(own[0])])
            found["loss"].append([float(sum(whole)), total])
            norms = [float(engine.update(1e-2, 1.0).grad_norm) for engine in (one, many)]
            found["norm"].append(norms)
        trained = one.export_trained(), many.export_trained()
        if rank == 0:
            states = (
                adapter_state(one.model, trained[0], trained_shapes(one)),
                adapter_state(many.model, trained[1], trained_shapes(many)),
            )
            assert states[0].keys() == states[1].keys()
            results[name] = {
                **found,
                # Adam divides by a gradient's size: where that is next to nothing, noise counts.
                "adapter": max(
                    ((states[1][key] - tensor).abs().mean() / tensor.abs().mean()).item()
                    for key, tensor in states[0].items()
                ),
                "shards": sorted(
                    {p.numel() for p in many.model.parameters() if not p.requires_grad}
                ),
            }
        many.close()
    backend.close()
    if rank == 0:
        output.write_text(json.dumps(results))


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
"""GPT-2's own; Llama has none, and takes no notice of the fields."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
