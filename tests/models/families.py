"""Tiny models of families that publishers use, as transformers itself saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection
from tests.helpers.build import model_factory, on_host

SIZES = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "gpt_oss": {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
}
"""One with experts in a list, one with many, one with a stored buffer, one without a conversion,
and one whose embedding is tied."""


def config_of(family: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **fields})


def of_family(family: str, **fields: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, **fields)).float()


def saved(family: str, folder: Path) -> Path:
    """A tiny model of a family, as transformers itself saves it."""
    model = of_family(family)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.rand_like(value) * 0.1)  # buffers begin with zeros, biases too
    model.save_pretrained(folder)
    return folder


def adapted(folder: Path, **fields: Any) -> Any:
    """The model of a folder with a new adapter of rank 4."""
    made = model_factory(folder, AdapterSection(r=4, **fields))
    model = on_host(made)
    return made.adapt(model).eval()
