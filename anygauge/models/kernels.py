"""Putting a run's kernels into a model: attention by the library's registry, norms by module."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import (
    FULL,
    AttentionKernel,
    Level,
    PluginError,
    Support,
    UnsupportedError,
)

NormKernel = Callable[[Tensor, Tensor, float], Tensor]
"""(x (..., D), weight (D,), epsilon) -> (..., D), in x's type."""


def register_attention(kernel: AttentionKernel) -> str:
    """Make the model library know an attention kernel; returns the name to build models with.

    Raises:
        PluginError: the library has no masks of the kind that the kernel takes.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if kernel.mask not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise PluginError(
            f"attention kernel {kernel.name!r} takes masks as for {kernel.mask!r}, which the "
            "installed transformers does not make"
        )
    _registered.add(kernel.name)
    AttentionInterface.register(kernel.name, kernel.forward)
    # With a name in the first registry alone, models would get no mask: padding would be seen.
    AttentionMaskInterface.register(kernel.name, ALL_MASK_ATTENTION_FUNCTIONS[kernel.mask])
    return kernel.name


def takes_kernels(config: Any, mask: str = "eager") -> Support:
    """Whether a model of this configuration calls attention through the library's registry.

    Args:
        mask: of the kernel; see `AttentionKernel`.
    """
    kind = model_class(config)
    if kind is None:
        return FULL
    # The library's own flag is not set on all that do.
    if not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return Support(
            Level.NOT_WRITTEN_YET,
            f"{kind.__name__} computes attention itself and not through the library's interface, "
            "so that a kernel would never be called",
        )
    # Some architectures are in the first registry and make masks of all positions themselves.
    if mask == "flex_attention" and not hasattr(sys.modules[kind.__module__], "create_causal_mask"):
        return Support(Level.NOT_WRITTEN_YET, f"{kind.__name__} makes no masks by blocks")
    return FULL


def library_serves(config: Any, attention: str) -> bool:
    """Whether the library has one of its own attentions for a model of this configuration."""
    kind = model_class(config)
    known = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    return kind is None or attention not in known or bool(getattr(kind, known[attention], True))


def drops_attention(config: Any) -> bool:
    """Whether a model of this configuration drops attention weights in training."""
    names = ("attention_dropout", "attn_pdrop", "attn_dropout")
    return any(isinstance(r := getattr(config, n, 0), int | float) and r > 0 for n in names)


def head_size(config: Any) -> int | None:
    """Width of an attention head, where the configuration says."""
    size, heads = (getattr(config, name, None) for name in ("head_dim", "num_attention_heads"))
    hidden = getattr(config, "hidden_size", None)
    return size or (hidden // heads if hidden and heads else None)


def refuse_uncalled(model: nn.Module, attention: str) -> None:
    """Raises: UnsupportedError: a model's own code would never call the attention kernel."""
    module = sys.modules.get(type(model).__module__)
    if attention in _registered and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedError(
            f"kernels.attention: {type(model).__name__} computes attention itself and not through "
            "the library's interface, so that a kernel would never be called; set "
            "model.attention: eager, and leave kernels.attention out"
        )


_registered: set[str] = set()
"""Names of kernels that the library knows by now."""


def model_class(config: Any) -> type | None:
    """The library's class for a configuration; None for one that comes with a model's files."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind: type | None = found[0] if isinstance(found, tuple) else found
    return kind


def replace_norms(model: nn.Module, kernel: NormKernel) -> tuple[int, int]:
    """Let a kernel compute each RMS norm of a model; returns (replaced, RMS norms in all).

    A norm counts only if what its class computes is the plain formula: some architectures add one
    to the weight, or normalise in another way under the same name.
    """
    plain: dict[type[nn.Module], bool] = {}
    replaced = total = 0
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or _epsilon(module) is None:
            continue
        kind, total = type(module), total + 1
        if kind not in plain:
            plain[kind] = _is_plain(module)
        if plain[kind]:
            # Bound, so that a copy of the module computes with the copy's weight.
            bound = types.MethodType(_forward(kernel), module)
            module.forward = bound
            replaced += 1
    return replaced, total


def _epsilon(module: Any) -> float | None:
    return next(
        (float(getattr(module, n)) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None
    )


def _forward(kernel: NormKernel) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        epsilon = _epsilon(self)
        assert epsilon is not None
        return kernel(hidden_states, self.weight, epsilon)

    return forward


def _is_plain(module: nn.Module) -> bool:
    """Whether a norm computes weight * x / rms(x), tried on the host."""
    weight = getattr(module, "weight", None)
    epsilon = _epsilon(module)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or epsilon is None:
        return False
    twin = copy.copy(module)
    values = torch.linspace(0.5, 1.5, weight.numel())
    twin._parameters = {"weight": nn.Parameter(values)}
    x = torch.linspace(-2, 3, 3 * weight.numel()).reshape(3, -1)
    with torch.no_grad():
        found = twin(x)
    wanted = values * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return bool(torch.allclose(found, wanted, rtol=1e-5, atol=1e-6))
