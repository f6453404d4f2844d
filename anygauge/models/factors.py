"""LoRA factors: rank and scale of a layer's, how they begin, and the form in which they are saved.

Some initial values take the factors A0, B0 out of the base's weights W, which become W - B0 A0.
Such an adapter is saved for the original base: B A - B0 A0 has twice the rank, [A; A0] and
[B, -B0].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anygauge.interface import ModelError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

NOT_SERVED = {
    "corda": "needs covariances of activations before training",
    "eva": "needs activations of the training rows before training",
    "loftq": "needs a base that peft quantizes itself",
    "lora_ga": "needs gradients of the base's weights before training",
    "mica": "takes a factor out of weights that some strategies shard before they read them",
}
"""Of peft's initial values, those that need more than a seed and the base's weights."""

SCALE_FIELDS = ("lora_alpha", "use_rslora", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class Factors:
    """Inner dimension of a layer's two factors, and what scales their product."""

    r: int
    alpha: float

    def __str__(self) -> str:
        return f"r {self.r}, alpha {self.alpha:g}"


def check_init(init: bool | str) -> None:
    """Refuse peft's initial values that are not served; what peft does not know, it refuses.

    Raises:
        UnsupportedError: says what it needs.
    """
    if why := NOT_SERVED.get(_init_method(init)):
        raise UnsupportedError(
            f"adapter.init: {init} is not supported: it {why}. Use one of true, false, gaussian, "
            "orthogonal, pissa or olora"
        )


def changes_base(init: bool | str) -> bool:
    """Whether factors that begin so are taken out of the base's weights."""
    return _init_method(init) in ("pissa", "olora")


def _init_method(init: bool | str) -> str:
    return str(init).partition("_niter_")[0]


def relative_to_original_base(
    state: Mapping[str, Tensor], first: Mapping[str, Tensor], config: Any
) -> tuple[dict[str, Tensor], Any]:
    """An adapter's tensors and configuration, beside a base that nothing was taken out of.

    Args:
        state: as peft stores them.
        first: the same of what they began with.
        config: peft's.

    Raises:
        ModelError: a tensor is not a factor of a linear layer.
    """
    import torch

    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        before = first[name].to(tensor)
        if name.endswith("lora_A.weight"):
            found[name] = torch.cat([tensor, before], dim=0)
        elif name.endswith("lora_B.weight"):
            found[name] = torch.cat([tensor, -before], dim=1)
        else:
            raise ModelError(f"adapter.init: {config.init_lora_weights}: {name} is not a factor")
    # What multiplies the product stays the same.
    times = math.sqrt(2) if config.use_rslora else 2
    changed = copy.copy(config)
    changed.r, changed.lora_alpha = 2 * config.r, times * config.lora_alpha
    changed.rank_pattern = {key: 2 * value for key, value in config.rank_pattern.items()}
    changed.alpha_pattern = {key: times * value for key, value in config.alpha_pattern.items()}
    changed.init_lora_weights = True
    return found, changed


def with_plain_scale(config: Any) -> tuple[Any, dict[str, Any]]:
    """peft's configuration with one `lora_alpha` for all layers, and what it was trained with.

    Readers other than peft know no ``use_rslora`` and no ``alpha_pattern``: they scale each layer
    by lora_alpha / rank (llama.cpp's ``convert_lora_to_gguf.py``). `scale_factors` are the rest.

    Returns:
        The configuration, and the fields that it had; without any where it had that scale.
    """
    if not config.use_rslora and not config.alpha_pattern:
        return config, {}
    plain = copy.copy(config)
    plain.lora_alpha = to_int(config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1))
    plain.use_rslora, plain.alpha_pattern = False, {}
    return plain, {name: getattr(config, name) for name in SCALE_FIELDS}


def scale_factors(adapted: Any, adapter_name: str) -> dict[str, float]:
    """What each factor B is multiplied by beside a configuration of `with_plain_scale`.

    Returns:
        Name of the tensor, as peft stores it -> number.
    """
    from peft.tuners.lora import LoraLayer

    config = adapted.peft_config[adapter_name]
    plain, _ = with_plain_scale(config)
    found = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            times = math.sqrt(layer.r[adapter_name]) if config.use_rslora else 1
            tensor = "lora_embedding_B" if len(layer.lora_embedding_B) else "lora_B.weight"
            found[f"{name}.{tensor}"] = layer.lora_alpha[adapter_name] * times / plain.lora_alpha
    return found


def to_int(alpha: float) -> Any:
    """peft's type is int, and its readers show it as such."""
    return int(alpha) if float(alpha).is_integer() else alpha
