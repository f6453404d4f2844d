"""Whether a folder's tensors are those of its configuration, for the plainest architectures.

Known without torch, whose import would be most of a check's cost. Of any other architecture only
the model itself tells, built without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.util.files import read_json

Shapes = dict[str, tuple[int, ...]]

_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Their decoders differ in the biases and norms of attention alone."""


def surely_fit(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether there are just the tensors that ``config.json`` asks for; False: not known.

    Args:
        shapes: tensor name -> shape; None where they are not known.
    """
    if shapes is None:
        return False
    try:
        fields = read_json(folder / "config.json")
        expected = _expected(fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return False  # whoever makes the configuration says what is wrong
    return expected == dict(shapes)


def _expected(fields: Mapping[str, Any]) -> Shapes | None:
    kind = fields["model_type"]
    layers = fields["num_hidden_layers"]
    other = ("attention_bias", "mlp_bias", "quantization_config")
    if kind not in _KNOWN or layers > 1000 or any(fields.get(name) for name in other):
        return None
    hidden, inner, heads = (
        fields[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = fields.get("head_dim") or hidden // heads
    query, key = heads * head, fields["num_key_value_heads"] * head
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if kind == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (key,) for name in "kv"}
        layer["self_attn.q_proj.bias"] = (query,)
    if kind == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    table = (fields["vocab_size"], hidden)
    found: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not fields.get("tie_word_embeddings"):
        found["lm_head.weight"] = table
    for number in range(layers):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found
