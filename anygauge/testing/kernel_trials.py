"""How a kernel of each operation is tried on a device, against float64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from anygauge.interface import HOST_DEVICE
from anygauge.kernels.rope import apply_rotation
from anygauge.models.inputs import FORMS, MaskPlan, visible
from anygauge.registry import Registry
from anygauge.registry.specs import load_factory
from anygauge.testing.check import TOLERANCE, Device


def _kernel_type(on: Device) -> torch.dtype:
    return torch.bfloat16 if on.backend.support("bfloat16") else torch.float32


def _compare(on: Device, found: Any, wanted: Tensor, what: str, dtype: str = "") -> None:
    assert found.device.type == on.device.type, f"{what}: the result is on {found.device}"
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}"
    got = found.detach().to(HOST_DEVICE, torch.float64)
    error = float((got - wanted).abs().max() / wanted.abs().max())
    allowed = 4 * TOLERANCE[dtype or str(_kernel_type(on)).removeprefix("torch.")]
    assert error <= allowed, f"{what} differs by {error:.1e} of its largest value; {allowed:.0e}"


def _draw(on: Device, *shapes: Sequence[int], seed: int = 4) -> list[Tensor]:
    """Normal values in the type that kernels are tried in, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(_kernel_type(on)) for shape in shapes]


def _try_kernel(
    on: Device,
    what: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    others: Sequence[Any] = (),
) -> None:
    """Results and gradients of a kernel on the device are those of its formula in float64.

    Args:
        kernel, reference: get the inputs and the others.
        others: have no gradients.
    """
    there: list[Any] = [each.to(on.device, copy=True).requires_grad_() for each in inputs]
    here: list[Any] = [each.double().requires_grad_() for each in inputs]
    moved = [each.to(on.device) if isinstance(each, Tensor) else each for each in others]
    found, wanted = kernel(*there, *moved), reference(*here, *others)
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (found, wanted)), strict=True)
    for mine, its in pairs:
        due = inputs[0].dtype if its.dim() else torch.float32  # a loss
        assert mine.dtype is due, f"{what}: {mine.dtype} of {inputs[0].dtype}"
        _compare(on, mine, its.detach(), what)
        above = torch.randn(its.shape, generator=torch.Generator().manual_seed(5))
        (mine * above.to(on.device)).sum().backward()
        (its * above.double()).sum().backward()
    for number, (mine, its) in enumerate(zip(there, here, strict=True)):
        assert mine.grad is not None, f"{what} has no gradient {number}"
        _compare(on, mine.grad, its.grad, f"gradient {number} of {what}")


def softmax(on: Device, kernel: Any, name: str) -> None:
    """Plain; and scaled, with each kind of mask and a causal offset, an empty row among them."""
    x = torch.linspace(-8, 8, 2 * 6 * 33).reshape(2, 6, 33).to(_kernel_type(on))
    seen = torch.arange(2 * 33).reshape(2, 1, 33) % 3 != 0
    seen[1] = False
    cases: Mapping[str, tuple[Tensor | None, float, int | None]] = {
        "": (None, 1.0, None),
        ", scaled and causal": (None, 0.3, 2),
        ", boolean mask, scaled and causal": (seen, 0.3, 27),
        ", additive mask": (torch.where(seen, 0.5, -torch.inf), 0.3, None),
    }

    def tried(x: Tensor, mask: Tensor | None, scale: float, offset: int | None) -> Any:
        return kernel(x, -1, mask, scale, causal_offset=offset)

    def formula(x: Tensor, mask: Tensor | None, scale: float, offset: int | None) -> Tensor:
        scores = x * scale
        if mask is not None:
            boolean = mask.dtype is torch.bool
            scores = scores + (torch.where(mask, 0.0, -torch.inf) if boolean else mask)
        if offset is not None:
            late = ~torch.ones(x.shape[1:], dtype=torch.bool).tril(offset)
            scores = scores.masked_fill(late, -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)

    for what, others in cases.items():
        _try_kernel(on, f"softmax {name}{what}", tried, formula, [x], others)


def linear_cross_entropy(on: Device, kernel: Any, name: str) -> None:
    """Plain; and with everything that an architecture or an adapter may ask for."""
    rows, classes, rank = 19, 67, 4
    tensors = _draw(on, (rows, 16), (classes, 16), (classes,), (rows, rank), (classes, rank))
    targets = torch.arange(rows) * 37 % classes
    targets[::4] = -100

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return nn.cross_entropy(hidden @ weight.t(), targets, reduction="sum")

    def full(h: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor, y: Tensor) -> Any:
        logits = 6.0 * torch.tanh((h @ weight.t() + bias + down @ up.t()) * 0.5 / 6.0)
        return nn.cross_entropy(logits, y, reduction="sum")

    def tried(h: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor, y: Tensor) -> Any:
        return kernel(h, weight, y, bias=bias, low_rank=(down, up), softcap=6.0, scale=0.5)

    what = f"linear_cross_entropy {name}"
    _try_kernel(on, what, kernel, plain, tensors[:2], [targets])
    _try_kernel(on, what, tried, full, tensors, [targets])


def rms_norm(on: Device, kernel: Any, name: str) -> None:
    """Try rows that are not centred."""
    x = torch.linspace(-2, 3, 5 * 32).reshape(5, 32).to(_kernel_type(on))
    weight = torch.linspace(0.5, 2, 32).to(_kernel_type(on))

    def formula(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    _try_kernel(on, f"rms_norm {name}", kernel, formula, [x], [weight, 1e-5])


def rope(on: Device, kernel: Any, name: str) -> None:
    """Positions of each row's own, and such as all rows share; both results and gradients."""
    inputs = _draw(on, (2, 4, 9, 16), (2, 2, 9, 16), seed=7)

    def formula(query: Tensor, key: Tensor, *turns: Tensor) -> list[Tensor]:
        return [apply_rotation(each, *(turn.double() for turn in turns)) for each in (query, key)]

    for rows in (2, 1):
        angles = 3 * _draw(on, (rows, 9, 8))[0].float().repeat(1, 1, 2)
        turns = [each.to(_kernel_type(on)) for each in (angles.cos(), angles.sin())]
        _try_kernel(on, f"rope {name} of {rows} rows' positions", kernel, formula, inputs, turns)


def attention(on: Device, kernel: Any, name: str) -> None:
    """Grouped heads, a row of two documents and padding, causal. One that says that it is causal
    without a mask is tried without one, too."""
    inputs = _draw(on, (2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16), seed=3)
    module = torch.nn.Module()
    documents = torch.tensor([[1] * 9, [1, 1, 1, 2, 2, 2, 2, 2, 0]])
    forms = MaskPlan(FORMS.get(kernel.mask, "additive"))
    cases = []
    if kernel.trains_with_mask:
        mask = forms.masks(documents.to(on.device), inputs[0].dtype)
        cases.append(("", mask, visible(documents)))
    if kernel.causal:
        seen = visible(torch.ones_like(documents))
        cases.append((" without a mask, which it says is causal,", None, seen))
    assert cases, f"attention {name} says that it trains neither with a mask nor causal"

    def tried(*given: Any) -> Any:
        return kernel.forward(module, *given[:4], scaling=0.25, dropout=0.0)[0]

    def formula(query: Tensor, key: Tensor, value: Tensor, _: Any, seen: Tensor) -> Tensor:
        keys, values = (each.repeat_interleave(2, dim=1) for each in (key, value))
        scores = query @ keys.transpose(2, 3) * 0.25
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        return (torch.softmax(scores, -1) @ values).transpose(1, 2)

    for what, *masks in cases:
        _try_kernel(on, f"attention {name}{what}", tried, formula, inputs, masks)


def lora_linear(on: Device, kernel: Any, name: str) -> None:
    """Three dimensions, a scale, and the gradient of each tensor; what is dropped is the rest's."""
    what = f"lora_linear {name}"
    inputs = _draw(on, (2, 9, 24), (2, 9, 12), (4, 12), (24, 4), seed=6)

    def tried(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Any:
        return kernel.up(out, kernel.down(x, a, 0.0), b, 1.5)

    _try_kernel(on, what, tried, lambda out, x, a, b: out + 1.5 * (x @ a.t()) @ b.t(), inputs)
    # Products with a unit matrix show which inputs were dropped; the others are scaled.
    x = torch.ones(1, 64, dtype=_kernel_type(on), device=on.device).requires_grad_()
    kept = kernel.down(x, torch.eye(64, dtype=x.dtype).to(on.device), 0.5)
    kept.sum().backward()
    assert x.grad is not None, f"{what}: no gradient of what was dropped"
    # In one transfer: a device that records may draw anew for each graph that it runs.
    forward, backward = torch.stack([kept.detach(), x.grad]).cpu().double()
    drawn = set(forward.unique().tolist())
    assert drawn == {0.0, 2.0}, f"{what}: ones with dropout 0.5 became {drawn}"
    same = torch.equal(backward, forward)
    assert same, f"{what}: what is dropped backward is not what was dropped forward"


def adamw(on: Device, kernel: Any, name: str) -> None:
    """Three steps of two groups, one with decay, and three more from the state alone.

    Epsilon is as large as the smallest gradients: it must be added where torch does, or where the
    kernel's counterpart does.
    """
    values = [torch.linspace(-1, 2, 12).reshape(3, 4), torch.linspace(1, 2, 5)]
    there = [torch.nn.Parameter(each.to(on.device)) for each in values]
    here = [torch.nn.Parameter(each.double()) for each in values]

    def made(optimizer: Any, parameters: Sequence[Any]) -> Any:
        rates = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 5e-3, "weight_decay": 0.0})
        groups = [{"params": [p], **rate} for p, rate in zip(parameters, rates, strict=True)]
        return optimizer(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-2)

    def steps(*optimizers: Any) -> None:
        for step in range(3):
            for parameter in (*here, *there):
                gradient = torch.linspace(-2, 1 + step, parameter.numel())
                parameter.grad = gradient.reshape(parameter.shape).to(parameter)
            for optimizer in optimizers:
                optimizer.step()

    wanted, found, resumed = made(_reference(name), here), made(kernel, there), made(kernel, there)
    steps(wanted, found)
    for parameter in there:
        state = found.state[parameter]
        missing = {"exp_avg", "exp_avg_sq", "step"} - state.keys()
        assert not missing, f"adamw {name}: its state lacks {', '.join(sorted(missing))}"
        assert int(state["step"]) == 3, f"adamw {name}: step is {state['step']} after 3"
        assert state["exp_avg"].shape == parameter.shape, f"adamw {name}: a moment's shape"
        resumed.state[parameter].update(state)
    steps(wanted, resumed)
    for mine, its in zip(there, here, strict=True):
        _compare(on, mine, its.detach(), f"adamw {name}", "float32")
        assert int(resumed.state[mine]["step"]) == 6, f"adamw {name}: it forgot its first 3 steps"


def _reference(name: str) -> Any:
    """The optimizer of all devices that computes as an AdamW of that name: its counterpart."""
    kernels = [each for each in Registry.load().kernels if each.spec.operation == "adamw"]
    provided = {each.spec.name: each for each in kernels}
    counterpart = provided[name].spec.counterpart if name in provided else ""
    if not counterpart:
        return torch.optim.AdamW
    served = counterpart in provided and not provided[counterpart].spec.device_types
    assert served, f"adamw {name}: its counterpart {counterpart} is none for all devices"
    return load_factory(provided[counterpart])()


def clip_grad_norm(on: Device, kernel: Any, name: str) -> None:
    """A norm above the limit, which is clipped to it, and one below, which is left alone."""
    gradients = [torch.linspace(-3, 4, 12).reshape(3, 4), torch.linspace(0, 2, 5)]
    norm = float(torch.cat([g.double().flatten() for g in gradients]).norm())
    parameters = [torch.nn.Parameter(torch.zeros_like(g).to(on.device)) for g in gradients]
    for limit in (0.5, 100.0):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(on.device, copy=True)
        found = float(kernel(parameters, limit))
        assert abs(found - norm) <= 1e-3 * norm, f"clip_grad_norm {name}: norm {found}, not {norm}"
        for parameter, gradient in zip(parameters, gradients, strict=True):
            wanted = gradient.double() * min(1.0, limit / norm)
            _compare(on, parameter.grad, wanted, f"clip_grad_norm {name} to {limit}", "float32")


_TRIALS: Sequence[Callable[[Device, Any, str], None]] = (
    *(adamw, attention, clip_grad_norm, linear_cross_entropy),
    *(lora_linear, rms_norm, rope, softmax),
)
KERNEL_TRIALS = {trial.__name__: trial for trial in _TRIALS}
"""How a kernel of each operation is tried; the operations of `anygauge.interface.kernels`."""
