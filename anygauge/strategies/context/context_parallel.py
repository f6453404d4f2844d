"""Context parallelism: the ranks of a group have a part of each sequence, and attend to all of it.

Everything but attention works on a token by itself. Attention is the run's own, between exchanges:
either keys and values are gathered, and a rank computes its queries against all of them; or heads
are exchanged for positions (Ulysses, https://arxiv.org/abs/2309.14509), and a rank computes all
queries of its heads. Masks are explicit, so packed documents stay isolated.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import MemoryEstimate, UnsupportedError, Workload
from anygauge.strategies.shared.degrees import ContextParallel
from anygauge.strategies.shared.exchanges import (
    EXCHANGE,
    GATHER,
    CountedGroup,
    Group,
    over_ranks,
    size_of,
)
from anygauge.strategies.shared.footprint import item_bytes, transfer
from anygauge.strategies.shared.materialize import causal_of, decoder_layers

NAME = "anygauge_context_parallel"
EAGER = "eager"

Attention = Callable[..., Any]
"""transformers' attention function: (module, query, key, value, mask, ...) -> (output, weights);
query (B, heads, T, D); output (B, T, heads, D)."""


def attend_in_parts(model: nn.Module, group: Group, method: str) -> None:
    """Let a model's attention see the sequence of which each rank of `group` has a part.

    Args:
        model: of transformers, adapted or not.
        method: ``gather`` or ``ulysses``.

    Raises:
        UnsupportedError: its layers have attention of several kinds, or that takes no other.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    causal = type(causal_of(model))
    if not hasattr(sys.modules[causal.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedError(
            f"strategy.cp: the attention of {causal.__name__} computes by itself, so nothing can "
            "be exchanged around it. Set strategy.cp: 1, or divide layers with strategy.tp"
        )
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(one): one for one in found if hasattr(one, "_attn_implementation")}
    inner = {str(config._attn_implementation) for config in configs.values()}
    if len(inner) != 1:
        raise UnsupportedError(f"strategy.cp: the model mixes attention of kinds {sorted(inner)}")
    (name,) = inner
    parts = {"gather": _attend_to_gathered, "ulysses": _attend_by_heads}[method]
    # A plan beside a run leaves the run's own alone.
    own = f"{NAME}_counted" if isinstance(group, CountedGroup) else NAME
    AttentionInterface.register(own, parts(_attention_function(name), group))
    AttentionMaskInterface.register(own, ALL_MASK_ATTENTION_FUNCTIONS[name])
    for config in configs.values():
        config._attn_implementation = own


def _attention_function(name: str) -> Attention:
    """The function behind a name; each architecture has an eager one of its own."""
    if name != EAGER:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        found: Attention = ALL_ATTENTION_FUNCTIONS[name]
        return found

    def eager(module: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(module, "stands_for", type(module))
        return sys.modules[owner.__module__].eager_attention_forward(module, *args, **kwargs)

    return eager


def _attend_to_gathered(attention: Attention, group: Group) -> Attention:
    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
    ) -> Any:
        # One message for both, whose heads may differ in width.
        both = over_ranks(torch.cat([key, value], dim=-1), GATHER, group, 2)
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return attention(module, query, key, value, mask, **more)

    return forward


def _attend_by_heads(attention: Attention, group: Group) -> Attention:
    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
    ) -> Any:
        ranks = size_of(group)
        if key.shape[1] % ranks:
            times = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        query, key, value = (over_ranks(t, EXCHANGE, group, 1, 2) for t in (query, key, value))
        # The module's heads are those of all ranks; the function asks it for their ratio.
        seen = SimpleNamespace(
            stands_for=type(module),
            num_key_value_groups=query.shape[1] // key.shape[1],
            training=module.training,
            config=module.config,
            is_causal=getattr(module, "is_causal", True),
        )
        output, weights = attention(seen, query, key, value, mask, **more)
        return over_ranks(output, EXCHANGE, group, 1, 2), weights

    return forward


def with_attention(
    options: ContextParallel, workload: Workload, found: MemoryEstimate
) -> MemoryEstimate:
    """An estimate and what attention sends in a step, in the compute type."""
    if options.cp == 1:
        return found
    model: Any = workload.skeleton
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    of_key = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_value = of_key
    if getattr(config, "kv_lora_rank", None):  # keys and values of all heads, of one latent vector
        kv_heads = heads
        of_key = config.qk_nope_head_dim + config.qk_rope_head_dim
        of_value = config.v_head_dim
    length = -(-workload.length // options.cp)
    layers = len(list(decoder_layers(model)))
    size = workload.micro_batch * (of_key + of_value) * item_bytes(workload.precision.param_dtype)
    # What selective recomputation keeps comes after the exchanges, which it makes again.
    forwards = layers + workload.activations.num_recomputed(layers)
    group, turns = group_ranks(workload.rank, options.cp), workload.accumulation
    keys = kv_heads * length * options.cp
    moved = kv_heads if kv_heads % options.cp == 0 else heads
    # Operation -> how often, and numbers; Ulysses has queries, keys, values and outputs.
    exchanges = {
        "gather": {"all_gather": (forwards, keys), "reduce_scatter": (layers, keys)},
        "ulysses": {"all_to_all": (4 * (forwards + layers), (heads + moved) * length / 4)},
    }[options.cp_method]
    traffic = [
        one
        for name, (times, each) in exchanges.items()
        for one in transfer(name, group, turns * times, turns * times * each * size, waited=True)
    ]
    return dataclasses.replace(found, traffic=(*found.traffic, *traffic))


def group_ranks(rank: int, degree: int) -> tuple[int, ...]:
    """The ranks of the group of `degree` neighbouring ones that a rank is in."""
    first = rank // degree * degree
    return tuple(range(first, first + degree))
