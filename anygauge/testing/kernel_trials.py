"""How a kernel of each operation is tried on a device, against float64 on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from anygauge.interface import HOST_DEVICE, UnsupportedError
from anygauge.kernels.rope import rotated
from anygauge.registry import Registry
from anygauge.registry.registry import load_factory
from anygauge.testing.check import TOLERANCE, Opened


def _kernel_type(on: Opened) -> str:
    return "bfloat16" if on.backend.support("bfloat16") else "float32"


def _agrees(
    on: Opened, found: torch.Tensor, wanted: torch.Tensor, what: str, dtype: str | None = None
) -> None:
    assert found.device.type == on.device.type, f"{what}: the result is on {found.device}"
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}"
    got = found.detach().to(HOST_DEVICE, torch.float64)
    error = float((got - wanted).abs().max() / wanted.abs().max())
    allowed = 4 * TOLERANCE[dtype or _kernel_type(on)]
    assert error <= allowed, f"{what} differs by {error:.1e} of its largest value; {allowed:.0e}"


def _gradients_agree(
    on: Opened, there: Sequence[torch.Tensor], here: Sequence[torch.Tensor], what: str
) -> None:
    for number, (mine, its) in enumerate(zip(there, here, strict=True)):
        assert mine.grad is not None and its.grad is not None, f"{what} has no gradient {number}"
        _agrees(on, mine.grad, its.grad, f"gradient {number} of {what}")


def _softmax_trial(on: Opened, kernel: Any, name: str) -> None:
    """Plain; and scaled, with each kind of mask and a causal offset, an empty row among them."""
    dtype = getattr(torch, _kernel_type(on))
    x = torch.linspace(-8, 8, 2 * 6 * 33).reshape(2, 6, 33).to(dtype)
    seen = torch.arange(2 * 33).reshape(2, 1, 33) % 3 != 0
    seen[1] = False
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    for what, mask, scale, offset in (
        ("", None, 1.0, None),
        (", scaled and causal", None, 0.3, 2),
        (", boolean mask", seen, 1.0, None),
        (", boolean mask, scaled and causal", seen, 0.3, 27),
        (", additive mask", torch.where(seen, 0.5, -torch.inf), 0.3, None),
    ):
        there = x.to(on.device, copy=True).requires_grad_()
        moved = None if mask is None else mask.to(on.device)
        found = kernel(there, -1, moved, scale, causal_offset=offset)
        assert found.dtype is dtype, f"softmax {name}: {found.dtype} of {dtype}"
        (found * upstream.to(on.device)).sum().backward()
        here = x.double().requires_grad_()
        scores = here * scale
        if mask is not None:
            bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype is torch.bool else mask
            scores = scores + bias
        if offset is not None:
            late = ~torch.ones(x.shape[1:], dtype=torch.bool).tril(offset)
            scores = scores.masked_fill(late, -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        wanted = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        (wanted * upstream.double()).sum().backward()
        assert there.grad is not None and here.grad is not None, f"softmax {name} has no gradient"
        _agrees(on, found, wanted.detach(), f"softmax {name}{what}")
        _agrees(on, there.grad, here.grad, f"gradient of softmax {name}{what}")


def _loss_trial(on: Opened, kernel: Any, name: str) -> None:
    """Plain; and with everything that an architecture or an adapter may ask for."""
    dtype = getattr(torch, _kernel_type(on))
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, width, classes, rank = 19, 16, 67, 4
    tensors = [normal(rows, width), normal(classes, width), normal(classes)]
    tensors += [normal(rows, rank), normal(classes, rank)]
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[::4] = -100
    for full in (False, True):
        used = tensors if full else tensors[:2]
        there = [t.to(on.device, copy=True).requires_grad_() for t in used]
        here = [t.double().requires_grad_() for t in used]
        extra: dict[str, Any] = {}
        if full:
            extra = {"bias": there[2], "low_rank": (there[3], there[4]), "softcap": 6.0}
            extra |= {"scale": 0.5, "label_smoothing": 0.1}
        found = kernel(there[0], there[1], targets.to(on.device), **extra)
        assert found.shape == () and found.dtype is torch.float32, f"loss {name}: {found.dtype}"
        logits = here[0] @ here[1].t()
        if full:
            logits = logits + here[2] + here[3] @ here[4].t()
            logits = 6.0 * torch.tanh(logits * 0.5 / 6.0)
        wanted = torch.nn.functional.cross_entropy(
            logits, targets, label_smoothing=0.1 if full else 0.0, reduction="sum"
        )
        (found * 0.5).backward()
        (wanted * 0.5).backward()
        _agrees(on, found, wanted.detach(), f"linear_cross_entropy {name}")
        _gradients_agree(on, there, here, f"linear_cross_entropy {name}")


def _rms_norm_trial(on: Opened, kernel: Any, name: str) -> None:
    dtype = getattr(torch, _kernel_type(on))
    x, weight = torch.linspace(-2, 3, 5 * 32).reshape(5, 32).to(dtype), torch.linspace(0.5, 2, 32)
    weight = weight.to(dtype)
    there = x.to(on.device, copy=True).requires_grad_()
    out = kernel(there, weight.to(on.device), 1e-5)
    out.float().sum().backward()
    here = x.double().requires_grad_()
    wanted = weight.double() * here * torch.rsqrt(here.pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted.sum().backward()
    assert there.grad is not None and here.grad is not None, f"rms_norm {name} has no gradient"
    _agrees(on, out, wanted.detach(), f"rms_norm {name}")
    _agrees(on, there.grad, here.grad, f"gradient of rms_norm {name}")


def _rope_trial(on: Opened, kernel: Any, name: str) -> None:
    """Positions of each row's own, and such as all rows share; both results and gradients."""
    dtype = getattr(torch, _kernel_type(on))
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(2, heads, 9, 16, generator=generator).to(dtype) for heads in (4, 2)]
    for rows in (2, 1):
        angles = 3 * torch.randn(rows, 9, 8, generator=generator).repeat(1, 1, 2)
        turns = (angles.cos().to(dtype), angles.sin().to(dtype))
        there = [each.to(on.device, copy=True).requires_grad_() for each in given]
        here = [each.double().requires_grad_() for each in given]
        found = kernel(*there, *(turn.to(on.device) for turn in turns))
        what = f"rope {name} of {rows} rows' positions"
        for mine, x in zip(found, here, strict=True):
            wanted = rotated(x, *(turn.double() for turn in turns))
            upstream = torch.randn(wanted.shape, generator=generator)
            (mine * upstream.to(on.device)).sum().backward()
            (wanted * upstream.double()).sum().backward()
            assert mine.dtype is dtype, f"{what}: {mine.dtype} of {dtype}"
            _agrees(on, mine, wanted.detach(), what)
        _gradients_agree(on, there, here, what)


def _attention_trial(on: Opened, kernel: Any, name: str) -> None:
    """Grouped heads, a padded row, causal: forward and gradient of the query. One that says that it
    is causal without a mask is tried without one, too."""
    causal = torch.ones(9, 9).tril().bool().expand(2, 1, 9, 9)
    padded = causal.clone()
    padded[1, :, 3:, 0] = False
    if kernel.trains_with_mask:
        _one_attention(on, kernel, f"attention {name}", padded, masked=True)
    else:
        assert kernel.causal, f"attention {name} says that it trains neither with a mask nor causal"
        with contextlib.suppress(UnsupportedError):
            _one_attention(on, kernel, f"attention {name}", padded, masked=True)
            raise AssertionError(f"attention {name} says that it takes no mask, and took one")
    if kernel.causal:
        what = f"attention {name} without a mask, which it says is causal,"
        _one_attention(on, kernel, what, causal, masked=False)


def _one_attention(on: Opened, kernel: Any, name: str, allowed: torch.Tensor, masked: bool) -> None:
    dtype = getattr(torch, _kernel_type(on))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 9, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.train()
    there = q.to(on.device, copy=True).requires_grad_()
    mask = _mask(kernel.mask, allowed.to(on.device), q) if masked else None
    moved = (there, k.to(on.device), v.to(on.device), mask)
    out, _ = kernel.forward(module, *moved, scaling=0.25, dropout=0.0)
    out.float().pow(2).sum().backward()
    here = q.double().requires_grad_()
    keys, values = (each.double().repeat_interleave(2, dim=1) for each in (k, v))
    scores = (here @ keys.transpose(2, 3) * 0.25).masked_fill(~allowed, -torch.inf)
    wanted = (torch.softmax(scores, -1) @ values).transpose(1, 2)
    wanted.pow(2).sum().backward()
    assert there.grad is not None and here.grad is not None, f"{name} has no gradient"
    _agrees(on, out, wanted.detach(), name)
    _agrees(on, there.grad, here.grad, f"gradient of {name}")


def _mask(kind: str, allowed: torch.Tensor, q: torch.Tensor) -> Any:
    """What an attention that takes masks of this kind is given for (B, 1, T, S) bool."""
    if kind == "sdpa":
        return allowed
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def seen(batch: torch.Tensor, _: torch.Tensor, row: torch.Tensor, column: torch.Tensor):  # type: ignore[no-untyped-def]
            return allowed[batch, 0, row, column]

        return create_block_mask(seen, 2, None, 9, 9, device=str(allowed.device))
    mask = torch.zeros(allowed.shape, dtype=q.dtype, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(q.dtype).min)


def _lora_trial(on: Opened, kernel: Any, name: str) -> None:
    """Three dimensions, a scale, and the gradient of each tensor; what is dropped is the rest's."""
    dtype = getattr(torch, _kernel_type(on))
    generator = torch.Generator().manual_seed(6)
    shapes = ((2, 9, 24), (2, 9, 12), (4, 12), (24, 4))
    given = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    there = [each.to(on.device, copy=True).requires_grad_() for each in given]
    here = [each.double().requires_grad_() for each in given]
    found = kernel.up(there[0], kernel.down(there[1], there[2], 0.0), there[3], 1.5)
    wanted = here[0] + 1.5 * (here[1] @ here[2].t()) @ here[3].t()
    upstream = torch.randn(shapes[0], generator=generator)
    (found * upstream.to(on.device)).sum().backward()
    (wanted * upstream.double()).sum().backward()
    assert found.dtype is dtype, f"lora_linear {name}: {found.dtype} of {dtype}"
    _agrees(on, found, wanted.detach(), f"lora_linear {name}")
    _gradients_agree(on, there, here, f"lora_linear {name}")
    # Products with a unit matrix show which inputs were dropped; the others are scaled.
    x = torch.ones(1, 64, dtype=dtype, device=on.device).requires_grad_()
    unit = torch.eye(64, dtype=dtype).to(on.device)
    kept = kernel.down(x, unit, 0.5)
    kept.sum().backward()
    assert x.grad is not None, f"lora_linear {name}: no gradient of what was dropped"
    # In one transfer: a device that records may draw anew for each graph that it runs.
    forward, backward = torch.stack([kept.detach(), x.grad]).cpu().double()
    drawn = set(forward.unique().tolist())
    assert drawn == {0.0, 2.0}, f"lora_linear {name}: ones with dropout 0.5 became {drawn}"
    same = torch.equal(backward, forward)
    assert same, f"lora_linear {name}: what is dropped backward is not what was dropped forward"


def _adamw_trial(on: Opened, kernel: Any, name: str) -> None:
    """Three steps of two groups, one with decay, and three more from the state alone.

    Epsilon is as large as the smallest gradients: it must be added where torch does, or where the
    kernel's counterpart does.
    """
    rates, betas, eps = (1e-2, 5e-3), (0.9, 0.99), 1e-2
    host = _same_formula("adamw", name) or torch.optim.AdamW
    here = [torch.linspace(-1, 2, 12).double().reshape(3, 4), torch.linspace(1, 2, 5).double()]
    there = [torch.nn.Parameter(p.float().to(on.device)) for p in here]
    here = [torch.nn.Parameter(p) for p in here]

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": [parameter], "lr": lr, "weight_decay": decay}
            for parameter, lr, decay in zip(parameters, rates, (0.1, 0.0), strict=True)
        ]

    def steps(*optimizers: Any) -> None:
        for step in range(3):
            for parameters in (here, there):
                for parameter in parameters:
                    gradient = torch.linspace(-2, 1 + step, parameter.numel())
                    parameter.grad = gradient.reshape(parameter.shape).to(parameter)
            for optimizer in optimizers:
                optimizer.step()

    wanted = host(groups(here), lr=rates[0], betas=betas, eps=eps)
    found = kernel(groups(there), lr=rates[0], betas=betas, eps=eps)
    steps(wanted, found)
    first = {p: dict(found.state[p]) for p in there}
    for parameter, state in first.items():
        missing = {"exp_avg", "exp_avg_sq", "step"} - state.keys()
        assert not missing, f"adamw {name}: its state lacks {', '.join(sorted(missing))}"
        assert int(state["step"]) == 3, f"adamw {name}: step is {state['step']} after 3"
        assert state["exp_avg"].shape == parameter.shape, f"adamw {name}: a moment's shape"
    resumed = kernel(groups(there), lr=rates[0], betas=betas, eps=eps)
    for parameter, state in first.items():
        resumed.state[parameter].update(state)
    steps(wanted, resumed)
    for mine, its in zip(there, here, strict=True):
        _agrees(on, mine, its.detach(), f"adamw {name}", "float32")
        assert int(resumed.state[mine]["step"]) == 6, f"adamw {name}: it forgot its first 3 steps"


def _same_formula(operation: str, name: str) -> Any:
    """The kernel for all devices that has a kernel's formula; None for the reference's."""
    kernels = [p for p in Registry.load().kernels if p.spec.operation == operation]
    provided = {each.spec.name: each for each in kernels}
    counterpart = provided[name].spec.counterpart if name in provided else ""
    if not counterpart:
        return None
    served = counterpart in provided and not provided[counterpart].spec.device_types
    assert served, f"{operation} {name}: its counterpart {counterpart} is none for all devices"
    return load_factory(provided[counterpart], "kernel")()


def _clip_trial(on: Opened, kernel: Any, name: str) -> None:
    """A norm above the limit, which is clipped to it, and one below, which is left alone."""
    gradients = [torch.linspace(-3, 4, 12).reshape(3, 4), torch.linspace(0, 2, 5)]
    norm = torch.cat([g.double().flatten() for g in gradients]).norm()
    for limit in (0.5, 100.0):
        parameters = [torch.nn.Parameter(torch.zeros_like(g).to(on.device)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(on.device, copy=True)
        found = float(kernel(parameters, limit))
        assert abs(found - norm) <= 1e-3 * norm, f"clip_grad_norm {name}: norm {found}, not {norm}"
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            wanted = gradient.double() * min(1.0, limit / float(norm))
            _agrees(on, parameter.grad, wanted, f"clip_grad_norm {name} to {limit}", "float32")


KERNEL_TRIALS: Mapping[str, Callable[[Opened, Any, str], None]] = {
    "adamw": _adamw_trial,
    "attention": _attention_trial,
    "clip_grad_norm": _clip_trial,
    "linear_cross_entropy": _loss_trial,
    "lora_linear": _lora_trial,
    "rms_norm": _rms_norm_trial,
    "rope": _rope_trial,
    "softmax": _softmax_trial,
}
"""How a kernel of each operation is tried; the operations of `anygauge.interface.kernels`."""
