"""Kernels in a model: its norms and LoRA layers; its loss and rotations have modules of their own.

peft multiplies the second factor's output by the scale and adds it to the base's: three tensors of
the output's size forward, one backward, for a product of a few columns. With dropout, each layer
keeps an input of its own for backward. A kernel makes both products without these copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import LoraKernel
from anygauge.kernels.loss import LossKernel, replace_forward, return_loss
from anygauge.kernels.rope import RopeKernel, replace_rotations

NormKernel = Callable[[Tensor, Tensor, float], Tensor]
"""(x (..., D), weight (D,), epsilon) -> (..., D), in x's type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelKernels:
    """The kernels to put into a model; None: as the model, or peft, computes it.

    Attributes:
        norm: computes the RMS norms that are plain.
        rope: rotates queries and keys where that is plain.
        lora: makes the products of LoRA layers that are plain.
        loss: makes the loss where the logits would be; None: the loss is made of them.
    """

    norm: NormKernel | None = None
    rope: RopeKernel | None = None
    lora: LoraKernel | None = None
    loss: LossKernel | None = None


def install(model: nn.Module, kernels: ModelKernels, *, by_sequence: bool = False) -> None:
    """Put kernels into a model that has its adapter; with ``shift_labels`` it gives its loss.

    Args:
        by_sequence: see `return_loss`.
    """
    if kernels.norm is not None:
        replace_norms(model, kernels.norm)
    if kernels.rope is not None:
        replace_rotations(model, kernels.rope)
    if kernels.lora is not None:
        fuse_lora(model, kernels.lora)
    return_loss(model, kernels.loss, by_sequence=by_sequence)


def plain_norms(model: nn.Module) -> tuple[list[nn.Module], int]:
    """The RMS norms of a model that a kernel can compute, and how many there are in all.

    A norm counts only if what its class computes is the plain formula: some architectures add one
    to the weight, or normalize in another way under the same name.
    """
    plain: dict[type[nn.Module], bool] = {}
    found, total = [], 0
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or _epsilon(module) is None:
            continue
        kind, total = type(module), total + 1
        if kind not in plain:
            plain[kind] = _is_plain(module)
        if plain[kind]:
            found.append(module)
    return found, total


def replace_norms(model: nn.Module, kernel: NormKernel) -> None:
    """Let a kernel compute each plain RMS norm of a model."""
    for module in plain_norms(model)[0]:
        replace_forward(module, _norm_forward(kernel))


def _epsilon(module: Any) -> float | None:
    return next(
        (float(getattr(module, n)) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None
    )


def _norm_forward(kernel: NormKernel) -> Callable[[Any, Tensor], Tensor]:
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


def plain_lora(model: nn.Module) -> tuple[list[tuple[nn.Module, str]], int]:
    """LoRA layers that a kernel can serve, each with its adapter's name, and how many there are.

    Not served are factors of another kind: DoRA, embeddings, a bias.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [(m, name) for m in layers if (name := _adapter_served(m)) is not None], len(layers)


def fuse_lora(model: nn.Module, kernel: LoraKernel) -> None:
    """Let a kernel make the products of each plain LoRA layer.

    Calls with arguments of their own stay peft's.
    """
    for layer, name in plain_lora(model)[0]:
        lora: Any = layer
        replace_forward(lora, _lora_forward(name))
        replace_forward(lora.lora_A[name], _down_forward(kernel))
        replace_forward(lora.lora_B[name], _up_forward(kernel))


def _adapter_served(module: Any) -> str | None:
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


def _lora_forward(name: str) -> Callable[..., Tensor]:
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


def _down_forward(kernel: LoraKernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, dropout: float = 0.0) -> Tensor:
        return kernel.down(input, self.weight, dropout)

    return forward


def _up_forward(kernel: LoraKernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if onto is None:
            plain: Tensor = type(self).forward(self, input)
            return plain
        return kernel.up(onto, input, self.weight, scale)

    return forward
