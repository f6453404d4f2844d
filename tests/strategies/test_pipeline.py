"""Pipelines: where they are cut, other architectures, widths that change, and what is refused."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

import pytest
from transformers import AutoConfig

from anygauge.interface import RunFileError, StrategyRun, UnsupportedError
from anygauge.strategies.ddp_spec import check
from anygauge.strategies.degrees import Degrees, check_model, share
from anygauge.strategies.fsdp_options import FsdpOptions
from anygauge.strategies.fsdp_spec import check as check_fsdp
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


def test_ranks_of_a_pipeline_read_the_same_rows_at_one_width() -> None:
    shares = [share(Degrees(pp=2), rank, 4) for rank in range(4)]
    assert [(s.index, s.count, s.leads) for s in shares] == [
        (0, 2, True),
        (1, 2, True),
        (0, 2, False),
        (1, 2, False),
    ]
    assert len({s.random_stream for s in shares}) == 4
    assert {s.one_width for s in shares} == {64}


def a_run(options: Any, **changes: Any) -> StrategyRun:
    run = StrategyRun(options=options, world_size=2, optimizer="adamw", micro_batches=4)
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (a_run(Degrees(pp=3)), r"not a multiple of 3\. Set strategy\.pp to one of 1, 2"),
        (a_run(Degrees(pp=2, tp=2)), "tp 2 and pp 2 cannot be combined yet"),
        (a_run(Degrees(tp=2, cp=2), world_size=4), "cp 2 and tp 2 cannot be combined yet"),
        (a_run(Degrees(schedule="gpipe")), "nothing to order"),
        (a_run(Degrees(pp=2), micro_batches=1), "at least 2 micro-batches, but a rank has 1"),
        (
            a_run(Degrees(pp=2, schedule="interleaved"), micro_batches=5),
            "a multiple of 2, or fewer than 4 micro-batches",
        ),
        (a_run(FsdpOptions(pp=2)), r"cannot shard .* yet\. Use strategy\.name: ddp"),
        (a_run(Degrees(pp=2), adapter="dora"), r"DoRA.*strategy\.pp divides"),
    ],
)
def test_what_cannot_be_ordered_or_divided_is_refused(run: StrategyRun, said: str) -> None:
    with pytest.raises((RunFileError, UnsupportedError), match=said):
        (check_fsdp if isinstance(run.options, FsdpOptions) else check)(run)


def test_more_stages_than_layers_are_refused() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=3)
    check_model(Degrees(pp=3), config)
    with pytest.raises(UnsupportedError, match=r"4 stages, but .* 3 layers.*to at most 1"):
        check_model(Degrees(pp=2, schedule="interleaved"), config)


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
