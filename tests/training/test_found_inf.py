"""Optimizers that take ``found_inf``: steps are usual where it is 0, and all stays where it is 1"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.strategies.shared.finite import FiniteSteps, scaled
from anygauge.training import optimizer as optimizers
from anygauge.training.optimizer import Adafactor, DecoupledSGD, Lion, with_found_inf

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "several tensors at once": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "one after another": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "lion": lambda groups: Lion(groups, lr=1e-2, betas=(0.9, 0.99)),
    "sgd": lambda groups: DecoupledSGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-2),
}


def trained(make: Make) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Matrices and vectors, of which one has never a gradient."""
    torch.manual_seed(0)
    shapes = [(7, 5), (9,), (30, 40), (3,), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [
        {
            "params": [p for p in parameters if (p.dim() == 2) is matrices],
            "matrices": matrices,
            "weight_decay": 0.1 * matrices,
            "lr": 1e-2,
        }
        for matrices in (True, False)
    ]
    return parameters, make(groups)


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("at_once", [1, 50, 10**6])
def test_finite_steps_are_the_optimizers_own_until_one_is_not(
    make: Make, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "UPDATED_AT_ONCE", at_once)
    wanted, plain = trained(make)
    found, optimizer = trained(make)
    steps = FiniteSteps(with_found_inf(optimizer))
    for seed in range(3):
        gradients(wanted, seed)
        plain.step()
        gradients(found, seed)
        steps.step(torch.tensor(1.0))
    assert all(map(torch.equal, found, wanted))
    assert not hasattr(optimizer, "found_inf")
    for norm in (torch.nan, 1.0, torch.inf):
        gradients(found, 7)
        if norm != 1.0:
            found[2].grad[3, 4] = norm
        steps.step(torch.tensor(norm))
        assert all(map(torch.equal, found, wanted)), "also after the one that was not finite"


def test_an_optimizer_that_cannot_is_refused() -> None:
    _, optimizer = trained(MAKERS["several tensors at once"])
    with pytest.raises(TypeError, match="AdamW does not take found_inf"):
        FiniteSteps(optimizer)


@pytest.mark.parametrize("factor", [1.0, 0.3, 2.0**16 / 7])
def test_a_finite_loss_has_the_gradient_that_it_would_have(factor: float) -> None:
    x = torch.linspace(-3, 5, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(scaled((x**3).sum(), factor), x)
    (wanted,) = torch.autograd.grad((x**3).sum() * factor, x)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_makes_its_gradient_so(bad: float) -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(scaled(x.sum() + bad, 0.5), x)
    assert not gradient.isfinite().any()
