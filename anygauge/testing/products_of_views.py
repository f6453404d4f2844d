"""The check of products whose factors, results and gradients are views of larger tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import compare, drawn, on_host, product_roundoff, summed, types
from anygauge.testing.check import TABLE_S, Opened, check
from anygauge.testing.operations import LAYOUTS, View


@dataclass(frozen=True, slots=True)
class Product:
    """A line of the table.

    Attributes:
        function: gets the inputs; with ``out`` where it has one.
        sizes: of the inputs; letters stand for the sizes of `SIZES`.
        out: it can write into a given tensor.
    """

    name: str
    function: Callable[..., torch.Tensor]
    sizes: str
    out: bool = True


PRODUCTS = (
    Product("mm", torch.mm, "mk kn"),
    Product("mm, turned", lambda a, b, **out: torch.mm(a.t(), b.t(), **out), "km nk"),
    Product("addmm", torch.addmm, "mn mk kn"),
    Product("addmm of a row", torch.addmm, "n mk kn"),
    Product("bmm", torch.bmm, "bmk bkn"),
    Product("baddbmm", torch.baddbmm, "bmn bmk bkn"),
    Product("linear", nn.linear, "bmk nk n", out=False),
    Product("matmul", torch.matmul, "bmk kn"),
    Product("mv", torch.mv, "mk k"),
)
SIZES = (
    {"b": 3, "m": 17, "k": 33, "n": 9},
    {"b": 2, "m": 32, "k": 64, "n": 48},
    {"b": 2, "m": 130, "k": 257, "n": 131},
)
"""Odd ones, those of whole blocks, and large ones."""
VIEWS = ("contiguous", "transposed", "sliced", "every second", "contiguous with transposed")


@check(
    "products of views are right, small and large, and so are their gradients and given results",
    part="device",
    limit_s=TABLE_S,
    means="layers whose weights or activations are parts of one buffer would be wrong; look at how "
    "the library of products gets offsets and strides of factors, of gradients and of the result",
)
def products_of_views(on: Opened) -> None:
    # Float32 takes every view, the others a half; where every new shape is compiled, each a third.
    for turn, dtype in enumerate(types(on)):
        step = 3 if on.backend.graph.accumulates else min(turn, 1) + 1
        for number, (product, sizes) in enumerate(itertools.product(PRODUCTS, SIZES)):
            trial = _Trial.made(product, sizes, dtype)
            views = VIEWS[::2] if sizes is SIZES[-1] else VIEWS
            for layout in views[(number + turn) % step :: step]:
                _try(on, trial, layout)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Inputs of a product, and what float64 makes of them.

    Attributes:
        above: gradient of the result.
        wanted, magnitudes: the result and the inputs' gradients, and those of absolute values.
    """

    product: Product
    terms: int
    what: str
    values: list[torch.Tensor]
    above: torch.Tensor
    wanted: list[torch.Tensor]
    magnitudes: list[torch.Tensor]

    @classmethod
    def made(cls, product: Product, sizes: dict[str, int], dtype: torch.dtype) -> _Trial:
        shapes = [[sizes[letter] for letter in word] for word in product.sizes.split()]
        values = [drawn(*shape, seed=n, low=-1).to(dtype) for n, shape in enumerate(shapes)]
        size = product.function(*(each.float() for each in values)).shape
        above = drawn(*size, seed=9, low=-1).to(dtype)

        def run(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            leaves = [change(each).requires_grad_() for each in values]
            out = product.function(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, change(above))]

        what = f"{product.name} of {dtype}, sizes {' '.join(map(str, shapes))}"
        return cls(
            product=product,
            terms=max(sizes.values()),
            what=what,
            values=values,
            above=above,
            wanted=run(lambda each: each.double()),
            magnitudes=run(lambda each: each.double().abs()),
        )


def _try(on: Opened, trial: _Trial, layout: str) -> None:
    layouts, dtype = itertools.cycle(LAYOUTS[layout]), trial.above.dtype
    inputs = [arrange(each) for each, arrange in zip(trial.values, layouts, strict=False)]
    upstream, above = next(layouts)(trial.above)
    wholes = [whole.to(on.device, copy=True).requires_grad_() for whole, _ in inputs]
    views = [view for _, view in inputs]
    seen = [view(whole) for whole, view in zip(wholes, views, strict=True)]
    out = trial.product.function(*seen)
    found = [out.detach()]
    found += torch.autograd.grad(out, wholes, above(upstream.to(on.device, copy=True)))
    # The gradient of what no view shows is 0.
    bases = [None, *(torch.zeros_like(whole, dtype=torch.float64) for whole, _ in inputs)]
    shapes = list(zip([None, *views], bases, strict=True))
    names = ["", *(f", gradient {n}" for n in range(len(inputs)))]
    if trial.product.out:
        filled, view = LAYOUTS[layout][0](torch.full_like(trial.above, 3))
        given = filled.to(on.device, copy=True)
        trial.product.function(*(each.detach() for each in seen), out=view(given))
        found.append(given)
        shapes.append((view, filled.double()))
        names.append(", into a given tensor")
    shortened = 4 * product_roundoff(on, dtype) if dtype is torch.float32 else 0.0
    for number, (result, name) in enumerate(zip(found, names, strict=True)):
        what = f"{trial.what}, {layout}{name}"
        at = number if number < len(trial.wanted) else 0
        right = _within(trial.wanted[at], *shapes[number])
        magnitude = _within(trial.magnitudes[at], *shapes[number])
        allowed = 2 * (summed(trial.terms, magnitude, dtype) + shortened * magnitude)
        assert result.dtype == dtype, f"{what}: a result of {result.dtype}"
        compare(on_host(result), right, allowed, what)


def _within(values: torch.Tensor, view: View | None, around: torch.Tensor | None) -> torch.Tensor:
    """Values that stand in a view of a tensor."""
    if view is None or around is None:
        return values
    found = around.clone()
    view(found).copy_(values)
    return found
