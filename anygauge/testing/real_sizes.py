"""Operators at the sizes of real layers, which torch's samples lack, against the host's float64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from anygauge.testing import bounds
from anygauge.testing.bounds import (
    LAYOUTS,
    Bound,
    compare,
    dtypes,
    even_values,
    on_host,
    rounded_sum,
)
from anygauge.testing.check import TABLE_S, Device, check

LIST_LENGTH = 200
"""Tensors of a list: more than one launch takes (64 to 110, by torch's `MultiTensorApply.cuh`)."""
TIMES = 70_000
"""How often an index comes: more than 2^16."""
Function = Callable[..., Tensor]
check_sizes = partial(check, part="device", limit_s=TABLE_S)


def _check(
    on: Device, function: Function, given: Sequence[Tensor], bound: Bound, what: str, terms: int = 0
) -> tuple[Tensor, Tensor]:
    """(Found, wanted): a function on the device is within its bound of the host's in float64; to
    it comes that of a sum of so many terms of one sign."""
    found = on_host(function(*(each.to(on.device, copy=True) for each in given)))
    wanted = function(*(x.double() if x.is_floating_point() else x for x in given))
    added = rounded_sum(terms, wanted.abs(), found.dtype) if terms else 0.0
    compare(found, wanted, bound(wanted, found.dtype) + added, f"{what} of {given[0].dtype}")
    return found, wanted


SUMS: Mapping[str, Function] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(-1),
    "mean of columns": lambda x: x.t().contiguous().mean(0),
    "norm": torch.linalg.vector_norm,
    "sum of rows": lambda x: x[:, :9000].sum(-1),
    "sum to float32": lambda x: x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)),
    "sum of columns": lambda x: x[:, :9000].t().contiguous().sum(0),
}
BY_INDEX: Mapping[str, Function] = {
    "index_add_": lambda x, at, v: x.index_add_(0, at, v),
    "index_put_, accumulating": lambda x, at, v: x.index_put_((at,), v, accumulate=True),
    "the gradient of an embedding": lambda x, at, v: torch.autograd.grad(
        nn.embedding(at, x.requires_grad_()), x, v
    )[0],
}
ELEMENTWISE: Mapping[str, tuple[Bound, Function]] = {
    "the conversion from float32": (bounds.round_either_way, lambda x, _, full: full.type_as(x)),
    "add": (bounds.round_either_way, lambda x, y, _: x + y),
    "mul": (bounds.round_either_way, lambda x, y, _: x * y),
    "div": (bounds.normwise, lambda x, y, _: x / y),
    "add_": (bounds.normwise, lambda x, y, _: (x * 1).add_(y, alpha=3)),
    "lerp": (bounds.normwise, lambda x, y, _: torch.lerp(x, y, 0.3)),
}


@check_sizes(
    "long sums keep their digits, over all and along each dimension, and those of an index that "
    f"comes {TIMES:,} times",
    means="losses and norms of large models, or gradients of frequent tokens, such as padding, "
    "would be wrong; look for sums that are kept in the inputs' type, for counts and offsets of "
    "too few bits, and for adding that is not atomic",
)
def long_sums(on: Device) -> None:
    for dtype, (name, of_all) in itertools.product(dtypes(on), SUMS.items()):
        values = even_values(5, 2**14 + 3, seed=6, low=0.25, high=1).to(dtype)
        terms = values.numel()
        _check(on, of_all, [values], bounds.round_either_way, f"{name} of {terms}", 4 * terms)
    places = torch.where(torch.arange(TIMES) % 7 > 0, 3, torch.arange(TIMES) // 7 % 5)
    given = torch.zeros(5, 4), places, even_values(TIMES, 4, seed=9).float()
    for name, by_index in BY_INDEX.items():
        _check(on, by_index, given, bounds.round_either_way, f"{name}, {TIMES} indices", 4 * TIMES)


@check_sizes(
    "results of each element, and conversions, are rounded to nearest: errors lean to no side",
    means="weights would drift with every update; look for results that are cut off, which is the "
    "usual shortcut, or that are computed in a shorter type",
)
def rounding_leans_to_no_side(on: Device) -> None:
    for dtype in dtypes(on):
        x, y = (even_values(257, 301, seed=seed, low=0.5, high=4).float() for seed in (1, 2))
        given = x.to(dtype), y.to(dtype), x
        for name, (bound, function) in ELEMENTWISE.items():
            bounds.check_unbiased(*_check(on, function, given, bound, name), name)


PRODUCTS: Mapping[str, Function] = {
    "mm": lambda x, w: torch.mm(x, w.t().contiguous()),
    "linear": nn.linear,
    "mv": lambda x, w: torch.mv(w, x[0]),
    "mm of one column": lambda x, w: torch.mm(w, x.t()),
    "bmm": lambda x, w: torch.bmm(torch.stack((x, x.flip(-1))), w.t().expand(2, *w.t().shape)),
}
SHAPES = ((67, 2048, 71), (67, 4099, 71), (1301, 9, 1613))
"""Of "mm": terms that are a power of two, more that no block divides, and 8 MiB of results."""
ONE_ROW = tuple((1, terms, 67) for terms in (1, 4097, 11008, 32768))
"""Of the others, as in generation and a LoRA layer."""


def _product(
    on: Device, function: Function, inputs: Sequence[Tensor], terms: int, what: str
) -> tuple[Tensor, Tensor]:
    """Compare a product, within the bound of its sums and of its factors."""
    magnitude, dtype = function(*(each.double().abs() for each in inputs)), inputs[0].dtype
    # Factors of float32 may be shortened.
    factors = 4 * bounds.product_roundoff(on, dtype) * (dtype is torch.float32)
    bound = rounded_sum(terms, magnitude, dtype) + factors * magnitude
    return _check(on, function, inputs, lambda *_: bound, what)


@check_sizes(
    "long products, and those of one row, keep their digits: errors are those of float32 sums and "
    "lean to no side",
    means="a model, a LoRA layer or a last short batch would be wrong without an error in sight; "
    "look for accumulators of the inputs' type, results cut off instead of rounded, another kernel "
    "for one row, how it splits a long sum, and float32 products in a shorter type (declare that "
    "one with Placement.float32_product_bits)",
)
def products_keep_their_digits(on: Device) -> None:
    # Of one sign, too: terms that cancel hide a sum that is kept in too few digits.
    for (name, call), low, dtype in itertools.product(PRODUCTS.items(), (0.5, -1.5), dtypes(on)):
        unit, factors = bounds.roundoff(dtype), bounds.product_roundoff(on, dtype)
        for rows, terms, columns in SHAPES if name == "mm" else ONE_ROW:
            x = even_values(rows, terms, seed=1, low=low).to(dtype)
            w = even_values(columns, terms, seed=2, low=low).to(dtype)
            what = f"{name}, {rows} x {terms} x {columns} from {low}"
            found, wanted = _product(on, call, (x, w), terms * (4 if rows == 1 else 1), what)
            if low > 0:
                # Many roundings of one sum need not cancel: those of float32 by their root. Shorter
                # factors may be cut off.
                lean = terms**0.5 * bounds.roundoff(torch.float32) + 4 * max(factors - unit, 0.0)
                bounds.check_unbiased(found, wanted, what, bounds.MAX_BIAS + lean / unit)


WIDE_ROWS: Mapping[str, Function] = {
    "softmax": lambda x, *_: torch.softmax(x, -1),
    "softmax of columns": lambda x, *_: torch.softmax(x.t(), 0),
    "log_softmax": lambda x, *_: torch.log_softmax(x, -1),
    "cross entropy": lambda x, _, targets: nn.cross_entropy(x, targets),
    "layer norm": lambda x, scale, _: nn.layer_norm(x, x.shape[-1:], scale),
    "rms norm": lambda x, scale, _: nn.rms_norm(x, x.shape[-1:], scale, 1e-5),
}


def _gradient(function: Function, x: Tensor, *others: Tensor) -> Tensor:
    """Return a function's gradient, for values from above that differ, and that each type has."""
    out = function(x.requires_grad_(), *others)
    above = (torch.arange(out.numel()) % 7 - 3).reshape(out.shape) / 4
    return torch.autograd.grad(out, x, above.to(out))[0]


@check_sizes(
    "softmax, losses and norms of rows above 4,096 columns agree with float64, and gradients",
    means="the loss over a vocabulary, long attention or a wide layer would be wrong; look at the "
    "kernel for rows that do not fit one block, and at how it joins their parts",
)
def wide_rows(on: Device) -> None:
    # Devices change kernels above 4,096; the other is of a large vocabulary.
    for dtype, columns in itertools.product(dtypes(on), (4097, 131072)):
        x, scale = (even_values(n, columns, seed=7, low=-3, high=3).to(dtype) for n in (3, 1))
        x[:, -1] = 6.0  # the largest of each row
        targets = torch.tensor([columns - 1, columns // 2 + 1, -100])  # the last does not count
        given = x, scale[0], targets
        for name, function in WIDE_ROWS.items():
            for of, tried in (("", function), ("the gradient of ", partial(_gradient, function))):
                _check(on, tried, given, bounds.normwise, f"{of}{name} of 3 x {columns}", columns)


FOREACH: Mapping[str, Callable[..., Any]] = {
    "_foreach_add_": lambda x, y, z: torch._foreach_add_(x, y, alpha=2),
    "_foreach_sub_": lambda x, y, z: torch._foreach_sub_(x, y),
    "_foreach_mul_": lambda x, y, z: torch._foreach_mul_(x, y),
    "_foreach_mul_ by a tensor": lambda x, y, z: torch._foreach_mul_(x, z[0].flatten()[0] * 0 + 3),
    "_foreach_div_": lambda x, y, z: torch._foreach_div_(x, z),
    "_foreach_lerp_": lambda x, y, z: torch._foreach_lerp_(x, y, 0.25),
    "_foreach_addcmul_": lambda x, y, z: torch._foreach_addcmul_(x, y, z, 0.5),
    "_foreach_addcdiv_": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, -0.5),
    "_foreach_copy_": lambda x, y, z: torch._foreach_copy_(x, y),
    "_foreach_sqrt": lambda x, y, z: torch._foreach_sqrt(z),
    "_foreach_norm": lambda x, y, z: torch._foreach_norm(y),
}


def _list(seed: int) -> list[Tensor]:
    """Float32 values of odd sizes, small and large in turn, as an adapter's factors have them."""
    sizes = [(n % 7 + 1, 4 + n % 5) if n % 20 else (17, 1031) for n in range(LIST_LENGTH)]
    return [even_values(*size, seed=seed + n).float() for n, size in enumerate(sizes)]


@check_sizes(
    f"`_foreach` functions, clipping and AdamW of {LIST_LENGTH} tensors are those of one at a time",
    means="the last factors of an adapter would stay untrained, be trained twice, or gradients be "
    "clipped to another norm; look at how the device splits a list of tensors into launches, at "
    "the last of them, and at the `_foreach` and fused forms of the optimizer",
)
def lists_of_tensors(on: Device) -> None:
    host = [_list(100), _list(400), _list(700)]
    for name, function in FOREACH.items():
        there = [[each.to(on.device, copy=True) for each in one] for one in host]
        result = function(*there)
        for number, mine in enumerate(result or there[0]):
            # One at a time, in float64: what cannot be wrong in a list.
            one = [[each[number].double()] for each in host]
            right = (function(*one) or one[0])[0]
            allowed = bounds.normwise(right, torch.float32) + 1e-6  # parts of about 1 may cancel
            compare(on_host(mine), right, allowed, f"{name}, tensor {number} of {LIST_LENGTH}")
    wanted = _trained(Tensor.double, foreach=False)
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}, {}):
        # Torch has not got every form for each type of device.
        with contextlib.suppress(*[RuntimeError] * any(form.values())):
            found = _trained(lambda each: each.to(on.device, copy=True), **form)
            for number, (mine, right) in enumerate(zip(found, wanted, strict=True)):
                what = f"tensor {number} of {LIST_LENGTH}" if number else "the gradients' norms"
                compare(mine, right, 2e-4 * right.abs().clamp(min=1), f"AdamW {form}, {what}")


def _trained(change: Callable[[Tensor], Tensor], **form: bool) -> list[Tensor]:
    """Norms of the gradients of three steps of 0.05 with AdamW, then the weights after them."""
    weights = [torch.nn.Parameter(change(each)) for each in _list(100)]
    gradients, norms = _list(500), []
    optimizer = torch.optim.AdamW(weights, 0.05, (0.8, 0.9), weight_decay=0.1, **form)
    for step in range(3):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = change((gradient - 1) * (1 + step))
        many = form.get("foreach", form.get("fused"))
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=many))
        optimizer.step()
    return [on_host(each) for each in (torch.stack(norms), *weights)]


LENGTHS: Mapping[str, tuple[Bound, Function]] = {
    "mul": (bounds.round_either_way, lambda x: x * x),
    "silu": (bounds.normwise, nn.silu),
    "cat": (bounds.exact, lambda x: torch.cat((x, x))),
    "sum": (lambda w, d: rounded_sum(1024, w.abs() + 512, d), torch.sum),
    "softmax": (bounds.normwise, lambda x: torch.softmax(x, 0)),
}


@check_sizes(
    "each odd length from 1 to 1,024 is right: of elements, sums, softmax, products and copies",
    means="rows of some lengths would be wrong in their last elements; look at the last, "
    "incomplete block of a kernel",
)
def odd_lengths(on: Device) -> None:
    # Where every new shape is compiled, all would take minutes.
    lengths = range(1, 1025, 74 if on.backend.graph.accumulates else 2)
    for turn, dtype in enumerate(dtypes(on)):
        for length in lengths[turn :: 1 + 3 * turn]:
            x = even_values(length, seed=length, low=-1, high=1).to(dtype)
            for name, (bound, function) in LENGTHS.items():
                _check(on, function, [x], bound, f"{name} of {length}")
            _product(on, torch.mm, (x[None], torch.stack((x, x), 1)), 4 * length, f"mm of {length}")


WRITES: Sequence[tuple[str, Bound, Callable[[Tensor, Tensor], Any]]] = (
    ("copy_", bounds.exact, lambda x, y: x.copy_(y)),
    ("copy_ to the transposed", bounds.exact, lambda x, y: x.t().copy_(y.t())),
    ("zero_", bounds.exact, lambda x, y: x.zero_()),
    ("add_", bounds.normwise, lambda x, y: x.add_(y)),
    ("mul_", bounds.round_either_way, lambda x, y: x.mul_(y)),
    ("addcdiv_", bounds.normwise, lambda x, y: x.addcdiv_(y, y + 1, value=-0.5)),
    ("masked_fill_", bounds.exact, lambda x, y: x.masked_fill_(y > 1, 5)),
    ("add into a given tensor", bounds.round_either_way, lambda x, y: torch.add(y, 1, out=x)),
    ("softmax into a given tensor", bounds.normwise, lambda x, y: torch.softmax(y, -1, out=x)),
    ("sum into a column", lambda w, d: rounded_sum(400, w.abs() + 400, d),
     lambda x, y: torch.sum(y, -1, out=x[:, 1])),
)  # fmt: skip
"""Name, bound and an operation that changes its first input: all that stands around that stays."""


@check_sizes(
    "what is written into a view or a given tensor stands there, and nothing beside it changes",
    means="an optimizer, a mask or a fused layer would write beside its tensor or not at all; look "
    "at how kernels take the offset and the strides of what they write",
)
def forms_that_write(on: Device) -> None:
    layouts = [*LAYOUTS.items()][:: 2 if on.backend.graph.accumulates else 1]
    numbers = range(len(layouts))
    for dtype, size, number in itertools.product(dtypes(on), ((17, 33), (256, 144)), numbers):
        values = (even_values(*size, seed=seed, high=2).to(dtype) for seed in (0, 1))
        # The second lies in memory as the first does next.
        given = [layouts[(number + n) % len(layouts)][1](each) for n, each in enumerate(values)]
        for name, bound, write in WRITES:
            there = [whole.to(on.device, copy=True) for whole, _ in given]
            here = [whole.double() for whole, _ in given]
            for wholes in (there, here):
                write(*(view(whole) for whole, (_, view) in zip(wholes, given, strict=True)))
            what = f"{name} of {dtype}, {layouts[number][0]}, sizes {list(size)}"
            compare(on_host(there[0]), here[0], bound(here[0], dtype), what)
