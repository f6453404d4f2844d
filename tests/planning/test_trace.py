"""What a step computes and keeps, by its trace: each count is the one that is made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.interface.estimate import ACTIVATIONS, LOGITS
from anygauge.planning.forecast import RunMemory
from tests.helpers.runs import TINY
from tests.planning.standins import REGISTRY, planned, run

WIDE, INNER, WORDS, LAYERS, LENGTH, ROWS = 128, 384, 2000, 2, 512, 4
LAYER = 2 * WIDE * WIDE + 2 * WIDE * WIDE // 2 + 3 * WIDE * INNER
"""Numbers in a layer's matrices."""
TOKENS = ROWS * LENGTH
FORWARD = 2 * TOKENS * (LAYERS * LAYER + WIDE * WORDS)
SCORES = LAYERS * TOKENS * LENGTH * WIDE
"""Of one product of attention where each token sees half of the others."""
CONFIG = {**TINY, "hidden_size": WIDE, "intermediate_size": INNER, "vocab_size": WORDS}
USUAL: dict[str, Any] = {
    "model": {"config": {**CONFIG, "max_position_embeddings": LENGTH}},
    "data": {"max_length": LENGTH},
    "train": {"global_batch_size": ROWS, "micro_batch_size": 2, "gradient_checkpointing": False},
    "kernels": {"linear_cross_entropy": "reference"},
    "precision": {"param_dtype": "bfloat16"},
    "strategy": {"name": "single"},
    "launch": {"devices": 1},
}
RECOMPUTED = {"train": {"gradient_checkpointing": True}}


def traced(**sections: Any) -> RunMemory:
    return planned(run(USUAL, sections))


PLAIN = 3 * FORWARD + 7 * SCORES
"""Forward has two products of attention, backward five: scores are computed again."""
DOWN = 2 * TOKENS * LAYERS * WIDE * INNER
"""The last product of layers: recomputation ends before it."""


@pytest.mark.parametrize(
    ("sections", "dtype", "flops"),
    [
        ({}, "bfloat16", PLAIN),
        ({"precision": {"param_dtype": "float32"}}, "float32", PLAIN),
        ({"train": {"micro_batch_size": 1}}, "bfloat16", PLAIN),
        # Kernels do not pass by what the mask of packed rows hides.
        ({"data": {"packing": True}}, "bfloat16", PLAIN + 7 * SCORES),
        # Scores that are held are all computed, and not again.
        ({"model": {"attention": "eager"}}, "bfloat16", PLAIN + 5 * SCORES),
        (RECOMPUTED, "bfloat16", PLAIN + 2 * TOKENS * LAYERS * LAYER + 2 * SCORES - DOWN),
    ],
)
def test_products_of_a_step(sections: dict[str, Any], dtype: str, flops: float) -> None:
    found = traced(**sections)
    # Earlier releases of transformers multiply positions by frequencies in float32.
    counted = {name: number for name, number in found.work.flops.items() if number > 1e5}
    assert counted == {dtype: pytest.approx(flops, rel=0.01)}


def test_layers_keep_what_backward_needs_of_them() -> None:
    hidden = 2 * LENGTH * WIDE * 2  # of a micro-batch, in bytes
    assert traced(**RECOMPUTED).per_layer == hidden
    kept, scores = traced(), 2 * 4 * LENGTH * LENGTH * 2
    assert 20 * hidden < kept.per_layer < 30 * hidden, "no scores"
    assert traced(model={"attention": "eager"}).per_layer > kept.per_layer + 2 * scores
    half = traced(train={"gradient_checkpointing": {"every": 2}}).per_layer
    assert half == (kept.per_layer + hidden) // 2
    assert traced() == kept, "two plans of a run are the same"


@pytest.mark.parametrize(("codes", "size"), [("nf4", 0.5 + 4 / 64), ("int8", 1)])
def test_a_quantized_base_has_its_codes(codes: str, size: float) -> None:
    whole, coded = (
        traced(adapter={"r": 8}, model=model).device["forward"].kinds["weights"]
        for model in ({}, {"quantize": codes})
    )
    assert whole - coded == pytest.approx(LAYERS * LAYER * (2 - size), rel=0.03)


@pytest.mark.parametrize(
    ("sections", "phase", "bytes_each"),
    [
        # In 16 bits, which are there until backward is done; in 32 bits, their log_softmax, and
        # the gradient of that.
        ({}, "loss", 2 + 4 + 4 + 4),
        # Stages of a pipeline do not hold what the model returns.
        ({"strategy": {"name": "ddp", "pp": 2}, "launch": {"devices": 2}}, "loss", 4 + 4 + 4),
        # In 16 bits and in 32, and what logsumexp copies.
        ({"kernels": {"linear_cross_entropy": "chunked"}}, "evaluation", 2 + 4 + 4),
    ],
)
def test_logits_of_the_loss(sections: dict[str, Any], phase: str, bytes_each: int) -> None:
    kinds = traced(**sections).device[phase].kinds
    assert kinds[LOGITS] == pytest.approx(bytes_each * 2 * LENGTH * WORDS, rel=0.02)


def test_a_graph_compiler_has_a_part_of_what_layers_and_the_loss_have_at_once() -> None:
    found, plain = planned(run(USUAL), "hpu"), traced().device
    held = REGISTRY.create_backend("hpu").graph.held
    assert held is not None and found.compiled == held.source
    kept = plain["loss"].kinds[ACTIVATIONS]
    for phase, kind, stays in (("forward", ACTIVATIONS, kept), ("loss", LOGITS, 0)):
        assert found.uncompiled[phase] == plain[phase]
        one, other = (of[phase].kinds[kind] - stays for of in (found.device, plain))
        assert one == pytest.approx(held.share * other, rel=0.001), phase
