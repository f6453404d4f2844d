"""Architectures other than Llama whose layers several ranks divide, or have a part of; refusals."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from anygauge.interface import UnsupportedError
from anygauge.strategies.context.context_parallel import attend_in_parts
from anygauge.strategies.pipeline.stage import PipelineModel, rank_of_stage, split_costs
from anygauge.strategies.shared.degrees import Degrees, check_model
from anygauge.strategies.shared.exchanges import CountedGroup
from anygauge.strategies.shared.tensor_plans import plan_of
from tests.helpers.build import model_factory
from tests.strategies.matrix import ALL, SGD, WITHOUT_SP, CaseGroups
from tests.strategies.parity_rank import ParityCase
from tests.strategies.test_matrix import agrees

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 96, "max_position_embeddings": 64}
COMPUTES_BY_ITSELF = {
    **{"model_type": "gpt_neo", "vocab_size": 256, "hidden_size": 64, "num_layers": 2},
    **{"num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}
"""An architecture whose attention the library offers no other for."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **{**SMALL, **WIDE, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
        "tie_word_embeddings": True,
    },
    "gpt_neox": {**SMALL, **WIDE, "model_type": "gpt_neox"},
    "gptj": {
        **{"model_type": "gptj", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4},
        **{"n_inner": 96, "n_positions": 64, "rotary_dim": 8},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "starcoder2": {
        **{**SMALL, **WIDE, "model_type": "starcoder2", "num_key_value_heads": 2},
        **{"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    },
    "gemma2": {
        **{**SMALL, **WIDE, "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16},
        "query_pre_attn_scalar": 16,
    },
}
SCALES_EMBEDDINGS_ITSELF = int(version("transformers").split(".")[0]) < 5
"""Gemma's decoder, before transformers 5: every stage of a pipeline would do it again."""


def of(name: str, strategy: str = "ddp", **more: Any) -> ParityCase:
    return ParityCase(strategy=strategy, model=MODELS[name], attention="eager", **more, **SGD)


TENSOR = [
    of(name, **each)
    for name in MODELS
    for each in ({"options": {"tp": 2}, "recomputed": True}, {"options": WITHOUT_SP, **ALL})
]
PIPELINE = [
    of(name, options={"pp": 2}, **each)
    for name in ("qwen3", "gpt_neox", "gptj", *(() if SCALES_EMBEDDINGS_ITSELF else ("gemma2",)))
    for each in ({}, {"recomputed": True, **ALL})
]
"""Qwen3's and Gemma's embedding is the output layer, too: two stages have it."""
# A weight with two owners stays one.
TIED = [of("qwen3", "fsdp", **each) for each in ({}, ALL)]
USUAL = [
    *(("tp", name) for name in ("qwen3", "gptj")),
    *(("pp", name) for name in ("qwen3" if SCALES_EMBEDDINGS_ITSELF else "gemma2", "gptj")),
]
FEW = [c for c in (*TENSOR, *PIPELINE) if (next(iter(c.options)), c.model["model_type"]) in USUAL]
MANY = [case for case in (*TENSOR, *PIPELINE) if case not in FEW]
GROUPS = CaseGroups(few=(2, [*FEW, *TIED]), many=(2, MANY))


@pytest.mark.parametrize(("group", "case"), GROUPS.cases("many"))
def test_architectures(group: str, case: ParityCase) -> None:
    agrees(case, *GROUPS.pair(group, case))


FUSED_EXPERTS: list[Any] = [
    ({"model_type": "olmoe"}, "outputs every rank needs whole"),
    ({"model_type": "deepseek_v2"}, "compressed keys"),
    ({"model_type": "llama4_text"}, "experts of this layout"),
    ({"model_type": "gemma4_text"}, "experts outside of a block"),
    ({"model_type": "mixtral", "num_local_experts": 7}, r"7 experts.*to one of 1$"),
    (
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 97},
        "97 inner features of shared experts",
    ),
]
if int(version("transformers").split(".")[0]) < 5:
    FUSED_EXPERTS = [({"model_type": "qwen3_moe"}, "experts that are layers")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "phi3"}, "outputs every rank needs whole"),
        *FUSED_EXPERTS,
        ({"model_type": "gpt2"}, "describes how to divide the layers of gpt2 models"),
        ({"model_type": "doge"}, "doge models have layers"),
        (
            {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3},
            "3 key-value",
        ),
        ({"model_type": "llama", "num_attention_heads": 3}, "3 attention heads"),
        ({"model_type": "llama", "intermediate_size": 97}, "97 inner features"),
    ],
)
def test_what_cannot_be_divided_is_refused(fields: dict[str, Any], said: str) -> None:
    kind = fields.pop("model_type")
    config = AutoConfig.for_model(kind, **{"num_attention_heads": 4, "hidden_size": 96, **fields})
    with pytest.raises(UnsupportedError, match=said) as refused:
        check_model(Degrees(tp=2), config)
    assert "Set strategy.tp" in str(refused.value)


def test_attention_that_computes_by_itself_takes_no_cp() -> None:
    model = model_factory(COMPUTES_BY_ITSELF, attention="eager").skeleton()
    with pytest.raises(UnsupportedError, match=r"strategy\.cp: the attention of GPTNeoForCausalLM"):
        attend_in_parts(model, CountedGroup(2, 0), "gather")


def test_an_embedding_before_the_layers_stays_whole_and_one_within_them_is_refused() -> None:
    def plan(layer: str) -> Any:
        config = SimpleNamespace(
            model_type="made-up",
            base_model_tp_plan={layer: "embedding_rowwise", "h.*.up": "colwise"},
        )
        config.get_text_config = lambda: config
        return plan_of(config)

    assert plan("wte") == {"h.*.up": "colwise"}
    with pytest.raises(UnsupportedError, match=r"h\.\*\.down_embed, .* as embedding_rowwise"):
        plan("h.*.down_embed")


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
    assert split_costs(costs, count, last) == ends


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
