"""The kit's trials of update kernels: what is right passes, each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.testing.kernel_trials import KERNEL_TRIALS
from anygauge.testing.opened import Opened
from anygauge_cpu.backend import CpuBackend


@pytest.fixture
def on() -> Opened:
    backend = CpuBackend()
    return Opened(backend=backend, device=torch.device("cpu"), visible=1, fresh=CpuBackend)


class WithoutDecay(torch.optim.AdamW):
    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([{**group, "weight_decay": 0.0} for group in groups], **options)


class OneRate(torch.optim.AdamW):
    def __init__(self, groups: Any, *, lr: float, **options: Any) -> None:
        super().__init__([{**group, "lr": lr} for group in groups], lr=lr, **options)


class Uncounted(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] = state.pop("count")
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.pop("step")


class CountedByGroup(torch.optim.AdamW):
    """As a library whose parameters' own counts stay at zero."""

    made = 0

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] = torch.tensor(float(self.made))
        super().step(closure)
        self.made += 1
        for state in self.state.values():
            state["step"] = 0


class Frozen(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        kept = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        super().step(closure)
        with torch.no_grad():
            for group, values in zip(self.param_groups, kept, strict=True):
                for parameter, value in zip(group["params"], values, strict=True):
                    parameter.copy_(value)


class Forgetful(torch.optim.AdamW):
    """Counts for itself, and not from the state that it is given."""

    made = 0

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] = torch.tensor(float(self.made))
        super().step(closure)
        self.made += 1


def test_torchs_adamw_is_right(on: Opened) -> None:
    KERNEL_TRIALS["adamw"](on, torch.optim.AdamW, "torch")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (WithoutDecay, "differs by"),
        (OneRate, "differs by"),
        (Frozen, "differs by"),
        (Uncounted, "lacks step"),
        (CountedByGroup, "step is 0 after 3"),
        (Forgetful, "differs by|forgot its first 3 steps"),
    ],
)
def test_a_wrong_adamw_is_found(on: Opened, wrong: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        KERNEL_TRIALS["adamw"](on, wrong, "wrong")


def each_alone(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters]))  # type: ignore[union-attr]
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], limit)
    return norm


def always(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    norm = nn.utils.clip_grad_norm_(parameters, float("inf"))
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(limit / norm)
    return norm


def never(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, float("inf"))


def afterwards(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    nn.utils.clip_grad_norm_(parameters, limit)
    return never(parameters, limit)


def test_torchs_clipping_is_right(on: Opened) -> None:
    KERNEL_TRIALS["clip_grad_norm"](on, nn.utils.clip_grad_norm_, "torch")


@pytest.mark.parametrize("wrong", [each_alone, always, never, afterwards])
def test_wrong_clipping_is_found(on: Opened, wrong: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match="clip_grad_norm wrong"):
        KERNEL_TRIALS["clip_grad_norm"](on, wrong, "wrong")
