"""Tiny configurations of every causal architecture that the installed transformers has.

Made of the configuration class's own defaults: every field that counts something is shrunk by its
name, lists with an entry for each layer keep one entry of each kind. `OVERRIDES` has what does not
follow from names.
"""

from __future__ import annotations

import warnings
from typing import Any

VOCABULARY = 512
LENGTH = 128
"""Positions."""
LAYERS = 2

NAMED: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    LENGTH: (
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
        "max_target_positions"
    ),
    96: (
        "intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim dff encoder_ffn_dim "
        "dim_ff d_inner feed_forward_size ffn_hidden_size dense_intermediate_size"
    ),
    64: (
        "hidden_size_global hidden_size d_model n_embd embedding_size word_embed_proj_dim "
        "attention_hidden_size lru_width emb_dim embedding_dim input_embedding_size "
        "output_embedding_size width out_hidden_size projection_dim adapter_in_dim "
        "adapter_out_dim adapter_input_size"
    ),
    32: (
        "moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size "
        "shared_experts_intermediate_size shared_intermediate_size q_lora_rank sliding_window "
        "sliding_window_size local_attention attention_window_size attention_chunk_size "
        "window_size keep_window_size mem_len rel_extent local_attention_window_len "
        "mamba_d_head mamba_head_dim mamba_headdim dim_model_base image_size image_seq_length"
    ),
    24: "qk_head_dim",
    16: (
        "head_dim swa_head_dim dim_head d_head kv_channels attention_head_size global_head_dim "
        "linear_head_dim router_hidden_size kv_lora_rank qk_nope_head_dim v_head_dim "
        "o_lora_rank index_head_dim index_block_size chunk_size mamba_chunk_size block_size "
        "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input laurel_rank "
        "adapter_rank query_pre_attn_scalar block_multiple_of classifier_proj_size"
    ),
    8: (
        "qk_rope_head_dim index_topk gated_norm_rank state_size ssm_state_size mamba_d_state "
        "time_step_rank mamba_dt_rank rotary_dim num_buckets patch_size"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads attention_heads num_decoder_attention_heads "
        "num_encoder_attention_heads swa_num_attention_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts mamba_n_heads mamba_num_heads n_mamba_heads "
        "linear_num_value_heads"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers num_blocks num_key_value_heads num_kv_heads "
        "kv_n_heads swa_num_key_value_heads num_query_groups num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k moe_top_k top_k_experts zero_expert_num o_groups "
        "index_n_heads index_topk_blocks linear_num_key_heads linear_num_heads depth "
        "num_codebooks"
    ),
    1: (
        "n_group topk_group num_expert_group n_shared_experts num_shared_experts "
        "moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index "
        "moe_layer_end_index n_groups mamba_n_groups mamba_ngroups"
    ),
}
"""How many of something a tiny model has -> fields that count it."""
SIZES = {name: size for size, names in NAMED.items() for name in names.split()}

PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Lists that name each layer's kind."""

OFF = ("jitter", "dropout", "pdrop", "layerdrop", "drop_rate", "drop_path")
"""In names of fields that make a forward a matter of chance."""

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TWO_HYBRIDS = ["mamba", "hybrid", "mamba", "hybrid"]
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": SLIDING_AND_FULL,
        "rope_parameters": {kind: ROPE for kind in SLIDING_AND_FULL},
    },
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    },
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_assistant": {
        "text_config": {
            **{"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            **{"num_hidden_layers": 2, "layer_types": SLIDING_AND_FULL, "vocab_size": VOCABULARY},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        }
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": SLIDING_AND_FULL * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 32},
    "mllama_text_model": {"rope_scaling": {"rope_type": "default"}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "hash_seed": 0,
    },
    "transfo-xl": {"cutoffs": [100, 200], "d_embed": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "use_mamba_kernels": False,
        "num_hidden_layers": 4,
        "layers_block_type": TWO_HYBRIDS,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": TWO_HYBRIDS,
        "attention_hidden_size": 128,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What does not follow from names, by model type."""


def tiny_config(model_type: str) -> Any:
    """A configuration of the architecture with a few thousand parameters."""
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(kind: Any) -> Any:
    from transformers import PretrainedConfig

    given = OVERRIDES.get(kind.model_type, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            usual = kind()
        except Exception:  # some refuse their own defaults
            usual = kind(**given)
        parts = {
            name: _tiny(type(value)).to_dict()
            for name, value in vars(usual).items()
            if isinstance(value, PretrainedConfig) and name not in given
        }
        return kind(**{**_shrunk(usual), **parts, **given})


def _shrunk(usual: Any) -> dict[str, Any]:
    values = {name: value for name, value in vars(usual).items() if not name.startswith("_")}
    kinds = {n: list(values[n]) for n in PER_LAYER if isinstance(values.get(n), list | tuple)}
    layers = max([LAYERS, *(len(dict.fromkeys(kind)) for kind in kinds.values())])
    depth = max(
        (values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in values),
        default=0,
    )
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.endswith(("token_id", "token_index")) and value is not None:
            found[name] = TOKENS.get(name, VOCABULARY - 1)
        elif any(part in name for part in OFF) and isinstance(value, float):
            found[name] = 0.0
        elif isinstance(value, list | tuple) and depth > 1 and len(value) == depth:
            found[name] = condensed(list(value), layers)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            # What a family leaves out stays out.
            found[name] = value and (
                layers if SIZES[name] == LAYERS and name in DEPTHS else SIZES[name]
            )
    heads = next((found[name] for name in ("num_attention_heads", "n_head") if name in found), 0)
    if "qk_rope_head_dim" in values:
        found["num_key_value_heads"] = heads
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            found["head_dim"] = SIZES["qk_rope_head_dim"]
    # Left out, some of them are computed from the others, and some are not.
    for name, size in (("head_dim", SIZES["head_dim"]), ("num_key_value_heads", heads)):
        if name in values and values[name] is None:
            found[name] = size
    if "is_decoder" in values:
        found["is_decoder"] = True
    return found


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
"""As the tokenizer of the tests has them."""


def condensed(values: list[Any], length: int) -> list[Any]:
    """One of each kind, in the order of their first appearance; the last one fills the rest."""
    kinds = [value for index, value in enumerate(values) if value not in values[:index]]
    return (kinds + [kinds[-1]] * length)[:length]
