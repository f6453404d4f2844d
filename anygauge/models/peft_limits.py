"""Linear layers that can carry no adapter, though they look as if they could."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def takes_no_adapter(model: Any, name: str, module: nn.Module) -> bool:
    """Whether peft or the architecture rules out an adapter beside a linear layer.

    An architecture's own kind of linear layer computes something else than a product with its
    weight: routers return several tensors, some layers are divided into groups. In state-space
    models, kernels read the weights of some layers without calling them; which, peft knows.

    Args:
        model: of transformers.
        name: the layer's whole name.
    """
    from torch import nn

    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward:
        # Those of other libraries, such as quantised ones, are known to peft.
        return kind.__module__ == type(model).__module__
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False
