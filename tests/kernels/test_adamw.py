"""AdamW whose epsilon is added before the bias of the second moment is corrected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anygauge.registry import Registry
from anygauge_kernels.adamw import early_epsilon


def stepped(
    make: Callable[..., torch.optim.Optimizer], steps: int, **options: float
) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.linspace(-1, 2, 7).double())
    groups = [{"params": [parameter], "lr": 0.01, "weight_decay": 0.1}]
    optimizer = make(groups, lr=0.01, betas=(0.9, 0.99), **options)
    for step in range(steps):
        parameter.grad = torch.linspace(-0.02, 0.01 + 0.01 * step, 7).double()
        optimizer.step()
    assert optimizer.param_groups[0]["eps"] == options["eps"], "as it was stated, for checkpoints"
    assert optimizer.state[parameter]["step"] == steps
    return parameter.detach()


def by_formula(steps: int, eps: float) -> torch.Tensor:
    x = torch.linspace(-1, 2, 7).double()
    first, second = torch.zeros(2, 7).double()
    for step in range(1, steps + 1):
        gradient = torch.linspace(-0.02, 0.01 * step, 7).double()
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        size = 0.01 * (1 - 0.99**step) ** 0.5 / (1 - 0.9**step)
        x = x * (1 - 0.01 * 0.1) - size * first / (second.sqrt() + eps)
    return x


@pytest.mark.parametrize("eps", [1e-2, 1e-8])
def test_it_has_its_formula(eps: float) -> None:
    torch.testing.assert_close(stepped(early_epsilon(), 4, eps=eps), by_formula(4, eps))


def test_it_differs_from_torchs_by_where_epsilon_is_alone() -> None:
    early, late = (stepped(make, 4, eps=1e-2) for make in (early_epsilon(), torch.optim.AdamW))
    assert float((early - late).abs().max()) > 1e-3
    early, late = (stepped(make, 4, eps=1e-30) for make in (early_epsilon(), torch.optim.AdamW))
    torch.testing.assert_close(early, late)


def test_counterparts_are_kernels_for_all_devices() -> None:
    specs = {(p.spec.operation, p.spec.name): p.spec for p in Registry.load().kernels}
    named = {(s.operation, s.counterpart) for s in specs.values() if s.counterpart}
    assert ("adamw", "early_epsilon") in named
    for each in named:
        assert not specs[each].device_types
        assert specs[each].counterpart == specs[each].name, "it has the other formula itself"
