"""The loss made in the output layer under ZeRO-3: equal, and its weight gathered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import Backend
from anygauge.interface.strategy import BuildContext
from anygauge.kernels.install import ModelKernels
from anygauge.kernels.loss import logits_rule, model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.strategies.single import Single
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.testing.bisect import CollectiveBytes
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from anygauge_kernels.lora import addmm
from tests.helpers.build import (
    batch_of,
    build_context,
    model_factory,
    on_one_rank,
    rank_of_world,
)
from tests.helpers.ranks import on_ranks
from tests.strategies.test_collectives_count import CONFIG

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
WEIGHT = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]

USUAL = (
    "lora, nothing kept",
    "lora on the output layer",
    "all weights, tied, no recomputation",
    "all weights, capped",
)
OTHERS = tuple(case for case in CASES if case not in USUAL)
EVERY = [*USUAL, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]


def compared(backend: Backend, cases: list[str]) -> dict[str, Any]:
    """By case: losses, norms and weights with the loss made in the output layer, and gathers.

    Every rank also trains the whole batch by itself with all logits held, and both ranks do so
    under ZeRO-3; what is gathered in the last step is counted.
    """
    rank, world = rank_of_world()
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
                factory=bare.having("eager", kernels), backend=backend, micro_batch=2
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
            for step in range(STEPS):
                with CollectiveBytes() as counter:
                    (own,) = engine.run_step([batches[rank]], model_loss, tokens).loss_sums
                (total,) = backend.collectives.sum_on_host([float(own)])
                norm = float(engine.update(1e-2, 1.0).grad_norm)
                if way == "held":
                    whole = alone.run_step(batches, model_loss, tokens).loss_sums
                    found["loss"].append([float(sum(whole))])
                    found["norm"].append([float(alone.update(1e-2, 1.0).grad_norm)])
                found["loss"][step].append(total)
                found["norm"][step].append(norm)
            found["gathered"][way] = counter.bytes["all_gather"]
            exported = engine.export_trained()
            if way == "fused" and rank == 0:
                expected = alone.export_trained()
                assert exported.keys() == expected.keys()
                apart = torch.cat([(exported[k] - expected[k]).flatten() for k in expected])
                found["difference"] = float(apart.abs().mean())
            engine.close()
        results[name] = found
    return results


Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What a case gave; the usual ones are run at once, and so are the others."""
    found: dict[str, Any] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in found:
            found.update(on_ranks(compared, USUAL if case in USUAL else OTHERS, world=2)[0])
        result: dict[str, Any] = found[case]
        return result

    return of


@pytest.mark.parametrize("case", EVERY)
def test_losses_gradients_and_weights_are_those_of_logits_in_one_process(
    results: Results, case: str
) -> None:
    found = results(case)
    for alone, held, fused in (*found["loss"], *found["norm"]):
        assert held == pytest.approx(alone, rel=1e-4)
        assert fused == pytest.approx(alone, rel=1e-4)
    # Adam's first steps are of the rate's size, whatever the gradient's: 1e-2, twice. Where a
    # gradient is next to nothing, its sign is rounding's; on average it is not.
    assert found["difference"] < 1e-5


def test_a_frozen_output_layer_is_gathered_once(results: Results) -> None:
    gathered = results("lora, nothing kept")["gathered"]
    # With logits, once for the forward and once for the backward.
    assert gathered["held"] - gathered["fused"] == WEIGHT


@pytest.mark.parametrize("case", EVERY)
def test_no_output_layer_is_gathered_more_often_than_with_logits(
    results: Results, case: str
) -> None:
    gathered = results(case)["gathered"]
    assert 0 < gathered["fused"] <= gathered["held"]
