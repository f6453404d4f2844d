"""One rank whose model makes its loss in its output layer, under ZeRO-3.

Run as a script: ``loss_rank.py OUTPUT CASE...``. Every rank also trains the whole batch by itself
with all logits held, and both ranks do so under ZeRO-3; what is gathered in the last step is
counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface.strategy import BuildContext
from anygauge.kernels.install import ModelKernels
from anygauge.kernels.loss import logits_rule, model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.strategies.single import Single
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from anygauge_kernels.lora import addmm
from tests.helpers.build import batch_of, build_context, model_factory, on_one_rank, open_rank
from tests.strategies.count_rank import CONFIG, CountedCalls

STEPS = 2
TIED = {**CONFIG, "tie_word_embeddings": True}
CAPPED = {**CONFIG, "model_type": "gemma2", "head_dim": 64, "final_logit_softcapping": 5.0}
FORGETFUL = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""Otherwise DeepSpeed keeps the output layer from its forward to its backward: both are near."""
ON_HEAD = {"r": 4, "targets": ["q_proj", "lm_head"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "lora": (CONFIG, {"r": 4}, True),
    "lora, no recomputation": (CONFIG, {"r": 4}, False),
    "lora, nothing kept": (CONFIG, {"r": 4}, True),
    "lora, tied": (TIED, {"r": 4}, True),
    "lora on the output layer": (CONFIG, ON_HEAD, True),
    "all weights": (CONFIG, None, True),
    "all weights, tied, no recomputation": (TIED, None, False),
    "all weights, capped": (CAPPED, None, True),
    "lora on the output layer, capped": (
        {**CAPPED, "tie_word_embeddings": False},
        ON_HEAD,
        True,
    ),
}


def main(output: Path, *cases: str) -> None:
    counters = CountedCalls()
    counters.install()
    backend = Registry.load().create_backend("cpu")
    rank, world = open_rank(backend)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CONFIG["vocab_size"], (world, 2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :, :4] = -100
    batches = [batch_of(i, t) for i, t in zip(ids, labels, strict=True)]
    tokens = int((labels[:, :, 1:] != -100).sum())
    results: dict[str, Any] = {}
    for name in cases:
        config, adapter, recompute = CASES[name]
        bare = model_factory(
            config,
            AdapterSection(**adapter) if adapter else None,
            attention="eager",
            gradient_checkpointing=recompute,
        )
        looked_at = bare.having("eager", None)
        rule, served = logits_rule(looked_at.adapt(looked_at.skeleton()))
        assert served, served

        def context(kernels: ModelKernels, bare: CausalModelFactory = bare) -> BuildContext:
            return build_context(
                factory=bare.having("eager", kernels),
                backend=backend,
                rank=rank,
                world_size=world,
                micro_batch=2,
                max_norm=1.0,
            )

        def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
            return linear_cross_entropy(*args, **kwargs, chunk_bytes=4 * 2048 * 5)

        options = FORGETFUL if "nothing kept" in name else {}
        zero = Zero(ZeroOptions(options={"stage3_param_persistence_threshold": 0, **options}))
        alone = Single().build(on_one_rank(context(ModelKernels())))
        found: dict[str, Any] = {"loss": [], "norm": [], "gathered": {}}
        put_in = ModelKernels(loss=rule.bound(kernel), lora=addmm())
        for way, kernels in (("held", ModelKernels()), ("fused", put_in)):
            engine = zero.build(context(kernels))
            counters.elements.clear()
            for step in range(STEPS):
                counters.on = step == STEPS - 1
                (own,) = engine.run_step([batches[rank]], model_loss, tokens).loss_sums
                counters.on = False
                (total,) = backend.collectives.sum_on_host([float(own)])
                norm = float(engine.update(1e-2, 1.0).grad_norm)
                if way == "held":
                    whole = alone.run_step(batches, model_loss, tokens).loss_sums
                    found["loss"].append([float(sum(whole))])
                    found["norm"].append([float(alone.update(1e-2, 1.0).grad_norm)])
                found["loss"][step].append(total)
                found["norm"][step].append(norm)
            found["gathered"][way] = sum(n for k, n in counters.elements.items() if "gather" in k)
            exported = engine.export_trained()
            if way == "fused" and rank == 0:
                expected = alone.export_trained()
                assert exported.keys() == expected.keys()
                apart = torch.cat([(exported[k] - expected[k]).flatten() for k in expected])
                found["difference"] = float(apart.abs().mean())
            engine.close()
        results[name] = found
    if rank == 0:
        output.write_text(json.dumps(results))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
