"""Products in FP8: what a backend makes of a model for them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.testing.check import Opened, check

ROUNDS = 40
"""Scales may follow from what was measured before, and not at each call, so that the first products
may be worse: a vendor's library takes new scales at every 16th call."""

COARSE = 0.01
"""Least error of a sum of products in FP8, relative to its size. A factor of E4M3 has 4 bits: what
is rounded away has a root mean square of about 0.025 of it. One of bfloat16 has 8 bits: 0.0016."""
NEAR = {"outputs": 0.15, "gradients": 0.3}
"""Most error. Two layers, one after the other, with E4M3 in forward: about 0.05. Gradients have
factors of E5M2, with 3 bits, and two products more: about 0.1."""
SAME = 0.005


@check(
    "linear layers multiply in FP8 where they train, over the same parameters",
    part="device",
    capability="fp8_products",
    means="with precision.fp8 a run would train another model, or compute as it did without; look "
    "at fp8_products(): scales, the parameters of the layers that it puts in, its context",
)
def fp8_products_are_near(on: Opened) -> None:
    host = _model()
    plain = copy.deepcopy(host).to(on.device)
    model = copy.deepcopy(plain)
    named, head = dict(model.named_parameters()), model[-1]
    context = on.backend.fp8_products(model, [head], reentrant=None)
    model.train()
    found = dict(model.named_parameters())
    assert list(found) == list(named), f"parameters were {list(named)} and are {list(found)}"
    moved = [name for name, parameter in named.items() if found[name] is not parameter]
    assert not moved, f"not the same objects any more: {', '.join(moved)}"
    assert model[-1] is head, f"what was to be kept is a {type(model[-1]).__name__}"

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    wanted = _trained(host.float(), x, contextlib.nullcontext)
    rows = x.to(on.device, torch.bfloat16)
    for _ in range(ROUNDS):
        products = _trained(model, rows, context)
    for name, most in NEAR.items():
        error = max(_error(a, b) for a, b in zip(products[name], wanted[name], strict=True))
        assert error < most, f"{name} differ by {error:.3f} of their size; at most {most}"
    coarse = _error(products["outputs"][0], wanted["outputs"][0])
    assert coarse > COARSE, (
        f"outputs differ by {coarse:.4f} of their size from exact ones: factors have more bits "
        "than FP8"
    )
    outside = _trained(model, rows, contextlib.nullcontext)
    usual = _trained(plain, rows, contextlib.nullcontext)
    error = _error(outside["outputs"][0], usual["outputs"][0])
    assert error < SAME, f"outside of the context, outputs differ by {error:.4f} of their size"


def _model() -> Any:
    torch.manual_seed(0)
    middle, head = nn.Linear(128, 64, bias=False), nn.Linear(64, 32)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), middle, head).to(torch.bfloat16)
    with torch.no_grad():
        # Too small for numbers of FP8 without a scale, as gradients usually are.
        middle.weight.mul_(2.0**-12)
        head.weight.mul_(2.0**12)
    return model


def _trained(
    model: nn.Module, x: Tensor, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> dict[str, list[Tensor]]:
    """Of one forward and backward: the outputs; gradients of the input and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with context():
        outputs = model(x)
    outputs.float().square().mean().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    given = [each for each in gradients if each is not None]
    assert len(given) == len(gradients), "a parameter has no gradient"
    return {
        "outputs": [outputs.detach().float().cpu()],
        "gradients": [each.float().cpu() for each in given],
    }


def _error(found: Tensor, wanted: Tensor) -> float:
    """Relative to the size of what is wanted."""
    return float((found - wanted).norm() / wanted.norm())
