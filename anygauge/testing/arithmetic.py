"""Checks of what types and tensors hold: conversions, far places, overflow, NaN."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from anygauge.testing.bounds import compare, drawn, on_host, roundoff, types
from anygauge.testing.check import NotAsked, Opened, check

FAR = 2**31
"""Elements from which a place no longer fits 32 bits."""


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 values that the type has, the nearest to others; of two the one that ends in 0."""
    fraction, exponent = torch.frexp(values.double())
    scale = 1 / torch.finfo(dtype).eps * 2  # fractions are from a half to 1
    return torch.ldexp(torch.round(fraction * scale) / scale, exponent)


@check(
    "conversions between types round to nearest, ties to even, and cut towards zero to integers",
    part="device",
    means="weights would drift when they are stored in the lower type; look at the conversion "
    "kernel: cutting bits off is the usual shortcut",
)
def conversions_round(on: Opened) -> None:
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "": lambda whole: whole,
        ", with an offset": lambda whole: whole[3:-2],
        ", every second": lambda whole: whole[1::2],
        ", transposed": lambda whole: whole[: 2**16].reshape(256, 256).t(),
    }
    for dtype in types(on)[1:]:
        values = drawn(2**16 + 3, seed=8, low=0.25, high=2).float()
        values[::2] *= -1
        ties = 1 + torch.finfo(dtype).eps * (torch.arange(64) + 0.5)
        values = torch.cat((values, ties, -ties, ties.flip(0) * 2))
        for name, view in views.items():
            what, wanted = f"float32 to {dtype}{name}", _nearest(view(values), dtype)
            seen = view(values.to(on.device)).to(dtype)
            compare(on_host(seen).double(), wanted, torch.zeros(()), what)
            back = on_host(seen.float()).double()
            compare(back, wanted, torch.zeros(()), f"{what}, and back")
    reals = torch.tensor([-2.7, -0.5, 0.5, 1.5, 2.7, 1e6 + 0.5]).to(on.device)
    whole = on_host(reals.long()).tolist()
    assert whole == [-2, 0, 0, 1, 2, 10**6], f"{reals.tolist()} to integers gave {whole}"
    truths = on_host(torch.tensor([0.0, -0.0, -3.0]).to(on.device).bool().float()).tolist()
    assert truths == [0, 0, 1], f"numbers became truths {truths}"


@check(
    "places beyond 2^31 in a tensor are read and written right",
    part="device",
    means="a large embedding or a long batch of logits would be read from the wrong rows; look "
    "for offsets that kernels compute in 32 bits",
)
def far_places(on: Opened) -> None:
    stats = on.placement.memory()
    if stats.limit is None or stats.kind.split(",")[0] != "allocator":
        raise NotAsked("it shares the host's memory, or its limit is unknown")
    if stats.limit - stats.in_use < FAR + FAR // 4:
        raise NotAsked(f"it takes {FAR} bytes, which are not free")
    row = 4096
    table = torch.empty(FAR // row + 4, row, dtype=torch.uint8, device=on.device)
    last, flat = table.shape[0] - 1, table.reshape(-1)
    table[:4].fill_(1)
    table[last - 3 :].fill_(2)
    table[last, 5:9] = 9
    table[last - 1].copy_((torch.arange(row) % 251).to(torch.uint8).to(on.device))
    at = torch.tensor([last, 1, last - 1], device=on.device)
    far = torch.tensor([last * row + 5, 3, (last - 1) * row + 7], device=on.device)
    for what, found, wanted in (
        ("slice", table[last, 4:10], [2, 9, 9, 9, 9, 2]),
        ("start, after the end was written", table[0, :3], [1, 1, 1]),
        ("index_select", table.index_select(0, at)[:, 7], [9, 1, 7]),
        ("index", table[at, 6], [9, 1, 6]),
        ("gather", flat.gather(0, far), [9, 1, 7]),
        ("column", table[last - 3 :, 8] * 1, [2, 2, 8, 9]),
    ):
        got = on_host(found).tolist()
        assert got == wanted, f"{what} beyond 2^31 elements: {got}, expected {wanted}"


SPECIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x * 0": lambda x: x * 0,
    "x / 0": lambda x: x / torch.zeros_like(x),
    "exp": lambda x: torch.exp(torch.where(x.abs() == 100, 10 * x, x)),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "clamp": lambda x: x.clamp(-1, 1),
    "sum": lambda x: x.sum(),
    "sum with NaN": lambda x: x[[0, 5]].sum(),
    "sum with infinity": lambda x: x[[0, 3]].sum(0),
    "max": lambda x: x.max(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm of infinities": lambda x: torch.linalg.vector_norm(x[:5]),
    "isfinite": torch.isfinite,
    "isnan": torch.isnan,
    "masked with -inf": lambda x: x[:3].masked_fill(x[:3] == 0, -math.inf),
    "softmax with -inf": lambda x: torch.softmax(x[[0, 1, 2, 4]], 0),
    "softmax of -inf alone": lambda x: torch.softmax(x[[4, 4]], 0),
    "softmax of large numbers": lambda x: torch.softmax(x[[0, 6, 6, 7]] * 3, 0),
    "log_softmax of large numbers": lambda x: torch.log_softmax(x[[0, 6, 7]] * 3, 0),
    "logsumexp of large numbers": lambda x: torch.logsumexp(x[[0, 6, 6]] * 3, 0),
    "row without NaN beside one with it": lambda x: (
        torch.stack((x[:3], x[3:6])) @ torch.ones_like(x[:3, None])
    ),
    "sign of zero": lambda x: 1 / (x[2:3] * -1),
    "what overflows": lambda x: functools.reduce(torch.mul, [x * x] * 12),
    # In float16 its first two terms are too large together, all of them are not.
    "sum that fits, though parts of it do not": lambda x: (x[[6, 6, 7, 7]] * 600).sum(0),
}
"""Functions of 1, -2, 0, both infinities, NaN, 100 and -100."""


@check(
    "infinities and what is not a number are carried, made and compared as on the host",
    part="device",
    means="a diverged run would go on unseen, or a masked one become NaN; look for fast-math "
    "options of the compiler, which assume that such values do not occur",
)
def special_values(on: Opened) -> None:
    inf, nan = math.inf, math.nan
    for dtype in types(on):
        values = torch.tensor([1.0, -2.0, 0.0, inf, -inf, nan, 100.0, -100.0], dtype=dtype)
        for name, function in SPECIAL.items():
            found, wanted = on_host(function(values.to(on.device))), function(values.double())
            finite = wanted.double()[torch.isfinite(wanted)].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
            most = 64 * roundoff(dtype) * max(largest, 1e-6)
            allowed = torch.full(wanted.shape, most, dtype=torch.float64)
            compare(found, wanted, allowed, f"{name} of {dtype} {values.tolist()}")
