"""Checks of sums and products that are long enough to show how a device keeps them.

Expected values come from float64 or Python's integers on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import (
    compare,
    on_host,
    product_roundoff,
    roundoff,
    summed,
    types,
    unbiased,
)
from anygauge.testing.check import NotAsked, Opened, check

LONG = (2048, 4099)
"""Terms of each sum in a product: a power of two, and more that no block divides."""
FAR = 2**31
"""Elements from which a place no longer fits 32 bits."""


def _drawn(*shape: int, seed: int, low: float = 0.5, high: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def _allowed(on: Opened, magnitude: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Largest error of a product: of its sum and, where factors are shortened, of each of them."""
    shortened = 4 * product_roundoff(on, dtype) if dtype is torch.float32 else 0.0
    return summed(terms, magnitude, dtype) + shortened * magnitude


# -- products -------------------------------------------------------------------------------------


@check(
    "long products keep their digits: errors are those of float32 sums and lean to no side",
    part="device",
    means="a model would train worse without an error in sight; look for accumulators of the "
    "inputs' type, results cut off instead of rounded, and float32 products in a shorter type "
    "(declare that one with Placement.float32_product_bits)",
)
def products_keep_their_digits(on: Opened) -> None:
    for dtype, terms in itertools.product(types(on), LONG):
        for signed in (False, True):
            what = f"{67} x {terms} x {71} of {dtype}{', of either sign' if signed else ''}"
            a = _drawn(67, terms, seed=1, low=-1.5 if signed else 0.5).to(dtype)
            b = _drawn(terms, 71, seed=2, low=-1.5 if signed else 0.5).to(dtype)
            found = on_host(a.to(on.device) @ b.to(on.device))
            wanted = a.double() @ b.double()
            magnitude = a.double().abs() @ b.double().abs()
            compare(found, wanted, _allowed(on, magnitude, terms, dtype), what)
            if not signed:
                # Many roundings of one sum need not cancel: those of float32 by their root.
                u = max(roundoff(dtype), product_roundoff(on, dtype))
                most = 0.25 * u / roundoff(dtype)
                most += math.sqrt(terms) * roundoff(torch.float32) / roundoff(dtype)
                unbiased(found, wanted, dtype, what, most)


@check(
    "products of every shape: transposed, sliced, batched, one row, odd sizes, into a given tensor",
    part="device",
    means="attention or a layer would be wrong for some lengths; look at how the library of "
    "products gets strides and offsets, and at the incomplete blocks of sizes that 16 does not "
    "divide",
)
def products_of_every_shape(on: Opened) -> None:
    for dtype in types(on):
        for name, function, shapes in PRODUCTS:
            inputs = [_drawn(*shape, seed=n, low=-1).to(dtype) for n, shape in enumerate(shapes)]
            found = on_host(function(*(each.to(on.device) for each in inputs)))
            wanted = function(*(each.double() for each in inputs))
            magnitude = function(*(each.double().abs() for each in inputs))
            what = f"{name} of {dtype}, sizes {' '.join(map(str, map(list, shapes)))}"
            assert found.dtype == dtype, f"{what}: a result of {found.dtype}"
            compare(found, wanted, 2 * _allowed(on, magnitude, 64, dtype), what)


def _into(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((a.shape[0] + 2, b.shape[1]), 3, dtype=a.dtype, device=a.device)
    torch.mm(a, b, out=out[1:-1])
    return out


def _into_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((b.shape[1], a.shape[0]), 3, dtype=a.dtype, device=a.device)
    torch.mm(a, b, out=out.t())
    return out


PRODUCTS: tuple[tuple[str, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]], ...] = (
    *(
        ("mm", torch.mm, ((rows, inner), (inner, columns)))
        for rows, inner, columns in itertools.product((1, 17, 33), (1, 15, 47), (1, 31))
    ),
    ("mm of nothing", torch.mm, ((3, 0), (0, 5))),
    ("mm, first transposed", lambda a, b: a.t() @ b, ((19, 33), (19, 21))),
    ("mm, second transposed", lambda a, b: a @ b.t(), ((33, 19), (21, 19))),
    ("mm, both transposed", lambda a, b: a.t() @ b.t(), ((19, 33), (21, 19))),
    ("mm of slices", lambda a, b: a[3:, 1:-2] @ b[2:-1, 5:], ((33, 22), (22, 30))),
    ("mm of every second", lambda a, b: a[:, ::2] @ b[::2], ((9, 34), (34, 7))),
    ("mm of one row for all", lambda a, b: a.expand(5, 33) @ b, ((1, 33), (33, 7))),
    ("mm into a slice", _into, ((5, 19), (19, 7))),
    ("mm into a transposed tensor", _into_transposed, ((5, 19), (19, 7))),
    ("vector", torch.mv, ((33, 21), (21,))),
    ("dot", torch.dot, ((61,), (61,))),
    ("outer", torch.outer, ((13,), (17,))),
    ("bmm", torch.bmm, ((3, 17, 33), (3, 33, 5))),
    ("bmm of one", torch.bmm, ((1, 17, 33), (1, 33, 5))),
    ("bmm of many", torch.bmm, ((37, 3, 5), (37, 5, 2))),
    ("bmm, transposed", lambda a, b: a.transpose(1, 2) @ b, ((3, 33, 17), (3, 33, 5))),
    ("bmm, batch within", lambda a, b: a.transpose(0, 1) @ b.transpose(0, 1),
     ((7, 3, 9), (9, 3, 5))),
    ("bmm of slices", lambda a, b: a[1:, :, 2:] @ b[:-1, 1:, :], ((4, 7, 19), (4, 18, 5))),
    ("matmul of heads", lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).transpose(-1, -2),
     ((2, 9, 3, 8), (2, 9, 3, 8))),
    ("matmul, broadcast", torch.matmul, ((2, 1, 5, 7), (3, 7, 4))),
    ("addmm", torch.addmm, ((17, 5), (17, 33), (33, 5))),
    ("addmm of a row", torch.addmm, ((5,), (17, 33), (33, 5))),
    ("addmm, scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
     ((17, 5), (17, 33), (33, 5))),
    ("addmm_", lambda c, a, b: (c * 1).addmm_(a, b), ((17, 5), (17, 33), (33, 5))),
    ("baddbmm", torch.baddbmm, ((3, 17, 5), (3, 17, 33), (3, 33, 5))),
    ("linear", torch.nn.functional.linear, ((3, 7, 33), (15, 33), (15,))),
    ("linear of a slice", lambda x, w: torch.nn.functional.linear(x[:, 2:], w[1:]),
     ((3, 9, 33), (15, 33))),
    ("einsum", lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), ((2, 3, 5, 7), (2, 3, 4, 7))),
)  # fmt: skip
"""Name, function and sizes of its inputs; the same function of absolute values bounds the error."""


@check(
    "products larger than any buffer are right in each element",
    part="device",
    means="layers with a large vocabulary or batch would be wrong in part; look for grids of "
    "blocks that end at a limit, and for buffers that are used again before they were read",
)
def large_products(on: Opened) -> None:
    rows, inner, columns = 1301, 9, 1613  # 8 MiB of float32
    for dtype in types(on)[:2]:
        a, b = _drawn(rows, inner, seed=3).to(dtype), _drawn(inner, columns, seed=4).to(dtype)
        there = a.to(on.device) @ b.to(on.device)
        again = a.to(on.device) @ (2 * b).to(on.device)  # must leave the first alone
        wanted = a.double() @ b.double()
        allowed = _allowed(on, wanted, inner, dtype)
        what = f"{rows} x {inner} x {columns} of {dtype}"
        compare(on_host(there), wanted, allowed, what)
        compare(on_host(again), 2 * wanted, 2 * allowed, f"{what}, the second")


# -- sums -----------------------------------------------------------------------------------------


@check(
    "long sums keep their digits, over all and along each dimension",
    part="device",
    means="losses and gradient norms of large models would be wrong; look for sums that are kept "
    "in the inputs' type, and for counts of elements in too few bits",
)
def long_sums(on: Opened) -> None:
    for dtype in types(on):
        values = _drawn(5, 2**14 + 3, seed=6, low=0.25, high=1).to(dtype)
        wide = values.double()
        there = values.to(on.device)
        across = values.t().contiguous().to(on.device)
        for what, found, wanted, terms in (
            ("mean over all", there.mean(), wide.mean(), wide.numel()),
            ("mean of the last dimension", there.mean(-1), wide.mean(-1), wide.shape[1]),
            ("mean of the first dimension", across.mean(0), wide.mean(-1), wide.shape[1]),
            ("norm", torch.linalg.vector_norm(there), wide.norm(), wide.numel()),
            ("sum in float32", there.float().sum(), wide.sum(), wide.numel()),
            ("sum to float32", there.sum(-1, dtype=torch.float32), wide.sum(-1), wide.shape[1]),
            ("logsumexp", there.logsumexp(-1), wide.logsumexp(-1), wide.shape[1]),
            ("sum", there[:, :9000].sum(-1), wide[:, :9000].sum(-1), 9000),
            ("sum over rows", across[:9000].sum(0), wide[:, :9000].sum(-1), 9000),
        ):
            allowed = 2 * summed(terms, wanted.abs(), found.dtype)
            compare(on_host(found), wanted, allowed, f"{what} of {terms} x {dtype}")
        total = on_host(there[0].float().cumsum(0))
        wanted = wide[0].cumsum(0)
        allowed = 2 * summed(wide.shape[1], wanted, torch.float32)
        compare(total, wanted, allowed, f"cumsum of {wide.shape[1]} x {dtype} in float32")


@check(
    "sums whose parts do not fit the type fit where the whole does, and become infinite if not",
    part="device",
    means="in float16 a step would be skipped without need, or an overflow stay unseen; look for "
    "accumulators in the inputs' type and for results that are clamped to the largest number",
)
def overflow_is_of_the_result(on: Opened) -> None:
    for dtype in types(on):
        largest = torch.finfo(dtype).max
        half = torch.full((1, 64), largest / 2, dtype=dtype)
        there = half.to(on.device)
        for what, result, wanted in (
            ("a product of matrices", there @ torch.ones_like(there).t(), math.inf),
            ("a sum", there.sum(), math.inf),
            ("a number times 4", there[0, 0] * 4, math.inf),
            ("a number times -4", there[0, 0] * -4, -math.inf),
            ("a sum of two and one more", there[0, 0] + there[0, 1] + there[0, 2], math.inf),
            ("its square", there[0, 0].pow(2), math.inf),
            ("a number that just fits", there[0, 0] * 2, largest),
        ):
            got = float(on_host(result))
            assert got == wanted, f"{what} of {dtype} at {largest:.4g}: {got}, expected {wanted}"
        if dtype is torch.float32:
            continue
        beyond = torch.tensor([3.0, -3.0]) * largest if dtype is torch.float16 else None
        if beyond is not None:
            found = on_host(beyond.to(on.device).to(dtype)).tolist()
            assert found == [math.inf, -math.inf], f"{beyond.tolist()} in {dtype}: {found}"
            # The first forty terms make 80 000, all of them 32 000.
            sign = torch.ones(64, 1, dtype=dtype)
            sign[40:] = -1
            a, b = torch.full((1, 64), 2000.0, dtype=dtype).to(on.device), sign.to(on.device)
            for what, result in (("product", a @ b), ("sum", (a * b.t()).sum())):
                got = float(on_host(result))
                assert got == 32000, f"the {what} of 40 x 2000 and 24 x -2000 in {dtype}: {got}"


# -- conversions and integers ---------------------------------------------------------------------


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
    for dtype in types(on)[1:]:
        values = _drawn(2**16 + 3, seed=8, low=-2, high=2).float()
        step = torch.finfo(dtype).eps
        ties = 1 + step * (torch.arange(64) + 0.5)
        values = torch.cat((values, ties, -ties, ties.flip(0) * 2))
        for what, view in (
            ("", lambda whole: whole),
            (", every second", lambda whole: whole[::2]),
            (", transposed", lambda whole: whole[: 2**16].reshape(256, 256).t()),
        ):
            source, seen = view(values), view(values.to(on.device))
            found = on_host(seen.to(dtype))
            wanted = _nearest(source, dtype)
            same = found.double() == wanted
            at = tuple((~same).nonzero()[0].tolist()) if not bool(same.all()) else ()
            assert not at, (
                f"float32 to {dtype}{what}: {source[at].item()!r} became {found[at].item()!r}, "
                f"expected {wanted[at].item()!r}; {int((~same).sum())} differ"
            )
            back = on_host(seen.to(dtype).float())
            assert torch.equal(back.double(), wanted), f"{dtype} to float32{what}: values differ"
    reals = torch.tensor([-2.7, -0.5, 0.5, 1.5, 2.7, 1e6 + 0.5])
    whole = on_host(reals.to(on.device).long()).tolist()
    assert whole == [-2, 0, 0, 1, 2, 10**6], f"{reals.tolist()} to integers gave {whole}"
    truths = on_host(torch.tensor([0.0, -0.0, 1e-30, -3.0]).to(on.device).bool()).tolist()
    assert truths[:2] + truths[3:] == [False, False, True], f"numbers became truths {truths}"
    back_to = on_host(torch.tensor([True, False]).to(on.device).float()).tolist()
    assert back_to == [1, 0], f"truths became {back_to}"


@check(
    "integers of 64 bits keep all of them: values, sums, comparisons and conversions",
    part="device",
    means="counts of tokens, positions and hashes would be wrong once they are large; look for "
    "integers that are computed in 32 bits or as floating point, which ends at 2^24 or 2^53",
)
def large_integers(on: Opened) -> None:
    values = [2**31, 2**31 + 1, -(2**31) - 1, 2**24 + 1, 2**53 + 1, -(2**53) - 1, 2**62 + 3, 7]

    def put(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(on.device)

    there = put(values)
    turned = values[::-1]
    order = sorted(range(len(values)), key=values.__getitem__)
    running = list(itertools.accumulate(values))
    for what, found, wanted in (
        ("copied", there, values),
        ("+ 1", there + 1, [v + 1 for v in values]),
        ("* 1", there * 1, values),
        ("* 3", put(values[:6]) * 3, [3 * v for v in values[:6]]),
        ("- another", there - there.flip(0), [a - b for a, b in zip(values, turned, strict=True)]),
        ("negated", -there, [-v for v in values]),
        ("// 2", torch.div(there, 2, rounding_mode="floor"), [v // 2 for v in values]),
        ("% 1000", there % 1000, [v % 1000 for v in values]),
        ("summed", there.sum(), sum(values)),
        ("summed up to each", there.cumsum(0), running),
        ("the largest", there.max(), max(values)),
        ("the smallest", there.amin(), min(values)),
        ("where the largest is", there.argmax(), values.index(max(values))),
        ("sorted", there.sort()[0], sorted(values)),
        ("order", there.argsort(), order),
        ("selected", there[put([5, 0, 5])], [values[5], values[0], values[5]]),
        ("gathered", there.gather(0, put([4, 6])), [values[4], values[6]]),
        ("chosen", torch.where(there > 0, there, 0), [max(v, 0) for v in values]),
        ("clamped", there.clamp(max=2**53 + 1), [min(v, 2**53 + 1) for v in values]),
        ("differs from its neighbour", there == there - 1, [False] * len(values)),
        ("filled", torch.full((2,), 2**53 + 1, device=on.device), [2**53 + 1] * 2),
        ("made as a range", torch.arange(2**53 + 1, 2**53 + 4, device=on.device),
         [2**53 + 1, 2**53 + 2, 2**53 + 3]),
        ("added at indices", put([0, 5]).index_add_(0, put([1, 1]), put([2**53, 1])),
         [0, 2**53 + 6]),
        ("scattered", put([0, 0]).scatter_add_(0, put([1, 1]), put([2**53, 1])), [0, 2**53 + 1]),
        ("a million of 2^31 + 1 summed", put([2**31 + 1]).expand(10**6).sum(),
         10**6 * (2**31 + 1)),
        ("truths counted", (put([1]).expand(2**18 + 1) > 0).sum(), 2**18 + 1),
        ("small ones of 32 bits summed", put([2**30]).int().expand(9).sum(), 9 * 2**30),
    ):  # fmt: skip
        got = found.to(HOST_DEVICE).tolist()
        assert got == wanted, f"int64 {what}: {got}, expected {wanted}"


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


# -- what is not a number -------------------------------------------------------------------------


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
