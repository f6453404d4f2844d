"""LoRA layers whose low-rank product is added by a kernel, without copies of the layer's output.

peft multiplies the second factor's output by the scale and adds it to the base's: three tensors of
the output's size forward, one backward, for a product of a few columns.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LoraKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""``lora_linear`` of `anygauge.interface.kernels`."""


def fuse_lora(model: nn.Module, kernel: LoraKernel) -> tuple[int, int]:
    """Let a kernel add the low-rank product of each LoRA layer; returns (served, LoRA layers).

    Layers whose factors are of another kind (DoRA, embeddings, a bias) stay as they are, as do
    calls with arguments of their own.
    """
    from peft.tuners.lora import LoraLayer

    served = total = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        total += 1
        name = _served(module)
        if name is not None:
            any_module: Any = module
            any_module.forward = types.MethodType(_forward(name), module)
            second = any_module.lora_B[name]
            second.forward = types.MethodType(_second(kernel), second)
            served += 1
    return served, total


def _served(module: Any) -> str | None:
    """The adapter of a layer that a kernel can serve."""
    from peft.tuners.lora import Linear

    if type(module) is not Linear or "forward" in vars(module) or len(module.lora_A) != 1:
        return None
    (name,) = module.lora_A
    if name in module.lora_variant or module.lora_B[name].bias is not None:
        return None
    return str(name)


def _forward(name: str) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first = self.lora_A[name]
        if self.disable_adapters or self.merged or args or kwargs or x.dtype != first.weight.dtype:
            plain: Tensor = type(self).forward(self, x, *args, **kwargs)
            return plain
        low = first(self.lora_dropout[name](x))
        # Called as a module: a strategy that shards its weight brings it back there.
        result: Tensor = self.lora_B[name](low, onto=self.base_layer(x), scale=self.scaling[name])
        return result

    return forward


def _second(kernel: LoraKernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if onto is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        return kernel(onto, input, self.weight, scale)

    return forward
