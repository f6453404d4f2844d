"""Which layers of an architecture tensor parallelism divides, and how; imports no torch.

transformers describes most architectures itself: name of a layer within the decoder, with ``*`` for
numbers -> style. Those that it does not describe, and of which the layers are known, are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anygauge.interface import UnsupportedError

COLUMNS, ROWS = "colwise", "rowwise"
"""Styles: a rank has some of a layer's outputs, or of its inputs."""

WHOLE = "replicated_with_grad_allreduce"
"""The style of a weight that every rank has whole and applies to its own heads."""

GPTJ = {
    "h.*.attn.q_proj": COLUMNS,
    "h.*.attn.k_proj": COLUMNS,
    "h.*.attn.v_proj": COLUMNS,
    "h.*.attn.out_proj": ROWS,
    "h.*.mlp.fc_in": COLUMNS,
    "h.*.mlp.fc_out": ROWS,
}
OWN_PLANS: Mapping[str, Mapping[str, str]] = {"gptj": GPTJ}
"""``model_type`` -> plan, of architectures for which transformers has none."""

ALL_POSITIONS_AFTER = {"gptj": "ln_f"}
"""``model_type`` -> the last module of a decoder that then shapes its result by all positions."""

WHOLE_OUTPUT = "layers whose outputs every rank needs whole (several matrices in one, routers)"
NOT_WRITTEN = {
    "colwise_gather_output": WHOLE_OUTPUT,
    "colwise_rep": WHOLE_OUTPUT,  # its name before transformers 5
    "rowwise_split_input": WHOLE_OUTPUT,
    "rowwise_rep": WHOLE_OUTPUT,
    "moe_tp_experts": "experts",
    "packed_colwise": "experts",
    "packed_rowwise": "experts",
    "mla_kv_a_proj": "attention with compressed keys",
    "local_params": "attention sinks",
}
"""Styles of plans that are not applied yet, and what has them."""

REMEDY = "Set strategy.tp: 1, and strategy.name: fsdp or zero to divide the model otherwise"


def plan_of(config: Any) -> Mapping[str, str]:
    """Layer within the decoder -> style, of a model's configuration.

    Raises:
        UnsupportedError: none is known, or it has a style that is not applied yet.
    """
    text = config.get_text_config()
    kind = getattr(text, "model_type", type(text).__name__)
    plan = getattr(text, "base_model_tp_plan", None) or OWN_PLANS.get(kind)
    if not plan:
        raise UnsupportedError(
            f"strategy.tp: how to divide the layers of {kind} models is not known: neither "
            f"transformers nor anygauge describes it. {REMEDY}"
        )
    for layer, style in plan.items():
        if style not in (COLUMNS, ROWS, WHOLE):
            what = NOT_WRITTEN.get(style, "this style")
            raise UnsupportedError(
                f"strategy.tp: {kind} models have {layer}, to be divided as {style}: "
                f"{what} cannot be divided yet. {REMEDY}"
            )
    return dict(plan)


def all_positions_after(config: Any) -> str | None:
    """See `ALL_POSITIONS_AFTER`."""
    return ALL_POSITIONS_AFTER.get(getattr(config.get_text_config(), "model_type", ""))


def starred(path: str) -> str:
    """A module's name as plans write it: ``layers.3.mlp`` -> ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def check_model_divides(options: Any, config: Any) -> None:
    """Refuse a model whose heads or layers cannot be divided as `tp` asks.

    Raises:
        UnsupportedError: names degrees that would do.
    """
    if options.tp == 1:
        return
    plan_of(config)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None)
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(text, "num_key_value_heads", None) or heads,
        "inner numbers of a layer": getattr(text, "intermediate_size", None),
    }
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}
    for name, size in known.items():
        if size % options.tp:
            good = [n for n in range(1, size + 1) if all(v % n == 0 for v in known.values())]
            raise UnsupportedError(
                f"strategy.tp: {options.tp} ranks cannot share {size} {name} evenly. Set "
                f"strategy.tp to one of {', '.join(map(str, good))}"
            )
