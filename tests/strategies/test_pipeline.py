"""Pipelines: where they are cut, other architectures, widths that change, and what is refused."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from anygauge.interface import UnsupportedError
from anygauge.strategies.degrees import Degrees
from anygauge.strategies.pipeline_cut import cut, rank_of_stage
from anygauge.strategies.pipeline_stage import PipelineModel
from tests.helpers.build import model_factory
from tests.strategies.matrix import ALL, SGD, CaseGroups
from tests.strategies.parity_rank import ParityCase
from tests.strategies.test_matrix import is_the_references, sends_what_it_says
from tests.strategies.test_tensor import MODELS

SCALES_EMBEDDINGS_ITSELF = int(version("transformers").split(".")[0]) < 5
"""Gemma's decoder, before transformers 5: every stage would do it again."""
CASES = [
    ParityCase(
        strategy="ddp",
        options={"pp": 2},
        model=MODELS[name],
        attention="eager",
        recomputed=bool(weights),
        **SGD,
        **weights,
    )
    for name in ("qwen3", "gpt_neox", "gptj", *(() if SCALES_EMBEDDINGS_ITSELF else ("gemma2",)))
    for weights in ({}, ALL)
]
"""Qwen3's and Gemma's embedding is the output layer, too: two stages have it."""


USUAL = ("qwen3" if SCALES_EMBEDDINGS_ITSELF else "gemma2", "gptj")
FEW = [case for case in CASES if case.model["model_type"] in USUAL]
MANY = [case for case in CASES if case not in FEW]


GROUPS = CaseGroups(few=(2, FEW), many=(2, MANY))


@pytest.mark.parametrize(("group", "case"), GROUPS.cases("many"))
def test_architectures(group: str, case: ParityCase) -> None:
    found, wanted = GROUPS.pair(group, case)
    is_the_references(case, found, wanted)
    sends_what_it_says(case, found)
    assert found["held"] == found["footprint"]["weights"]


@pytest.mark.parametrize(
    ("costs", "count", "last", "ends"),
    [
        ([1] * 4, 2, 0, [2, 4]),
        ([1] * 5, 2, 0, [2, 5]),
        ([1] * 4, 2, 2, [3, 4]),
        ([1] * 4, 2, 100, [3, 4]),
        ([5, 1, 1, 1], 2, 0, [1, 4]),
        ([1, 1, 1, 5], 4, 0, [1, 2, 3, 4]),
    ],
)
def test_the_costliest_part_costs_least(
    costs: list[int], count: int, last: int, ends: list[int]
) -> None:
    assert cut(costs, count, last) == ends


def test_both_ends_of_a_zero_bubble_pipeline_are_on_its_first_rank() -> None:
    there_and_back = Degrees(pp=3, schedule="zero_bubble")
    assert [rank_of_stage(n, there_and_back) for n in range(6)] == [0, 1, 2, 2, 1, 0]
    in_turn = Degrees(pp=3, schedule="interleaved")
    assert [rank_of_stage(n, in_turn) for n in range(6)] == [0, 1, 2, 0, 1, 2]


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        # It adds positions to whatever embeddings it is given: each stage would do so again.
        GPT2,
        {**MODELS["gptj"], "embd_pdrop": 0.5},
        *([MODELS["gemma2"]] if SCALES_EMBEDDINGS_ITSELF else []),
    ],
    ids=lambda config: config["model_type"],
)
def test_a_decoder_that_does_more_than_call_its_layers_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="changes its embeddings before its first layer"):
        PipelineModel(model_factory(config, attention="eager").skeleton())
