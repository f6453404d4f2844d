"""Mixtures of experts under every strategy: adapters on fused experts, all weights, and bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.strategies.matrix import (
    ALL,
    GATHERED,
    PIPELINE,
    SGD,
    STAGE3,
    TENSOR,
    ULYSSES,
    WITHOUT_SP,
    CaseGroups,
)
from tests.strategies.parity_rank import ParityCase
from tests.strategies.test_loading import loaded
from tests.strategies.test_matrix import agrees

pytest.importorskip("transformers.core_model_loading", reason="experts are layers before")

SIZES = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"num_experts_per_tok": 2},
}
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4}
GPT_OSS = {
    **SIZES,
    **{"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
}
"""Its experts' tensors are the other way round, and have biases."""
EAGER = {**GPT_OSS, "experts_implementation": "eager"}
"""Its loop over experts takes those that it has, and no others."""
DEEPSEEK = {
    **SIZES,
    **{"model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 4},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "num_key_value_heads": 4},
}
"""With shared experts, a dense layer, a stored buffer, and keys wider than values."""
WITH_SHARED = {
    **SIZES,
    **{"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
}
"""Its shared expert, which the plan leaves out, is scaled by the token."""
QWEN3 = {
    **SIZES,
    **{"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    **{"mlp_only_layers": [0]},
}
GLM4 = {
    **SIZES,
    **{"model_type": "glm4_moe", "n_routed_experts": 4, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    **{"head_dim": 16},
}
JAMBA = {
    **SIZES,
    **{"model_type": "jamba", "num_experts": 4, "attn_layer_period": 2, "mamba_d_state": 8},
    **{"attn_layer_offset": 0, "expert_layer_period": 2, "expert_layer_offset": 1},
}
"""Of its blocks, the plan has the experts alone."""
ROUTERS = ["mlp.gate"]
TENSORS = ["experts.gate_up_proj", "experts.down_proj"]


def of(model: dict[str, Any], strategy: str, **more: Any) -> ParityCase:
    adapter = {"modules_to_save": whole} if (whole := more.pop("whole", [])) else {}
    if tensors := more.pop("tensors", TENSORS):
        adapter["target_parameters"] = tensors
    usual = ParityCase(strategy=strategy, model=model, attention="eager", adapter=adapter, **SGD)
    return dataclasses.replace(usual, **more)


FEW = [
    of(MIXTRAL, "fsdp"),
    of(MIXTRAL, "zero", options=STAGE3, recomputed=True),
    of(MIXTRAL, "zero", recomputed=True),
    of(GPT_OSS, "zero", options=STAGE3),
    of(DEEPSEEK, "fsdp", recomputed=True),
    of(DEEPSEEK, "ddp", options=GATHERED, attention="sdpa"),
    of(MIXTRAL, "ddp", options=PIPELINE),
    of(MIXTRAL, "fsdp", tensors=[], routers=0.1, **ALL),
    of(MIXTRAL, "ddp", options=TENSOR, recomputed=True),
    of(DEEPSEEK, "ddp", options=TENSOR, tensors=[], **ALL),
    of(WITH_SHARED, "ddp", options=WITHOUT_SP),
]
MANY = [
    *(of(model, "ddp") for model in (MIXTRAL, GPT_OSS, DEEPSEEK)),
    *(of(model, "zero", options={"stage": 2}) for model in (MIXTRAL, DEEPSEEK)),
    of(DEEPSEEK, "zero", options=STAGE3, recomputed=True),
    of(DEEPSEEK, "zero", options={**STAGE3, "gather": "module"}),
    of(GPT_OSS, "fsdp", recomputed=True),
    of(DEEPSEEK, "ddp", options=ULYSSES, attention="sdpa"),
    of(DEEPSEEK, "ddp", options=PIPELINE, recomputed=True),
    of(DEEPSEEK, "zero", options=STAGE3, tensors=[], **ALL),
    of(GPT_OSS, "ddp", options=PIPELINE, tensors=[], **ALL),
    of(MIXTRAL, "ddp", packed=True, routers=0.1),
    *(of(MIXTRAL, name, whole=ROUTERS, routers=0.1) for name in ("ddp", "fsdp")),
    of(MIXTRAL, "zero", options=STAGE3, whole=ROUTERS, routers=0.1),
    of(MIXTRAL, "fsdp", whole=["embed_tokens", "lm_head"]),
    of(MIXTRAL, "zero", options=STAGE3, whole=["embed_tokens", "lm_head"], recomputed=True),
    of(GPT_OSS, "zero", options=STAGE3, recomputed=True, routers=0.1),
    of(MIXTRAL, "zero", options={"stage": 2}, tensors=[], routers=0.1, **ALL),
    *(
        of(model, "ddp", options=options, recomputed=options is TENSOR)
        for model in (DEEPSEEK, WITH_SHARED, QWEN3, GLM4, GPT_OSS, JAMBA)
        for options in (TENSOR, WITHOUT_SP)
        if (model, options) != (WITH_SHARED, WITHOUT_SP)
    ),
    *(
        of(model, "ddp", options=options, recomputed=options is WITHOUT_SP, tensors=[], **ALL)
        for model in (MIXTRAL, WITH_SHARED, QWEN3, GLM4, GPT_OSS, JAMBA)
        for options in (TENSOR, WITHOUT_SP)
    ),
    of(MIXTRAL, "ddp", options=TENSOR, packed=True),
    of(EAGER, "ddp", options=TENSOR, tensors=[], packed=True, **ALL),
]
FOUR = [
    of(MIXTRAL, "fsdp", options=TENSOR, recomputed=True),
    of(DEEPSEEK, "fsdp", options=TENSOR, tensors=[], **ALL),
    of(GLM4, "fsdp", options=WITHOUT_SP),
    of(MIXTRAL, "ddp", options=TENSOR, tensors=[], **ALL),
]


GROUPS = CaseGroups(few=(2, FEW), many=(2, MANY), four=(4, FOUR))


@pytest.mark.parametrize(("group", "case"), GROUPS.cases("many", "four"))
def test_experts_train_as_on_one_rank(group: str, case: ParityCase) -> None:
    found, wanted = GROUPS.pair(group, case)
    agrees(case, found, wanted)
    experts = [name for name in found["trained"] if ".experts." in name]
    assert experts, "the experts were trained"
    assert max(max(map(abs, found["trained"][name])) for name in experts) > 0


def test_each_rank_of_a_group_reads_its_experts_alone(tmp_path: Path) -> None:
    """Of files in the published layout, where each expert has tensors of its own."""
    fields = dict(MIXTRAL)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    whole.save_pretrained(tmp_path / "model")
    sizes = {name: 4 * each.numel() for name, each in whole.named_parameters()}
    on_both = ("norm", "mlp.gate.", "lm_head")
    both = sum(size for name, size in sizes.items() if any(word in name for word in on_both))
    read = [rank["read"] for rank in loaded(tmp_path / "model", "ddp", "cpu", 2, tp=2)]
    assert read == [(sum(sizes.values()) - both) / 2 + both] * 2
