"""The kit's trials of kernels: what is right passes, each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.interface import AttentionKernel, LoraKernel
from anygauge.kernels.rope import rotated
from anygauge.testing.check import Opened
from anygauge.testing.kernel_trials import KERNEL_TRIALS
from anygauge_cpu.backend import CpuBackend
from anygauge_hpu.kernels import softmax_in_bfloat16, softmax_in_float32
from anygauge_kernels.adamw import early_epsilon
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from anygauge_kernels.lora import addmm, down, up
from anygauge_kernels.softmax import softmax


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
        (early_epsilon(), "differs by"),  # and nobody has said so
    ],
)
def test_a_wrong_adamw_is_found(on: Opened, wrong: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        KERNEL_TRIALS["adamw"](on, wrong, "wrong")


def test_an_adamw_of_another_formula_must_have_it(on: Opened) -> None:
    KERNEL_TRIALS["adamw"](on, early_epsilon(), "early_epsilon")
    with pytest.raises(AssertionError, match="differs by"):
        KERNEL_TRIALS["adamw"](on, torch.optim.AdamW, "early_epsilon")


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


def without(*arguments: str) -> Callable[..., torch.Tensor]:
    """Our softmax, deaf to some arguments."""

    def wrong(
        x: torch.Tensor,
        dim: int = -1,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        *,
        causal_offset: int | None = None,
    ) -> torch.Tensor:
        given: dict[str, Any] = {"mask": mask, "scale": scale, "causal_offset": causal_offset}
        return softmax(x, dim, **{k: v for k, v in given.items() if k not in arguments})

    return wrong


def with_nan(x: torch.Tensor, dim: int, mask: Any, scale: float, causal_offset: Any) -> Any:
    empty = softmax(x, dim, mask, scale, causal_offset=causal_offset).sum(-1, keepdim=True) == 0
    return softmax(x, dim, mask, scale, causal_offset=causal_offset) / (~empty)


def test_our_softmax_and_loss_are_right(on: Opened) -> None:
    KERNEL_TRIALS["softmax"](on, softmax, "ours")
    KERNEL_TRIALS["linear_cross_entropy"](on, linear_cross_entropy, "ours")


def test_gaudis_softmax_is_right_too(on: Opened) -> None:
    KERNEL_TRIALS["softmax"](on, softmax_in_bfloat16(), "gaudi_bf16")
    KERNEL_TRIALS["softmax"](on, softmax_in_float32(), "gaudi_fp32")


@pytest.mark.parametrize(
    "wrong", [without("mask"), without("scale"), without("causal_offset"), with_nan]
)
def test_a_wrong_softmax_is_found(on: Opened, wrong: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match="softmax wrong"):
        KERNEL_TRIALS["softmax"](on, wrong, "wrong")


def test_a_softmax_in_another_type_is_found(on: Opened) -> None:
    with pytest.raises(AssertionError, match=r"softmax wrong: torch.float32 of torch.bfloat16"):
        KERNEL_TRIALS["softmax"](on, lambda x, *a, **k: softmax(x, *a, **k).float(), "wrong")


@pytest.mark.parametrize(
    "deaf_to", ["bias", "low_rank", "softcap", "scale", "label_smoothing", "targets"]
)
def test_a_wrong_loss_is_found(on: Opened, deaf_to: str) -> None:
    def wrong(hidden: Any, weight: Any, targets: Any, **given: Any) -> torch.Tensor:
        given.pop(deaf_to, None)
        if deaf_to == "targets":
            targets = targets.clamp(min=0)
        return linear_cross_entropy(hidden, weight, targets, **given)

    with pytest.raises(AssertionError, match="linear_cross_entropy wrong"):
        KERNEL_TRIALS["linear_cross_entropy"](on, wrong, "wrong")


class DroppedTwice(torch.autograd.Function):
    """Backward draws anew."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dropout: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dropout = dropout
        return nn.functional.dropout(x, dropout) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return nn.functional.dropout(grad @ weight, ctx.dropout), of_weight, None


def test_our_lora_is_right(on: Opened) -> None:
    KERNEL_TRIALS["lora_linear"](on, addmm(), "ours")


@pytest.mark.parametrize(
    "wrong",
    [
        {"up": lambda output, low, weight, scale: up(output, low, weight, 1.0)},
        {"up": lambda output, low, weight, scale: up(output.detach(), low, weight, scale)},
        {"up": lambda output, low, weight, scale: up(output, low, weight, scale).double()},
        {"down": lambda x, weight, dropout: down(x, weight, 0.0)},
        {"down": lambda x, weight, dropout: down(x, weight, dropout) * (1 - dropout)},
        {"down": lambda x, weight, dropout: down(x.detach(), weight, dropout)},
        {"down": DroppedTwice.apply},
    ],
    ids=["no scale", "no base gradient", "another type", "no dropout", "not scaled up",
         "no gradient", "drawn twice"],
)  # fmt: skip
def test_wrong_lora_is_found(on: Opened, wrong: dict[str, Any]) -> None:
    kernel = LoraKernel(**{"down": down, "up": up, **wrong})
    with pytest.raises(AssertionError, match="lora_linear wrong"):
        KERNEL_TRIALS["lora_linear"](on, kernel, "wrong")


def attention(*, causal: bool) -> AttentionKernel:
    """Torch's, which is or is not causal where there is no mask."""

    def forward(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=causal and mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2), None

    return AttentionKernel(name="tried", forward=forward, describe="for tests", causal=True)


def test_an_attention_that_says_it_is_causal_is_tried_without_a_mask(on: Opened) -> None:
    KERNEL_TRIALS["attention"](on, attention(causal=True), "right")
    with pytest.raises(AssertionError, match="attention wrong without a mask, which it says"):
        KERNEL_TRIALS["attention"](on, attention(causal=False), "wrong")


def test_rotations_are_tried_with_positions_of_each_row_and_of_all(on: Opened) -> None:
    def right(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return rotated(query, cos, sin), rotated(key, cos, sin)

    def of_the_first_row(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return right(query, key, cos[:1], sin[:1])

    def backwards(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return right(query, key, cos, -sin)

    def key_left(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return rotated(query, cos, sin), key

    def without_gradient(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        found = rotated(key.detach(), cos, sin)
        return rotated(query, cos, sin), found + 0 * key

    KERNEL_TRIALS["rope"](on, right, "right")
    for wrong in (of_the_first_row, backwards, key_left, without_gradient):
        with pytest.raises(AssertionError, match="rope wrong"):
            KERNEL_TRIALS["rope"](on, wrong, "wrong")
