"""Linear layers that can carry no adapter, though they look as if they could."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ROWS = 7
"""Of the input that a layer is tried with: no number of groups divides it."""


def takes_no_adapter(model: Any, name: str, module: nn.Module) -> bool:
    """Whether peft or the architecture rules out an adapter beside a layer.

    An architecture's own kind of linear layer may compute something else than a product with its
    weight: routers return several tensors, some layers are divided into groups. In state-space
    models, kernels read the weights of some layers without calling them; which, peft knows.

    Args:
        model: of transformers.
        name: the layer's whole name.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    # Layers of other libraries, such as quantised ones, are known to peft.
    if type(module).__module__ == type(model).__module__ and not _maps_rows(module):
        return True
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False


def _maps_rows(module: Any) -> bool:
    """Whether a layer gives one row of its output size for each row, tried without memory."""
    import torch
    from torch import nn

    if not isinstance(module, nn.Linear):
        return True
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    twin = copy.copy(module)
    twin._parameters = {
        key: None if value is None else nn.Parameter(torch.empty(shapes[key], device="meta"))
        for key, value in module._parameters.items()
        if key in shapes
    }
    try:
        with torch.no_grad():
            found = twin(torch.empty(1, ROWS, module.in_features, device="meta"))
    except Exception:  # whatever a model's own class raises here: it does not map rows
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, ROWS, module.out_features)
