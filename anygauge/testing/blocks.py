"""Checks on one opened device: a block of a model in each type, and under autocast."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from anygauge.interface import HOST_DEVICE, UnsupportedError
from anygauge.testing.check import TOLERANCE, NotAsked, Opened, check


def _block(on: Opened, dtype: str, *, autocast: bool = False) -> dict[str, tuple[Any, Any]]:
    """A small attention-like block with backward: name -> (of the device, of the host, float64)."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 16, 32, generator=generator)
    weights = [torch.randn(32, 32, generator=generator) / 6 for _ in range(3)]
    target = getattr(torch, dtype)

    def run(device: Any, kind: torch.dtype, context: Any) -> dict[str, Any]:
        inputs = [
            each.to(device=device, dtype=kind, copy=True).requires_grad_() for each in (x, *weights)
        ]
        with context:
            q, k, v = (inputs[0] @ w for w in inputs[1:])
            scores = torch.softmax(q @ k.transpose(1, 2) / 32**0.5, dim=-1)
            out = torch.nn.functional.silu(scores @ v)
            loss = (out.float() if kind != torch.float64 else out).pow(2).mean()
        loss.backward()
        found = {"out": out, "loss": loss}
        return found | {f"grad{n}": each.grad for n, each in enumerate(inputs)}

    kind = torch.float32 if autocast else target
    context = on.placement.autocast(target) if autocast else contextlib.nullcontext()
    there = run(on.device, kind, context)
    here = run(HOST_DEVICE, torch.float64, contextlib.nullcontext())
    return {name: (there[name].detach(), here[name].detach()) for name in there}


def _compare(on: Opened, dtype: str, *, autocast: bool = False) -> None:
    allowed = 4 * TOLERANCE[dtype]
    if dtype == "float32":
        allowed = max(allowed, 16 * 2.0**-on.placement.float32_product_bits)
    for name, (there, here) in _block(on, dtype, autocast=autocast).items():
        assert there.device.type == on.device.type, f"{name} is on {there.device}"
        error = float((there.to(HOST_DEVICE, torch.float64) - here).abs().max() / here.abs().max())
        assert error <= allowed, (
            f"{name} differs from float64 on the host by {error:.1e} of its largest value; "
            f"{allowed:.0e} is allowed in {dtype}"
        )


def _register(dtype: str) -> None:
    def compared(on: Opened) -> None:
        _compare(on, dtype)

    compared.__name__ = f"{dtype}_arithmetic"
    check(
        f"{dtype}: a block with softmax and its gradients agree with float64",
        part="device",
        capability=None if dtype == "float32" else dtype,
        means=f"training in {dtype} would go another way than on other devices; the checks of "
        "operations and products name the cause",
    )(compared)


for _dtype in TOLERANCE:
    _register(_dtype)


@check(
    "autocast computes in the lower type, gradients stay float32; to float32 it changes nothing",
    part="device",
    means="a loop of one's own would compute in another type than it asked for; look at the "
    "device's list of operations for autocast",
)
def autocast_casts(on: Opened) -> None:
    a = torch.randn(8, 8, device=on.device)
    with on.placement.autocast(torch.float32):
        assert (a @ a).dtype == torch.float32, "autocast to float32 lowers products"
    name = next((each for each in ("bfloat16", "float16") if on.backend.support(each)), None)
    if name is None:
        raise NotAsked("it has no lower type")
    lower = getattr(torch, name)
    try:
        context = on.placement.autocast(lower)
    except UnsupportedError as refusal:
        raise NotAsked(str(refusal)) from refusal
    with context:
        inside = a @ a
    outside = a @ a
    assert inside.dtype == lower, f"a product under autocast has {inside.dtype}"
    assert outside.dtype == torch.float32, f"a product after autocast has {outside.dtype}"
    _compare(on, name, autocast=True)
