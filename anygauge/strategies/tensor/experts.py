"""Mixtures of experts in parts: a rank has some experts of a layer, and its router whole.

All ranks of a group choose alike, from whole hidden states. A rank computes the tokens of its own
experts, and its part of shared ones; what the block returns is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from anygauge.interface import UnsupportedError
from anygauge.strategies.shared.tensor_plans import REMEDY

WHOLE_PARTS = ("gate", "router", "shared_expert_gate", "expert_bias")
"""What blocks call that by which tokens choose experts, or by which their outputs are scaled."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One block of experts.

    Attributes:
        block: the router, experts, and shared ones.
        experts: within it, with the wrappers of an adapter.
        rows: divided layers of shared experts whose output is a part of the block's sum.
    """

    block: nn.Module
    experts: nn.Module
    rows: list[Any] = field(default_factory=list)

    def whole_names(self, names: Mapping[int, str]) -> Iterator[str]:
        """Names of parameters that every rank has and applies to its part of the sum.

        Args:
            names: of modules, by identity.
        """
        prefix = names[id(self.block)]
        for name, _ in self.block.named_parameters():
            if name.split(".")[0] in WHOLE_PARTS:
                yield f"{prefix}.{name}"
        for row in self.rows:
            yield f"{names[id(getattr(row, 'base_layer', row))]}.bias"


def inner_experts(experts: Any, name: str) -> nn.Module:
    """The module that has the experts' tensors, inside the wrappers of an adapter.

    Raises:
        UnsupportedError: it does not hold one expert after the other, or cannot skip tokens.
    """
    inner = experts
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer
    number = getattr(inner, "num_experts", None)
    if not hasattr(inner, "_is_expert_parallel") or any(
        parameter.shape[0] != number or "." in key for key, parameter in inner.named_parameters()
    ):
        raise UnsupportedError(
            f"strategy.tp: {name} is a {type(inner).__name__}, whose experts cannot be distributed "
            f"over ranks. {REMEDY}"
        )
    found: nn.Module = inner
    return found


def divide_experts(experts: Any, count: int, index: int) -> None:
    """Let a module, of which the tensors are cut, have part `index` of `count` of its experts."""
    each = experts.num_experts // count
    while hasattr(experts, "base_layer"):
        _own_factors(experts, slice(index * each, (index + 1) * each))
        experts = experts.base_layer
    experts.num_experts = each
    # Tokens of the expert behind the last one are then left out.
    experts._is_expert_parallel = True


def _own_factors(wrapper: Any, place: slice) -> None:
    """Let factors of all experts change those of this rank; both products have experts first."""
    weight = wrapper.get_delta_weight
    wrapper.get_delta_weight = lambda *args, **kwargs: weight(*args, **kwargs)[place]
    if hasattr(wrapper, "get_delta_factors"):
        factors = wrapper.get_delta_factors

        def own_factors(*args: Any) -> tuple[Tensor, Tensor, float]:
            left, right, scaling = factors(*args)
            return left[place], right[place], scaling

        wrapper.get_delta_factors = own_factors


def use_own_experts(mixture: Mixture, index: int, count: int) -> None:
    """Let a divided block compute its part of the sum.

    Args:
        index, count: this rank's part, and parts.
    """
    inner: Any = inner_experts(mixture.experts, "")
    start, number = index * inner.num_experts, inner.num_experts

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights, *rest = args
        local = chosen - start
        mine = (local >= 0) & (local < number)
        # Not every architecture's own loop over experts can leave tokens out: there the first one
        # computes them, for nothing. So each rank also has a part of every gradient.
        others = 0 if inner.config._experts_implementation == "eager" else number
        return hidden, local.where(mine, others), weights.where(mine, 0), *rest

    mixture.experts.register_forward_pre_hook(before)
    for row in mixture.rows:
        base = getattr(row, "base_layer", row)
        if base.bias is not None:
            base.forward = lambda x, b=base: nn.functional.linear(x, b.weight, b.bias / count)
