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

EXPERTS = "moe_tp_experts"
"""The style of the experts of a mixture, in one module: a rank has some of them."""

SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of what every token passes beside experts; some plans leave them out."""

VOCABULARY = "embedding_rowwise"
"""The style of an embedding of which a rank has some rows; one before the layers stays whole."""

LOCAL = "local_params"
"""The style of a module that uses parameters of its own, such as sinks; these have a style too."""

_OF_EXPERTS = (COLUMNS, ROWS, "packed_colwise")
"""Styles of experts' tensors that divide each of them by its inner numbers; not applied."""

GPTJ = {
    "h.*.attn.q_proj": COLUMNS,
    "h.*.attn.k_proj": COLUMNS,
    "h.*.attn.v_proj": COLUMNS,
    "h.*.attn.out_proj": ROWS,
    "h.*.mlp.fc_in": COLUMNS,
    "h.*.mlp.fc_out": ROWS,
}
GPT_OSS = {
    "layers.*.self_attn.q_proj": COLUMNS,
    "layers.*.self_attn.k_proj": COLUMNS,
    "layers.*.self_attn.v_proj": COLUMNS,
    "layers.*.self_attn.sinks": COLUMNS,
    "layers.*.self_attn.o_proj": ROWS,
    "layers.*.mlp.experts": EXPERTS,
}
OWN_PLANS: Mapping[str, Mapping[str, str]] = {"gptj": GPTJ, "gpt_oss": GPT_OSS}
"""``model_type`` -> plan, of architectures for which transformers has none."""

ALL_POSITIONS_AFTER = {"gptj": "ln_f"}
"""``model_type`` -> the last module of a decoder that then shapes its result by all positions."""

WHOLE_OUTPUT = "layers whose outputs every rank needs whole (several matrices in one, routers)"
NOT_WRITTEN = {
    "colwise_gather_output": WHOLE_OUTPUT,
    "colwise_rep": WHOLE_OUTPUT,  # its name before transformers 5
    "rowwise_split_input": WHOLE_OUTPUT,
    "rowwise_rep": WHOLE_OUTPUT,
    "packed_rowwise": "experts of this layout",
    "mla_kv_a_proj": "attention with compressed keys",
}
"""Styles of plans that are not applied yet, and what has them."""

REMEDY = "Set strategy.tp: 1, and use strategy.name: fsdp or zero to shard the model instead"


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
            "strategy.tp: neither transformers nor anygauge describes how to divide the layers of "
            f"{kind} models. {REMEDY}"
        )
    mixtures = [layer for layer, style in plan.items() if style == EXPERTS]
    found = {}
    for layer, style in plan.items():
        path, _, name = layer.rpartition(".")
        if style == VOCABULARY and "*" not in layer:
            continue
        if path in mixtures and style in _OF_EXPERTS:
            continue
        what = NOT_WRITTEN.get(style)
        if style not in (COLUMNS, ROWS, WHOLE, EXPERTS, LOCAL):
            what = what or "this style"
        if style == EXPERTS and path.endswith("*"):
            what = "experts outside of a block"
        if ".experts.*" in layer:
            what = "experts that are layers"
        if what is not None:
            raise UnsupportedError(
                f"strategy.tp: {kind} models have {layer}, which their plan divides as {style}: "
                f"{what} cannot be divided yet. {REMEDY}"
            )
        found[layer] = style
        if style == EXPERTS:
            for shared in SHARED:
                for name in ("gate_proj", "up_proj"):
                    found[f"{path}.{shared}.{name}"] = COLUMNS
                found[f"{path}.{shared}.down_proj"] = ROWS
    return found


def all_positions_after(config: Any) -> str | None:
    """See `ALL_POSITIONS_AFTER`."""
    return ALL_POSITIONS_AFTER.get(getattr(config.get_text_config(), "model_type", ""))


def plan_pattern(path: str) -> str:
    """A module's name as plans write it: ``layers.3.mlp`` -> ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def check_model_divides(options: Any, config: Any) -> None:
    """Refuse a model whose heads or layers cannot be divided as `tp` asks.

    Raises:
        UnsupportedError: names degrees that would do.
    """
    if options.tp == 1:
        return
    sizes = _sizes(config.get_text_config(), plan_of(config))
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}
    for name, size in known.items():
        if size % options.tp:
            good = [n for n in range(1, size + 1) if all(v % n == 0 for v in known.values())]
            raise UnsupportedError(
                f"strategy.tp: {options.tp} ranks cannot share {size} {name} evenly. Set "
                f"strategy.tp to one of {', '.join(map(str, good))}"
            )


def _sizes(text: Any, plan: Mapping[str, str]) -> dict[str, Any]:
    """Map what ranks share evenly to its size: a number, or something else where there is none."""
    blocks = {layer.split(".")[-2] for layer, style in plan.items() if style == COLUMNS}
    attention = {block for block in blocks if "att" in block}
    sizes: dict[str, Any] = {}
    if attention:
        heads = _first(text, "num_attention_heads", "n_head")
        sizes["attention heads"] = heads
        sizes["key-value heads"] = _first(text, "num_key_value_heads") or heads
    if EXPERTS in plan.values():
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        sizes["experts of a layer"] = _first(text, *names)
        each = _first(text, "moe_intermediate_size")
        shared = _first(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        together = each * shared if each and shared else None
        alone = _first(text, "shared_expert_intermediate_size")
        sizes["inner features of shared experts"] = alone or together
    if blocks - attention - set(SHARED):
        sizes["inner features of a layer"] = _first(text, "intermediate_size")
    return sizes


def _first(text: Any, *names: str) -> int | None:
    found = (getattr(text, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value), None)
