"""Tiny models of families that publishers use, with their names of tensors and formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def as_mxfp4(folder: Path) -> None:
    """Make the experts of a saved gpt-oss codes of 4 bits, each 32 with an exponent."""
    state = load_file(folder / "model.safetensors")
    made: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = tensor
            continue
        # In the files, what the model sums over comes last: 16 bytes hold 32 of it.
        experts, summed, out = tensor.shape
        shape = (experts, out, summed // 32)
        made[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        made[f"{name}_scales"] = torch.randint(
            120, 126, shape, dtype=torch.uint8, generator=generator
        )
    _write(folder, made, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def as_fp8_blocks(folder: Path, block: int = 16) -> None:
    """Make matrices of a saved model 8-bit numbers, each block of them with a scale."""
    state = load_file(folder / "model.safetensors")
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.endswith("proj.weight"):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.reshape(rows // block, block, columns // block, block)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = blocks / scales[:, None, :, None]
        made[name] = codes.reshape(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales
    described = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [block, block],
    }
    _write(folder, made, described)


def _write(folder: Path, state: dict[str, Tensor], described: dict[str, Any]) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
