"""How an adapter's factors begin: which of peft's ``init_lora_weights`` are served.

Some take the factors A0, B0 out of the base's weights W, which become W - B0 A0. Such an adapter is
saved for the base as it was: B A - B0 A0 has twice the rank, [A; A0] and [B, -B0].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge.interface import HOST_DEVICE, ModelError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

TAKEN_FROM_BASE = ("pissa", "olora")
"""Values, or their beginnings, that change the base."""

NOT_SERVED = {
    "corda": "it needs covariances of activations before training, which anygauge does not collect",
    "lora_ga": (
        "it needs gradients of the base's weights before training, which anygauge does not compute"
    ),
    "mica": (
        "it takes a factor out of the base's weights, which some strategies shard before they read "
        "them"
    ),
    "eva": (
        "it needs activations of the training rows before training, which anygauge does not collect"
    ),
    "loftq": "it needs a base that peft quantises itself",
}
"""Value, or its beginning -> why it is not."""


def check_init(init: bool | str) -> None:
    """Refuse initial values that need more than a seed and the base's weights.

    Raises:
        UnsupportedError: says what it needs; values that peft does not know are peft's to refuse.
    """
    if isinstance(init, bool):
        return
    for name, why in NOT_SERVED.items():
        if init == name or init.startswith(f"{name}_niter_"):
            raise UnsupportedError(
                f"adapter.init: {init} is not supported: {why}. Use one of true, false, gaussian, "
                "orthogonal, pissa or olora"
            )


def changes_base(init: bool | str) -> bool:
    """Whether factors that begin so are taken out of the base's weights."""
    return isinstance(init, str) and init.split("_niter_")[0] in TAKEN_FROM_BASE


def first_factors(adapted: nn.Module) -> dict[str, Tensor]:
    """What an adapter's parameters begin with, on the host, by their names."""
    return {
        name: parameter.detach().to(HOST_DEVICE, copy=True)
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }


def for_the_base_as_it_was(
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
    import copy

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
