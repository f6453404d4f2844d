"""Mixtures of experts under every strategy: adapters on fused experts, all weights, and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import AutoConfig

from anygauge.interface import StrategyRun, UnsupportedError
from anygauge.strategies.ddp_spec import check
from anygauge.strategies.degrees import Degrees, check_model
from tests.strategies.matrix import ALL, GATHERED, PIPELINE, SGD, STAGE3, ULYSSES, Matrix
from tests.strategies.parity_rank import Case
from tests.strategies.test_matrix import is_the_references, sends_what_it_says

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
DEEPSEEK = {
    **SIZES,
    **{"model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 4},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "num_key_value_heads": 4},
}
"""With shared experts, a dense layer, a stored buffer, and keys wider than values."""
TENSORS = ["experts.gate_up_proj", "experts.down_proj"]


def of(model: dict[str, Any], strategy: str, **more: Any) -> Case:
    usual = Case(strategy=strategy, model=model, attention="eager", tensors=TENSORS, **SGD)
    return dataclasses.replace(usual, **more)


FEW = [
    of(MIXTRAL, "fsdp"),
    of(MIXTRAL, "zero", options=STAGE3, recomputed=True),
    of(GPT_OSS, "zero", options=STAGE3),
    of(DEEPSEEK, "fsdp", recomputed=True),
    of(DEEPSEEK, "ddp", options=GATHERED, attention="sdpa"),
    of(MIXTRAL, "ddp", options=PIPELINE),
    of(MIXTRAL, "fsdp", tensors=[], routers=0.1, **ALL),
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
    of(GPT_OSS, "zero", options=STAGE3, recomputed=True, routers=0.1),
    of(MIXTRAL, "zero", options={"stage": 2}, tensors=[], routers=0.1, **ALL),
]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(2, FEW, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(2, MANY, tmp_path_factory.mktemp("many"))


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_experts_train_as_on_one_rank(case: Case, few: Matrix) -> None:
    trains(case, few)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_more_experts(case: Case, many: Matrix) -> None:
    trains(case, many)


def trains(case: Case, matrix: Matrix) -> None:
    found, wanted = matrix.pair(case)
    is_the_references(case, found, wanted)
    sends_what_it_says(case, found)
    experts = [name for name in found["trained"] if ".experts." in name]
    assert experts, "the experts were trained"
    assert max(max(map(abs, found["trained"][name])) for name in experts) > 0


@pytest.mark.parametrize("degree", ["cp", "tp", "pp"])
def test_the_routers_loss_needs_whole_micro_batches(degree: str) -> None:
    options = Degrees(**{degree: 2})
    run = StrategyRun(options=options, world_size=2, optimizer="adamw", router_aux_loss=True)
    with pytest.raises(UnsupportedError, match=f"router_aux_loss_coef.*strategy.{degree}: 1"):
        check(dataclasses.replace(run, micro_batches=2))


def test_experts_are_not_divided_by_tensor_parallelism() -> None:
    fields = dict(MIXTRAL)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with pytest.raises(UnsupportedError, match=r"experts cannot be divided yet.*fsdp or zero"):
        check_model(Degrees(tp=2), config)
