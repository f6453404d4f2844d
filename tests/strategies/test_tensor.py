"""Tensor parallelism: architectures other than Llama, and what is refused of it."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from anygauge.interface import UnsupportedError
from anygauge.strategies.degrees import Degrees, check_model
from anygauge.strategies.tensor_plans import plan_of
from tests.strategies.matrix import ALL, SGD, WITHOUT_SP, CaseGroups
from tests.strategies.parity_rank import ParityCase
from tests.strategies.test_matrix import is_the_references, sends_what_it_says

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 96, "max_position_embeddings": 64}
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
CASES = [
    ParityCase(
        strategy="ddp",
        options=options,
        model=model,
        attention="eager",
        recomputed=recomputed,
        **SGD,
        **weights,
    )
    for model in MODELS.values()
    for options, weights, recomputed in (({"tp": 2}, {}, True), (WITHOUT_SP, ALL, False))
]
USUAL = ("qwen3", "gptj")
FEW = [case for case in CASES if case.model["model_type"] in USUAL]
MANY = [case for case in CASES if case not in FEW]
# Their embedding is the output layer, too: a weight with two owners stays one.
TIED = [
    ParityCase(strategy="fsdp", model=MODELS["qwen3"], **SGD),
    ParityCase(strategy="fsdp", model=MODELS["qwen3"], **ALL, **SGD),
]


GROUPS = CaseGroups(few=(2, [*FEW, *TIED]), many=(2, MANY))


@pytest.mark.parametrize(("group", "case"), GROUPS.cases("many"))
def test_architectures(group: str, case: ParityCase) -> None:
    found, wanted = GROUPS.pair(group, case)
    is_the_references(case, found, wanted)
    sends_what_it_says(case, found)
    if case.strategy == "ddp":
        assert found["held"] == found["footprint"]["weights"]


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
