"""Checks at the ends of what a type or a tensor holds: infinities, NaN, places beyond 2^31."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from anygauge.testing.bounds import compare, on_host, roundoff, types
from anygauge.testing.check import NotAsked, Opened, check

FAR = 2**31
"""Elements from which a place no longer fits 32 bits."""


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
    last = table.shape[0] - 1
    table[:4].fill_(1)
    table[last - 3 :].fill_(2)
    table[last, 5:9] = 9
    table[last - 1].copy_((torch.arange(row) % 251).to(torch.uint8).to(on.device))
    at = torch.tensor([last, 1, last - 1], device=on.device)
    flat = table.reshape(-1)
    far = torch.tensor([last * row + 5, 3, (last - 1) * row + 7], device=on.device)
    for what, found, wanted in (
        ("slice", table[last, 4:10], [2, 9, 9, 9, 9, 2]),
        ("start, after the end was written", table[0, :3], [1, 1, 1]),
        ("index_select", table.index_select(0, at)[:, 7], [9, 1, 7]),
        ("index", table[at, 6], [9, 1, 6]),
        ("flat index", flat[far], [9, 1, 7]),
        ("gather", flat.gather(0, far), [9, 1, 7]),
        ("column", table[last - 3 :, 8] * 1, [2, 2, 8, 9]),
    ):
        got = on_host(found).tolist()
        assert got == wanted, f"{what} beyond 2^31 elements: {got}, expected {wanted}"
    flat.index_fill_(0, far, 4)
    got = on_host(table[last, 4:7]).tolist()
    assert got == [2, 4, 9], f"writing at an index beyond 2^31: {got}, expected [2, 4, 9]"


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
            found = on_host(function(values.to(on.device)))
            wanted = function(values.double())
            what = f"{name} of {dtype} {values.tolist()}"
            if not wanted.dtype.is_floating_point:
                compare(found, wanted, torch.zeros(()), what)
                continue
            finite = wanted[torch.isfinite(wanted)].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
            allowed = torch.full_like(wanted, 64 * roundoff(dtype) * max(largest, 1e-6))
            compare(found, wanted, allowed, what)


SPECIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: x.clone(),
    "x + reversed": lambda x: x + x.flip(0),
    "x - x": lambda x: x - x,
    "x * 0": lambda x: x * 0,
    "x / 0": lambda x: x / torch.zeros_like(x),
    "1 / x": lambda x: 1 / x,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "log": torch.log,
    "exp": lambda x: torch.exp(torch.where(x.abs() == 100, 10 * x, x)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": lambda x: torch.nn.functional.silu(x[:4]),
    "gelu": lambda x: torch.nn.functional.gelu(x[[0, 1, 2, 5]]),
    "abs": torch.abs,
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "clamp": lambda x: x.clamp(-1, 1),
    "relu": torch.relu,
    "sum": lambda x: x.sum(),
    "sum without NaN": lambda x: x[:4].sum(),
    "sum with NaN": lambda x: x[[0, 5]].sum(),
    "sum with infinity": lambda x: x[[0, 3]].sum(0),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax(0),
    "max of infinities": lambda x: x[:5].max(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm of infinities": lambda x: torch.linalg.vector_norm(x[:5]),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort()[0],
    "isfinite": torch.isfinite,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "equals itself": lambda x: x == x,
    "less than 0": lambda x: x < 0,
    "where finite": lambda x: torch.where(torch.isfinite(x), x, torch.zeros_like(x)),
    "masked with -inf": lambda x: x[:3].masked_fill(x[:3] == 0, -math.inf),
    "softmax with -inf": lambda x: torch.softmax(x[[0, 1, 2, 4]], 0),
    "softmax of -inf alone": lambda x: torch.softmax(x[[4, 4]], 0),
    "softmax of large numbers": lambda x: torch.softmax(x[[0, 6, 6, 7]] * 3, 0),
    "log_softmax of large numbers": lambda x: torch.log_softmax(x[[0, 6, 7]] * 3, 0),
    "logsumexp of large numbers": lambda x: torch.logsumexp(x[[0, 6, 6]] * 3, 0),
    "logsumexp with -inf": lambda x: torch.logsumexp(x[[0, 4]], 0),
    "matrix product": lambda x: x[None, :6] @ torch.ones_like(x[:6, None]),
    "matrix product with infinity": lambda x: x[None, :4] @ torch.ones_like(x[:4, None]),
    "row without NaN beside one with it": lambda x: (
        torch.stack((x[:3], x[3:6])) @ torch.ones_like(x[:3, None])
    ),
    "sign of zero": lambda x: 1 / (x[2:3] * -1),
}
"""Functions of the eight special values."""
