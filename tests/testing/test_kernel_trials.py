"""The kit's trials of kernels: what is right passes, each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.interface import AttentionKernel, LoraKernel
from anygauge.kernels.rope import apply_rotation
from anygauge.testing.check import Device
from anygauge.testing.kernel_trials import KERNEL_TRIALS
from anygauge_cpu.backend import CpuBackend
from anygauge_hpu.gaudi_kernels import softmax_in_bfloat16, softmax_in_float32
from anygauge_kernels.adamw import early_epsilon
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from anygauge_kernels.lora import addmm, down, up
from anygauge_kernels.softmax import softmax

# -- optimizers and clipping ----------------------------------------------------------------------


class WithoutDecay(torch.optim.AdamW):
    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([{**group, "weight_decay": 0.0} for group in groups], **options)


class OneRate(torch.optim.AdamW):
    def __init__(self, groups: Any, *, lr: float, **options: Any) -> None:
        super().__init__([{**group, "lr": lr} for group in groups], lr=lr, **options)


class CountedSteps(torch.optim.AdamW):
    """Counts for itself, and not from the state that it is given."""

    made = 0

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] = torch.tensor(float(self.made))
        super().step(closure)
        self.made += 1


class CountedByGroup(CountedSteps):
    """As a library whose parameters' own counts stay at zero."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["step"] = 0


class Uncounted(CountedSteps):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            del state["step"]


def always(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    norm = never(parameters, limit)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(limit / norm)
    return norm


def never(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, float("inf"))


def afterwards(parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
    nn.utils.clip_grad_norm_(parameters, limit)
    return never(parameters, limit)


# -- softmax, loss and LoRA -----------------------------------------------------------------------


def deaf(kernel: Callable[..., torch.Tensor], *names: str) -> Callable[..., torch.Tensor]:
    """A kernel that does not hear some of its arguments."""

    def wrong(*given: Any, **named: Any) -> torch.Tensor:
        if kernel is softmax:
            given, named = given[:2], {"mask": given[2], "scale": given[3], **named}
        return kernel(*given, **{name: each for name, each in named.items() if name not in names})

    return wrong


def with_nan(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    found = softmax(x, *given, **named)
    return found / (found.sum(-1, keepdim=True) != 0)


def all_count(hidden: Any, weight: Any, targets: Any, **given: Any) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, targets.clamp(min=0), **given)


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


def lora(**wrong: Any) -> LoraKernel:
    return LoraKernel(**{"down": down, "up": up, **wrong})


# -- attention and positions ----------------------------------------------------------------------


def attention(*, causal: bool) -> AttentionKernel:
    """Torch's, which is or is not causal where there is no mask."""

    def forward(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = nn.functional.scaled_dot_product_attention(
            *(query, key, value, mask),
            is_causal=causal and mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2), None

    return AttentionKernel(name="tried", forward=forward, describe="for tests", causal=True)


def rope(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    return apply_rotation(query, cos, sin), apply_rotation(key, cos, sin)


def without_gradient(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    return apply_rotation(query, cos, sin), apply_rotation(key.detach(), cos, sin) + 0 * key


# -- the table ------------------------------------------------------------------------------------

OURS, LOSS, SAID = "lora_linear", "linear_cross_entropy", "lora_linear wrong"
RIGHT = (
    ("adamw", torch.optim.AdamW, "torch"),
    ("adamw", early_epsilon(), "early_epsilon"),
    ("clip_grad_norm", nn.utils.clip_grad_norm_, "torch"),
    ("softmax", softmax, "ours"),
    ("softmax", softmax_in_bfloat16(), "gaudi_bf16"),
    ("softmax", softmax_in_float32(), "gaudi_fp32"),
    (LOSS, linear_cross_entropy, "ours"),
    (OURS, addmm(), "ours"),
    ("attention", attention(causal=True), "right"),
    ("rope", rope, "right"),
)
WRONG = (
    ("no decay", "adamw", WithoutDecay, "differs by"),
    ("one rate", "adamw", OneRate, "differs by"),
    ("another formula", "adamw", early_epsilon(), "differs by"),  # and nobody has said so
    ("no count", "adamw", Uncounted, "lacks step"),
    ("counted by group", "adamw", CountedByGroup, "step is 0 after 3"),
    ("forgetful", "adamw", CountedSteps, "differs by|forgot its first 3 steps"),
    ("always clipped", "clip_grad_norm", always, "clip_grad_norm wrong"),
    ("never clipped", "clip_grad_norm", never, "clip_grad_norm wrong"),
    ("the norm afterwards", "clip_grad_norm", afterwards, "clip_grad_norm wrong"),
    *(
        (f"softmax without {name}", "softmax", deaf(softmax, name), "softmax wrong")
        for name in ("mask", "scale", "causal_offset")
    ),
    ("NaN in empty rows", "softmax", with_nan, "softmax wrong"),
    ("softmax in another type", "softmax", lambda x, *a, **k: softmax(x, *a, **k).float(),
     "softmax wrong: torch.float32 of torch.bfloat16"),
    *(
        (f"loss without {name}", LOSS, deaf(linear_cross_entropy, name), f"{LOSS} wrong")
        for name in ("bias", "low_rank", "softcap", "scale")
    ),
    ("all targets count", LOSS, all_count, f"{LOSS} wrong"),
    ("no scale", OURS, lora(up=lambda out, low, w, scale: up(out, low, w, 1.0)), SAID),
    ("no base gradient", OURS, lora(up=lambda out, *a: up(out.detach(), *a)), SAID),
    ("another type", OURS, lora(up=lambda *a: up(*a).double()), SAID),
    ("no dropout", OURS, lora(down=lambda x, w, rate: down(x, w, 0.0)), SAID),
    ("not scaled up", OURS, lora(down=lambda x, w, rate: down(x, w, rate) * (1 - rate)), SAID),
    ("no gradient", OURS, lora(down=lambda x, w, rate: down(x.detach(), w, rate)), SAID),
    ("drawn twice", OURS, lora(down=DroppedTwice.apply), SAID),
    ("not causal", "attention", attention(causal=False),
     "attention wrong without a mask, which it says"),
    ("positions of the first row", "rope", lambda q, k, cos, sin: rope(q, k, cos[:1], sin[:1]),
     "rope wrong"),
    ("turned backwards", "rope", lambda q, k, cos, sin: rope(q, k, cos, -sin), "rope wrong"),
    ("key left", "rope", lambda q, k, cos, sin: (rope(q, k, cos, sin)[0], k), "rope wrong"),
    ("key without gradient", "rope", without_gradient, "rope wrong"),
)  # fmt: skip


@pytest.fixture
def on() -> Device:
    backend = CpuBackend()
    return Device(backend=backend, device=torch.device("cpu"), fresh=CpuBackend)


@pytest.mark.parametrize(("operation", "kernel", "name"), RIGHT)
def test_what_is_right_passes(on: Device, operation: str, kernel: Any, name: str) -> None:
    KERNEL_TRIALS[operation](on, kernel, name)


@pytest.mark.parametrize(
    ("operation", "kernel", "said"), [line[1:] for line in WRONG], ids=[line[0] for line in WRONG]
)
def test_what_is_wrong_is_found(on: Device, operation: str, kernel: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        KERNEL_TRIALS[operation](on, kernel, "wrong")


def test_an_adamw_that_names_another_formula_must_have_it(on: Device) -> None:
    with pytest.raises(AssertionError, match="differs by"):
        KERNEL_TRIALS["adamw"](on, torch.optim.AdamW, "early_epsilon")
