"""Checks on one opened device: a block of a model in each type, and autocast."""

from __future__ import annotations

from typing import Any

import torch

from anygauge.interface import HOST_DEVICE, UnsupportedError
from anygauge.testing.check import TOLERANCE, NotAsked, Opened, check


def _block(device: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result of something like attention, and the gradients of its inputs."""
    generator = torch.Generator().manual_seed(5)
    given = (torch.randn(32, 32, generator=generator) / 6**0.5 for _ in range(4))
    x, *weights = inputs = [each.to(device, dtype, copy=True).requires_grad_() for each in given]
    q, k, v = (x @ w for w in weights)
    out = torch.nn.functional.silu(torch.softmax(q @ k.t() / 32**0.5, dim=-1) @ v)
    (out.float() if dtype != torch.float64 else out).pow(2).mean().backward()
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


def _register(dtype: str) -> None:
    def compared(on: Opened) -> None:
        allowed = 4 * TOLERANCE[dtype]
        if dtype == "float32":
            allowed = max(allowed, 16 * 2.0**-on.placement.float32_product_bits)
        found = _block(on.device, getattr(torch, dtype))
        wanted = _block(HOST_DEVICE, torch.float64)
        for number, (there, here) in enumerate(zip(found, wanted, strict=True)):
            what = f"gradient {number}" if number else "the result"
            assert there.device.type == on.device.type, f"{what} is on {there.device}"
            away = (there.to(HOST_DEVICE, torch.float64) - here).abs().max() / here.abs().max()
            assert float(away) <= allowed, (
                f"{what} differs from float64 on the host by {float(away):.1e} of its largest "
                f"value; {allowed:.0e} is allowed in {dtype}"
            )

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
        with on.placement.autocast(lower):
            inside = a @ a
    except UnsupportedError as refusal:
        raise NotAsked(str(refusal)) from refusal
    outside = a @ a
    assert inside.dtype == lower, f"a product under autocast has {inside.dtype}"
    assert outside.dtype == torch.float32, f"a product after autocast has {outside.dtype}"
