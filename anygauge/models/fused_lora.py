"""LoRA layers whose two products a kernel makes, without the copies that peft makes of tensors.

peft multiplies the second factor's output by the scale and adds it to the base's: three tensors of
the output's size forward, one backward, for a product of a few columns. With dropout, each layer
keeps an input of its own for backward.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from anygauge.interface import LoraKernel


def fuse_lora(model: nn.Module, kernel: LoraKernel) -> tuple[int, int]:
    """Let a kernel make the products of each LoRA layer; returns (served, LoRA layers).

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
            first, second = any_module.lora_A[name], any_module.lora_B[name]
            any_module.forward = types.MethodType(_forward(name), module)
            first.forward = types.MethodType(_first(kernel), first)
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
    if type(module.lora_dropout[name]) not in (nn.Dropout, nn.Identity):
        return None
    return str(name)


def _forward(name: str) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first = self.lora_A[name]
        if self.disable_adapters or self.merged or args or kwargs or x.dtype != first.weight.dtype:
            plain: Tensor = type(self).forward(self, x, *args, **kwargs)
            return plain
        dropout = self.lora_dropout[name]
        drop = dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
        # Called as modules: a strategy that shards weights brings them back there.
        low = first(x, drop)
        result: Tensor = self.lora_B[name](low, onto=self.base_layer(x), scale=self.scaling[name])
        return result

    return forward


def _first(kernel: LoraKernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, dropout: float = 0.0) -> Tensor:
        return kernel.down(input, self.weight, dropout)

    return forward


def _second(kernel: LoraKernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if onto is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        return kernel.up(onto, input, self.weight, scale)

    return forward
