"""Each optimizer against its formula in float64, over several steps with decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge.config.sections import OptimizerSection
from anygauge.training.optimizer import optimizer_factory
from anygauge_kernels.adamw import early_epsilon

Step = Callable[[Tensor, Tensor, dict[str, Any], int, float, float], Tensor]
"""(parameter, gradient, state, step from 1, lr, decay) -> new parameter, all float64."""


def adamw(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g * g
    mean, square = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - lr * decay * p - lr * mean / (square.sqrt() + 1e-8)


def early_adamw(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    """Epsilon is added before the second moment's bias is corrected; 1e-2, so that it shows."""
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g * g
    size = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
    return p - lr * decay * p - size * s["m"] / (s["v"].sqrt() + 1e-2)


def lion(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    m = s.get("m", torch.zeros_like(p))
    s["m"] = 0.99 * m + 0.01 * g
    return p - lr * (torch.sign(0.9 * m + 0.1 * g) + decay * p)


def sgd(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0.0) + g
    return p - lr * (s["m"] + decay * p)


def adafactor(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    keep, square = 1 - t**-0.8, g * g
    if p.dim() == 1:
        s["v"] = keep * s.get("v", 0.0) + (1 - keep) * square
        estimate = s["v"]
    else:
        s["r"] = keep * s.get("r", 0.0) + (1 - keep) * square.mean(1)
        s["c"] = keep * s.get("c", 0.0) + (1 - keep) * square.mean(0)
        estimate = torch.outer(s["r"], s["c"]) / s["r"].mean()
    update = g / estimate.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    size = max(1e-3, float(p.square().mean().sqrt())) * min(lr, 1 / math.sqrt(t))
    return p - lr * decay * p - size * update


EARLY = "adamw, a device's own"
REFERENCES: dict[str, Step] = {
    "adamw": adamw,
    EARLY: early_adamw,
    "adamw_8bit": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "sgd": sgd,
}


def made(name: str, parameters: Iterable[tuple[str, nn.Parameter]], **fields: Any) -> Any:
    """An optimizer; for a device's own, what stands in for its kernel elsewhere."""
    if name == EARLY:
        section = OptimizerSection(name="adamw", eps=1e-2, **fields)
        return optimizer_factory(section, early_epsilon())(parameters)
    return optimizer_factory(OptimizerSection(name=name, **fields))(parameters)


RATES = (0.02, 0.03, 0.01, 0.02)


@pytest.mark.parametrize("name", REFERENCES)
def test_follows_its_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {
        "w": torch.randn(64, 80, generator=generator),
        "b": torch.randn(7, generator=generator),
    }
    parameters = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = made(name, parameters.items(), lr=RATES[0], weight_decay=0.3)
    expected = {key: value.double() for key, value in values.items()}
    states: dict[str, dict[str, Any]] = {"w": {}, "b": {}}
    for step, lr in enumerate(RATES, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for key, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
            expected[key] = REFERENCES[name](
                expected[key], gradient.double(), states[key], step, lr, 0.3 if key == "w" else 0.0
            )
        optimizer.step()
    moved = {key: (expected[key] - values[key]).abs().mean() for key in values}
    for key, parameter in parameters.items():
        error = (parameter.detach().double() - expected[key]).abs()
        # Codes of 8 bits are off by percents of their block's largest; the mean update by less.
        quantised = name == "adamw_8bit" and key == "w"
        assert error.mean() < (0.03 if quantised else 1e-5) * moved[key], key
        assert not quantised or error.max() > 1e-6, "the moments were not quantised"


def test_state_is_of_the_parameters_shape() -> None:
    """What a checkpoint relies on."""
    shapes = {}
    for name in REFERENCES:
        parameter = nn.Parameter(torch.randn(64, 80))
        parameter.grad = torch.randn(64, 80)
        optimizer = made(name, [("w", parameter)])
        optimizer.step()
        shapes[name] = {
            key: tuple(value.shape) if isinstance(value, Tensor) else type(value)
            for key, value in optimizer.state[parameter].items()
        }
    whole = (64, 80)
    assert shapes == {
        **{key: {"step": (), "exp_avg": whole, "exp_avg_sq": whole} for key in ("adamw", EARLY)},
        "adamw_8bit": {
            "step": int,
            "state1": whole,
            "state2": whole,
            "absmax1": (20,),
            "absmax2": (20,),
            "qmap1": (256,),
            "qmap2": (256,),
        },
        "adafactor": {"step": (), "row_var": (64, 1), "col_var": (1, 80)},
        "lion": {"exp_avg": whole},
        "sgd": {"momentum_buffer": whole},
    }


def test_momentum_zero_keeps_no_state() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 0.5)
    section = OptimizerSection(name="sgd", lr=0.1, momentum=0.0)
    optimizer = optimizer_factory(section)([("w", parameter)])
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((2, 2), 0.95))
    assert not optimizer.state[parameter]
