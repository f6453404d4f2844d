"""Checks of backward passes and of memory that several tensors share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import on_host, product_roundoff, roundoff, types
from anygauge.testing.check import Opened, check

ROWS, LENGTH, WIDTH, HEADS, WORDS = 3, 37, 40, 5, 61
"""None of them a power of two."""


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    return {
        "embedding": normal(WORDS, WIDTH),
        "norm": normal(WIDTH, scale=0.1) + 1,
        "qkv": normal(3 * WIDTH, WIDTH, scale=0.2),
        "out": normal(WIDTH, WIDTH, scale=0.2),
        "up": normal(2 * WIDTH, WIDTH, scale=0.2),
        "down": normal(WIDTH, WIDTH, scale=0.2),
    }


def _block_loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of a decoder layer: heads are strided views, its embedding is used twice."""
    x = nn.embedding(ids, weights["embedding"])
    y = nn.rms_norm(x, (WIDTH,), weights["norm"], 1e-5)
    qkv = y @ weights["qkv"].t()
    q, k, v = (
        each.reshape(*ids.shape, HEADS, WIDTH // HEADS).transpose(1, 2)
        for each in (qkv[..., :WIDTH], qkv[..., WIDTH:-WIDTH], qkv[..., -WIDTH:])
    )
    length = ids.shape[1]
    late = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
    attention = torch.softmax(scores.masked_fill(late, -math.inf), dim=-1)
    x = x + (attention @ v).transpose(1, 2).reshape(*ids.shape, WIDTH) @ weights["out"].t()
    both = x @ weights["up"].t()
    x = x + (nn.silu(both[..., :WIDTH]) * both[..., WIDTH:]) @ weights["down"].t()
    logits = x[:, :-1] @ weights["embedding"].t() / 4
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return nn.cross_entropy(wide.reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def _ids(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (rows, LENGTH), generator=generator)


def _leaves(
    device: torch.device | None, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same weights on the device, in the type, and on the host, in float64."""
    there, here = {}, {}
    for name, weight in _weights().items():
        lower = weight.to(dtype)
        there[name] = lower.to(device, copy=True).requires_grad_()
        here[name] = lower.double().requires_grad_()
    return there, here


def _agree(
    on: Opened,
    there: dict[str, torch.Tensor],
    here: dict[str, torch.Tensor],
    dtype: torch.dtype,
    what: str,
) -> None:
    """Compare gradients: a chain of about twenty roundings, each of which may lie anywhere."""
    u = max(roundoff(dtype), product_roundoff(on, dtype))
    most = 20 * u if dtype is not torch.float32 else 64 * u
    for name, leaf in there.items():
        assert leaf.grad is not None, f"{what}: {name} has no gradient"
        wanted = here[name].grad
        assert wanted is not None and leaf.grad.shape == wanted.shape
        assert leaf.grad.dtype == dtype, f"{what}: the gradient of {name} has {leaf.grad.dtype}"
        difference = (on_host(leaf.grad).double() - wanted).norm() / wanted.norm()
        assert float(difference) <= most, (
            f"{what}: the gradient of {name} in {dtype} differs from float64 on the host by "
            f"{float(difference):.1e} of its norm; {most:.1e} is allowed"
        )


@check(
    "gradients of a decoder layer with strided heads agree with float64, in each type",
    part="device",
    means="training would go another way than on other devices; look in the backward of the "
    "operation before the first parameter named, and at views of heads that are not contiguous",
)
def gradients_of_a_layer(on: Opened) -> None:
    for dtype in types(on):
        there, here = _leaves(on.device, dtype)
        ids = _ids(ROWS, 1)
        found = _block_loss(there, ids.to(on.device))
        wanted = _block_loss(here, ids)
        found.backward()
        wanted.backward()
        error = abs(float(on_host(found)) / float(wanted.detach()) - 1)
        most = 20 * max(roundoff(dtype), product_roundoff(on, dtype))
        assert error <= most, f"the loss in {dtype} differs by {error:.1e}; {most:.1e} is allowed"
        _agree(on, there, here, dtype, "one backward")


@check(
    "gradients of several backward passes add up, and begin at nothing when they are dropped",
    part="device",
    means="runs that accumulate gradients would train on the last part alone or on old ones; look "
    "at adding in place to .grad while its memory is used by the next pass",
)
def gradients_accumulate(on: Opened) -> None:
    there, here = _leaves(on.device, torch.float32)
    for step in range(2):
        for part in range(3):
            ids = _ids(1 + part, 10 * step + part)
            _block_loss(there, ids.to(on.device)).backward()
            _block_loss(here, ids).backward()
        _agree(on, there, here, torch.float32, f"three passes of step {step}")
        for leaf in (*there.values(), *here.values()):
            if step:
                assert leaf.grad is not None
                leaf.grad.zero_()
            leaf.grad = None
    weight = torch.ones(300, 300, device=on.device, requires_grad=True)
    for _ in range(5):
        (weight[1:, ::3] * 2).sum().backward()
        weight.expand(2, 300, 300).sum().backward()
    assert weight.grad is not None
    found = on_host(weight.grad)
    assert found[0].eq(10).all() and found[1:, ::3].eq(20).all() and found[1:, 1::3].eq(10).all(), (
        f"five passes through a view and an expanded view gave {found[:2, :4].tolist()}"
    )


@check(
    "what is written through a view stands in its base and in other views, and nowhere else",
    part="device",
    means="caches, masks and sharded parameters, which are views of one buffer, would be lost; "
    "look for operations that copy a view before they write it",
)
def views_share_memory(on: Opened) -> None:
    def work(x: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = x.view(-1)[8:24].view(4, 4)
        turned = x.t()
        x[1:] += 1
        x[:, 1::2] *= 2
        turned[3].fill_(5)
        rows.sub_(3)
        x.view(-1)[5:9] = torch.arange(4, device=x.device).to(x.dtype)
        x[2].copy_(x[3])
        x.diagonal()[:3].zero_()
        torch.add(x[0], 1, out=x[5])
        x.unfold(0, 2, 2)[0, 4] = 9
        for row in range(0, 6, 2):
            x[row : row + 2][:, 6].add_(row)
        x.narrow(1, 6, 1).mul_(2)
        x[[0, 5]] = x[[5, 0]]
        x[x > 30] = -1
        return x, rows, turned, x.view(-1)[7:11]

    base = torch.arange(42.0).reshape(6, 7)
    for dtype in (*types(on), torch.int64, torch.int32):
        here = base.to(dtype, copy=True)
        there = base.to(dtype).to(on.device, copy=True)
        for number, (found, wanted) in enumerate(zip(work(there), work(here), strict=True)):
            got = on_host(found)
            assert torch.equal(got, wanted), (
                f"{('the base', 'rows', 'transposed', 'a later view')[number]} of {dtype} after "
                f"writes through views: {got.tolist()}, expected {wanted.tolist()}"
            )


@check(
    "a value that is overwritten later keeps its gradient, or the write is refused",
    part="device",
    means="gradients would silently be of the wrong values; look for memory that is given back "
    "before the backward pass has read it",
)
def saved_values_stay(on: Opened) -> None:
    x = torch.linspace(-2, 2, 5001, device=on.device).requires_grad_()
    kept = []
    for n in range(8):  # much memory is freed and taken again between forward and backward
        y = torch.exp(x * (n + 1) / 8)
        kept.append((y * y).sum())
        del y
        torch.full((5001,), float(n), device=on.device)
    sum(kept).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    here = torch.linspace(-2, 2, 5001).double()
    wanted = sum((n + 1) / 4 * torch.exp(here * (n + 1) / 4) for n in range(8))
    assert isinstance(wanted, torch.Tensor)
    error = float(((on_host(x.grad).double() - wanted) / wanted).abs().max())
    assert error <= 256 * roundoff(torch.float32), f"gradients of eight terms differ by {error:.1e}"
