"""Backends with products in FP8, all but one of them wrong: see `tests.testing.wrong`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from anygauge.interface import FULL
from tests.testing.wrong import Wrong, mutant, torch

CHECK = "fp8_products_are_near"
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def rounded(tensor: Any, kind: str) -> Any:
    """As numbers of eight bits with one scale, in the tensor's own type."""
    scale = LARGEST[kind] / tensor.detach().abs().amax().float()
    return ((tensor.float() * scale).to(getattr(torch, kind)).float() / scale).to(tensor.dtype)


def as_it_is(tensor: Any, kind: str) -> Any:
    return tensor


def without_scale(tensor: Any, kind: str) -> Any:
    return tensor.to(getattr(torch, kind)).to(tensor.dtype)


def multiply_in_fp8(
    on: Wrong,
    *,
    round_: Callable[[Any, str], Any] = rounded,
    copies: bool = False,
    everywhere: bool = False,
    all_layers: bool = False,
) -> None:
    """Let a backend have products in FP8, computed in its usual types with rounded factors."""

    @on.made
    def made(self: Any) -> None:
        self.capabilities = {**self.capabilities, "fp8_products": FULL}

    @on.method("backend.fp8_products")
    def fp8_products(self: Any, usual: Any, model: Any, kept: Any, *, reentrant: Any) -> Any:
        inside = [everywhere]
        product = _product(round_)

        class Layer(torch.nn.Linear):  # type: ignore[misc, name-defined]
            def forward(self, x: Any) -> Any:
                if not inside[0]:
                    return super().forward(x)
                return product.apply(x, self.weight, self.bias)

        for name, layer in list(model.named_children()):
            if type(layer) is not torch.nn.Linear or (layer in kept and not all_layers):
                continue
            new = Layer(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                device=layer.weight.device,
                dtype=layer.weight.dtype,
            )
            if copies:
                new.load_state_dict(layer.state_dict())
            else:
                new.weight, new.bias = layer.weight, layer.bias
            setattr(model, name, new)

        @contextlib.contextmanager
        def context() -> Any:
            inside[0] = True
            yield
            inside[0] = everywhere

        return context


def _product(round_: Callable[[Any, str], Any]) -> Any:
    class Product(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, weight)
            factors = (round_(each, "float8_e4m3fn") for each in (x, weight))
            return torch.nn.functional.linear(*factors, bias)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = (round_(each, "float8_e5m2") for each in ctx.saved_tensors)
            g = round_(grad, "float8_e5m2")
            return g @ weight, g.T @ x, grad.sum(0) if ctx.needs_input_grad[2] else None

    return Product


WRONG: dict[str, dict[str, Any]] = {
    "layers in FP8 have parameters of their own": {"copies": True},
    "products in FP8 are products in bfloat16": {"round_": as_it_is},
    "products in FP8 have no scales": {"round_": without_scale},
    "layers multiply in FP8 outside of the context": {"everywhere": True},
    "layers that are to be kept multiply in FP8": {"all_layers": True},
}
for _name, _how in WRONG.items():
    mutant(_name, part="device", check=CHECK)(functools.partial(multiply_in_fp8, **_how))
