"""Checks of products of matrices: how their sums are kept, and each shape and stride of factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from anygauge.testing.bounds import (
    compare,
    drawn,
    on_host,
    product_roundoff,
    roundoff,
    summed,
    types,
    unbiased,
)
from anygauge.testing.check import Opened, check

LONG = (2048, 4099)
"""Terms of each sum in a product: a power of two, and more that no block divides."""


def _allowed(on: Opened, magnitude: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Largest error of a product: of its sum and, where factors are shortened, of each of them."""
    shortened = 4 * product_roundoff(on, dtype) if dtype is torch.float32 else 0.0
    return summed(terms, magnitude, dtype) + shortened * magnitude


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
            a = drawn(67, terms, seed=1, low=-1.5 if signed else 0.5).to(dtype)
            b = drawn(terms, 71, seed=2, low=-1.5 if signed else 0.5).to(dtype)
            found = on_host(a.to(on.device) @ b.to(on.device))
            wanted = a.double() @ b.double()
            magnitude = a.double().abs() @ b.double().abs()
            compare(found, wanted, _allowed(on, magnitude, terms, dtype), what)
            if not signed:
                # Many roundings of one sum need not cancel: those of float32 by their root.
                most = 0.25 + math.sqrt(terms) * roundoff(torch.float32) / roundoff(dtype)
                if product_roundoff(on, dtype) > roundoff(dtype):  # and these may be cut off
                    most += 4 * product_roundoff(on, dtype) / roundoff(dtype)
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
            inputs = [drawn(*shape, seed=n, low=-1).to(dtype) for n, shape in enumerate(shapes)]
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
        a, b = drawn(rows, inner, seed=3).to(dtype), drawn(inner, columns, seed=4).to(dtype)
        there = a.to(on.device) @ b.to(on.device)
        again = a.to(on.device) @ (2 * b).to(on.device)  # must leave the first alone
        wanted = a.double() @ b.double()
        allowed = _allowed(on, wanted, inner, dtype)
        what = f"{rows} x {inner} x {columns} of {dtype}"
        compare(on_host(there), wanted, allowed, what)
        compare(on_host(again), 2 * wanted, 2 * allowed, f"{what}, the second")
