"""Operators at the sizes of real layers, which torch's own samples do not have.

Long sums and the bias of their rounding, rows above 4,096 columns, products of one row, lists of
200 tensors, an index that comes 70,000 times, each odd length to 1,024, forms that write into a
view. Expected values are the host's in float64; all is queued first and read afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import (
    LAYOUTS,
    Bound,
    compare,
    drawn,
    exact,
    near,
    normwise,
    on_host,
    product_roundoff,
    rounded,
    roundoff,
    summed,
    types,
    unbiased,
)
from anygauge.testing.check import TABLE_S, Opened, check

SHAPES = ((67, 2048, 71), (67, 4099, 71), (1301, 9, 1613))
"""Of products: terms that are a power of two, more that no block divides, and 8 MiB of results."""
ONE_ROW = (1, 4097, 11008, 32768)
"""Terms of each sum in a product of one row, as in generation and a LoRA layer."""
WIDE = (4097, 131072)
"""Columns: above 4,096 and of a large vocabulary, where devices change kernels."""
LISTED = 200
"""Tensors of a list: more than one launch takes (64 to 110, by torch's `MultiTensorApply.cuh`)."""
OFTEN = 70_000
"""How often an index comes: more than 2^16."""
ODD = range(1, 1025, 2)


# -- rounding and long sums -----------------------------------------------------------------------


@check(
    "long sums keep their digits, over all and along each dimension",
    part="device",
    means="losses and gradient norms of large models would be wrong; look for sums that are kept "
    "in the inputs' type, and for counts of elements in too few bits",
)
def long_sums(on: Opened) -> None:
    for dtype in types(on):
        values = drawn(5, 2**14 + 3, seed=6, low=0.25, high=1).to(dtype)
        wide, there = values.double(), values.to(on.device)
        across = values.t().contiguous().to(on.device)
        for what, found, wanted, terms in (
            ("mean over all", there.mean(), wide.mean(), wide.numel()),
            ("mean of the last dimension", there.mean(-1), wide.mean(-1), wide.shape[1]),
            ("mean of the first dimension", across.mean(0), wide.mean(-1), wide.shape[1]),
            ("norm", torch.linalg.vector_norm(there), wide.norm(), wide.numel()),
            ("sum in float32", there.float().sum(), wide.sum(), wide.numel()),
            ("sum to float32", there.sum(-1, dtype=torch.float32), wide.sum(-1), wide.shape[1]),
            ("sum", there[:, :9000].sum(-1), wide[:, :9000].sum(-1), 9000),
            ("sum over rows", across[:9000].sum(0), wide[:, :9000].sum(-1), 9000),
            ("cumsum in float32", there.float().cumsum(1), wide.cumsum(1), wide.shape[1]),
        ):
            allowed = 2 * summed(terms, wanted.abs(), found.dtype)
            compare(on_host(found), wanted, allowed, f"{what} of {terms} x {dtype}")


@check(
    "results of each element are rounded to nearest: their errors lean to no side",
    part="device",
    means="weights would drift with every update; look for results that are cut off, which is the "
    "usual shortcut, or that are computed in a shorter type",
)
def rounding_leans_to_no_side(on: Opened) -> None:
    operations: dict[str, Callable[..., torch.Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "mul_ by a number": lambda x, y: (x * 1).mul_(0.7),
        "add_": lambda x, y: (x * 1).add_(y, alpha=3),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        "addcmul": lambda x, y: torch.addcmul(x, x, y),
    }
    for dtype, (name, function) in itertools.product(types(on), operations.items()):
        x, y = (drawn(257, 301, seed=seed, low=0.5, high=4).to(dtype) for seed in (1, 2))
        found = on_host(function(x.to(on.device), y.to(on.device)))
        wanted = function(x.double(), y.double())
        what = f"{name} of {dtype}, sizes {list(x.shape)}"
        bound = rounded if name in ("add", "sub", "mul", "mul_ by a number") else near
        if name == "sub":
            bound = normwise
        compare(found, wanted, bound(wanted, dtype), what)
        unbiased(found, wanted, dtype, what)


# -- products -------------------------------------------------------------------------------------


def _of_product(on: Opened, magnitude: torch.Tensor, terms: int, dtype: torch.dtype) -> Any:
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
    for dtype, shape, signed in itertools.product(types(on), SHAPES, (False, True)):
        rows, terms, columns = shape
        what = f"{rows} x {terms} x {columns} of {dtype}{', of either sign' if signed else ''}"
        a = drawn(rows, terms, seed=1, low=-1.5 if signed else 0.5).to(dtype)
        b = drawn(terms, columns, seed=2, low=-1.5 if signed else 0.5).to(dtype)
        found = on_host(a.to(on.device) @ b.to(on.device))
        wanted, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        compare(found, wanted, _of_product(on, magnitude, terms, dtype), what)
        if not signed:
            # Many roundings of one sum need not cancel: those of float32 by their root.
            most = 0.25 + math.sqrt(terms) * roundoff(torch.float32) / roundoff(dtype)
            if product_roundoff(on, dtype) > roundoff(dtype):  # and these may be cut off
                most += 4 * product_roundoff(on, dtype) / roundoff(dtype)
            unbiased(found, wanted, dtype, what, most)


@check(
    "products of one row, and of a batch of them, are right up to 32,768 terms",
    part="device",
    means="a LoRA layer, a last short batch or generation would be wrong, where devices take "
    "another kernel than for many rows; look at how it splits a long sum, and at its last part",
)
def products_of_one_row(on: Opened) -> None:
    for dtype, terms in itertools.product(types(on), ONE_ROW):
        # Of one sign: terms that cancel hide a sum that is kept in too few digits.
        x, w = drawn(1, terms, seed=3, low=0).to(dtype), drawn(67, terms, seed=4, low=0).to(dtype)
        batch = drawn(3, 1, terms, seed=5, low=0).to(dtype)
        for what, function, inputs in (
            ("mm", torch.mm, (x, w.t())),
            ("linear", nn.linear, (x, w)),
            ("mv", torch.mv, (w, x[0])),
            ("mm of one column", torch.mm, (w, x.t())),
            ("bmm", torch.bmm, (batch, w.t().expand(3, terms, 67))),
            ("addmm", torch.addmm, (x[:, :1] * 2, x, w.t())),
        ):
            found = on_host(function(*(each.to(on.device) for each in inputs)))
            wanted = function(*(each.double() for each in inputs))
            magnitude = function(*(each.double().abs() for each in inputs))
            allowed = 2 * _of_product(on, magnitude, terms, dtype)
            compare(found, wanted, allowed, f"{what} of one row, {terms} terms of {dtype}")


# -- wide rows ------------------------------------------------------------------------------------


def _norm(function: Callable[..., torch.Tensor], *more: Any) -> Callable[..., torch.Tensor]:
    return lambda x, scale: function(x, x.shape[-1:], scale, *more)


WIDE_ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x, _: torch.softmax(x, -1),
    "softmax of columns": lambda x, _: torch.softmax(x.t(), 0),
    "softmax in the middle": lambda x, _: torch.softmax(x[:, :4096].reshape(3, 512, 8), 1),
    "log_softmax": lambda x, _: torch.log_softmax(x, -1),
    "logsumexp": lambda x, _: torch.logsumexp(x, -1),
    "cross entropy": lambda x, _: nn.cross_entropy(x, _targets(x)),
    "cross entropy of each": lambda x, _: nn.cross_entropy(x, _targets(x), reduction="none"),
    "layer norm": _norm(nn.layer_norm),
    "rms norm": _norm(nn.rms_norm, 1e-5),
    "sum": lambda x, _: x.sum(-1),
    "largest": lambda x, _: x.amax(-1),
}


def _targets(x: torch.Tensor) -> torch.Tensor:
    """The last class, one within and one that does not count."""
    return torch.tensor([x.shape[-1] - 1, x.shape[-1] // 2 + 1, -100], device=x.device)


@check(
    "softmax, losses and norms of rows above 4,096 columns agree with float64, and gradients",
    part="device",
    limit_s=TABLE_S,
    means="the loss over a vocabulary, long attention or a wide layer would be wrong; look at the "
    "kernel for rows that do not fit one block, and at how it joins their parts",
)
def wide_rows(on: Opened) -> None:
    for dtype, columns in itertools.product(types(on), WIDE):
        x, scale = drawn(3, columns, seed=7, low=-3, high=3).to(dtype), drawn(columns, seed=8)
        places = [columns - 1, columns // 2, 5]
        x[torch.arange(3), torch.tensor(places)] = 6.0  # the largest of each row
        scale = scale.to(dtype)
        for name, function in WIDE_ROWS.items():
            there, here = x.to(on.device, copy=True).requires_grad_(), x.double().requires_grad_()
            found, wanted = function(there, scale.to(on.device)), function(here, scale.double())
            above = torch.linspace(-1, 1, max(found.numel(), 2), dtype=torch.float64)
            above = above[-found.numel() :].reshape(found.shape).to(dtype)
            found.backward(above.to(on.device))
            wanted.backward(above.double())
            what = f"{name} of 3 x {columns} of {dtype}"
            pairs = ((what, found, wanted), (f"{what}, gradient", there.grad, here.grad))
            for of, mine, its in pairs:
                assert mine is not None and its is not None, f"{of}: there is none"
                right = its.detach()
                allowed = normwise(right, dtype) + summed(columns, right.abs(), dtype)
                compare(on_host(mine), right, allowed, of)
        found_at = on_host(x.to(on.device).argmax(-1)).tolist()
        assert found_at == places, f"argmax of 3 x {columns} of {dtype}: {found_at}, not {places}"


# -- lists of tensors -----------------------------------------------------------------------------

FOREACH: dict[str, Callable[..., Any]] = {
    "_foreach_add_": lambda x, y, z: torch._foreach_add_(x, y, alpha=2),
    "_foreach_add_ of a number": lambda x, y, z: torch._foreach_add_(x, 0.5),
    "_foreach_sub_": lambda x, y, z: torch._foreach_sub_(x, y),
    "_foreach_mul_": lambda x, y, z: torch._foreach_mul_(x, y),
    "_foreach_mul_ by a tensor": lambda x, y, z: torch._foreach_mul_(x, y[0].flatten()[0]),
    "_foreach_div_": lambda x, y, z: torch._foreach_div_(x, z),
    "_foreach_lerp_": lambda x, y, z: torch._foreach_lerp_(x, y, 0.25),
    "_foreach_addcmul_": lambda x, y, z: torch._foreach_addcmul_(x, y, z, 0.5),
    "_foreach_addcdiv_": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, -0.5),
    "_foreach_sqrt": lambda x, y, z: torch._foreach_sqrt(z),
    "_foreach_copy_": lambda x, y, z: torch._foreach_copy_(x, y),
    "_foreach_zero_": lambda x, y, z: torch._foreach_zero_(x),
    "_foreach_norm": lambda x, y, z: torch._foreach_norm(y),
}


def _list(seed: int) -> list[torch.Tensor]:
    """Float32 values of odd sizes, small and large in turn, as an adapter's factors have them."""
    sizes = [(n % 7 + 1, 4 + n % 5) if n % 20 else (17, 1031) for n in range(LISTED)]
    return [drawn(*size, seed=seed + n).float() for n, size in enumerate(sizes)]


@check(
    f"`_foreach` functions of {LISTED} tensors do to each what is done to one",
    part="device",
    limit_s=TABLE_S,
    means="the last factors of an adapter would stay untrained, or be trained twice; look at how "
    "the device splits a list of tensors into launches, and at the last of them",
)
def lists_of_tensors(on: Opened) -> None:
    host = [_list(100), _list(400), _list(700)]
    for name, function in FOREACH.items():
        there = [[each.to(on.device, copy=True) for each in one] for one in host]
        result = function(*there)
        found = [on_host(each) for each in (there[0] if name.endswith("_") else result or there[0])]
        for number, mine in enumerate(found):
            # One at a time, in float64: what cannot be wrong in a list.
            one = [[each[number].double()] for each in host]
            if name.endswith("by a tensor"):
                one[1] = [host[1][0].double()]
            its = function(*one)
            right = (one[0] if name.endswith("_") else its or one[0])[0]
            allowed = normwise(right, torch.float32) + 1e-6  # parts of about 1 may cancel
            compare(mine, right, allowed, f"{name}, tensor {number} of {LISTED}")


@check(
    f"clipping and AdamW of {LISTED} tensors are those of one at a time, in each form that it has",
    part="device",
    limit_s=TABLE_S,
    means="gradients would be clipped to another norm, or some weights not be updated; look at the "
    "`_foreach` and fused forms of the optimizer, and at the norm over all tensors",
)
def updates_of_many_tensors(on: Opened) -> None:
    gradients = _list(500)
    numbers: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}

    def trained(
        many: bool | None, change: Callable[[torch.Tensor], torch.Tensor], **form: Any
    ) -> tuple[list[float], list[torch.Tensor]]:
        """Norms of the gradients of three steps, and the weights after them."""
        weights = [torch.nn.Parameter(change(each)) for each in _list(100)]
        optimizer = torch.optim.AdamW(weights, **numbers, **form)
        norms = []
        for step in range(3):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = change((gradient - 1) * (1 + step))
            norm = torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=many)
            norms.append(float(on_host(norm)))
            optimizer.step()
        return norms, [on_host(each) for each in weights]

    norms, weights = trained(False, torch.Tensor.double, foreach=False)
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}, {}):
        many = form.get("foreach", form.get("fused"))
        try:
            found = trained(many, lambda each: each.to(on.device, copy=True), **form)
        except RuntimeError:
            if form.get("fused") or many:  # torch has not got the form for this type of device
                continue
            raise
        for mine, its in zip(found[0], norms, strict=True):
            assert abs(mine / its - 1) < 1e-4, f"norm of {LISTED} gradients, {form}: {mine}, {its}"
        for number, (weight, right) in enumerate(zip(found[1], weights, strict=True)):
            allowed = torch.full_like(right, 2e-4)  # of three steps of 0.05
            compare(weight, right, allowed, f"AdamW {form}, tensor {number} of {LISTED}")


# -- indices and lengths --------------------------------------------------------------------------


@check(
    f"an index that comes {OFTEN:,} times adds up all that it is given",
    part="device",
    means="gradients of frequent tokens, such as padding, would be too small; look for adding that "
    "is not atomic, and for counts and offsets of 16 bits",
)
def one_index_many_times(on: Opened) -> None:
    places = torch.full((OFTEN,), 3)
    places[::7] = torch.arange(len(places[::7])) % 5
    values = drawn(OFTEN, 4, seed=9).float()
    table = torch.zeros(5, 4)

    def through_embedding(x: torch.Tensor, at: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(nn.embedding(at, x.requires_grad_()), x, v)[0]

    def scattered(x: torch.Tensor, at: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.scatter_add_(0, at.unsqueeze(1).expand_as(v), v)

    functions: dict[str, Callable[..., torch.Tensor]] = {
        "index_add_": lambda x, at, v: x.index_add_(0, at, v),
        "index_put_, accumulating": lambda x, at, v: x.index_put_((at,), v, accumulate=True),
        "scatter_add_": scattered,
        "the gradient of an embedding": through_embedding,
    }
    for name, function in functions.items():
        found = function(*(each.to(on.device, copy=True) for each in (table, places, values)))
        wanted = function(table.double(), places, values.double())
        allowed = 2 * summed(OFTEN, wanted, torch.float32)
        compare(on_host(found), wanted, allowed, f"{name}, {OFTEN} indices")
    counts = torch.zeros(5, dtype=torch.int64, device=on.device)
    counts.index_add_(0, places.to(on.device), torch.ones(OFTEN, dtype=torch.int64).to(on.device))
    assert on_host(counts).tolist() == torch.bincount(places).tolist(), f"counts: {counts.tolist()}"


LENGTHS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Bound]] = {
    "mul": (lambda x: x * x, rounded),
    "square": (lambda x: x.pow(2), near),
    "silu": (nn.silu, normwise),
    "clone": (torch.clone, exact),
    "flip": (lambda x: x.flip(0), exact),
    "cat": (lambda x: torch.cat((x, x)), exact),
    "sum": (lambda x: x.sum(), lambda w, d: summed(1024, w.abs() + 512, d)),
    "softmax": (lambda x: torch.softmax(x, 0), normwise),
    "product": (lambda x: x[None] @ torch.stack((x, x), 1), lambda w, d: 2 * summed(1024, w, d)),
    "product of columns": (lambda x: x[:, None] @ x[None, :3], near),
    "last": (lambda x: x[-1:] * 1, exact),
}


@check(
    "each odd length from 1 to 1,024 is right: of elements, sums, softmax, products and copies",
    part="device",
    limit_s=TABLE_S,
    means="rows of some lengths would be wrong in their last elements; look at the last, "
    "incomplete block of a kernel",
)
def odd_lengths(on: Opened) -> None:
    # Where every new shape is compiled, all would take minutes.
    lengths = ODD[:: 37 if on.backend.graph.accumulates else 1]
    for turn, dtype in enumerate(types(on)):
        queued = []
        for length in lengths[turn :: 1 + 3 * turn]:
            x = drawn(length, seed=length, low=-1, high=1).to(dtype)
            there = x.to(on.device)
            for name, (function, bound) in LENGTHS.items():
                queued.append((name, length, function(there), function(x.double()), bound))
        on.placement.synchronize()
        for name, length, found, wanted, bound in queued:
            allowed = bound(wanted, dtype)
            if "product" in name and product_roundoff(on, dtype) > roundoff(dtype):
                allowed = allowed + 8 * product_roundoff(on, dtype) * length
            compare(on_host(found), wanted, allowed, f"{name} of {length} x {dtype}")


# -- forms that write into a view -----------------------------------------------------------------


def _into(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda out, *inputs: function(*inputs, *arguments, out=out)


WRITES: Sequence[tuple[str, int, Bound, Callable[..., Any]]] = (
    ("copy_", 2, exact, lambda x, y: x.copy_(y)),
    ("copy_ of a row", 2, exact, lambda x, y: x.copy_(y[0])),
    ("copy_ to a row", 2, exact, lambda x, y: x[3].copy_(y[0])),
    ("copy_ to the transposed", 2, exact, lambda x, y: x.t().copy_(y.t())),
    ("copy_ of another type", 2, exact, lambda x, y: x.copy_(y > 1)),
    ("fill_", 1, exact, lambda x: x.fill_(3)),
    ("zero_", 1, exact, lambda x: x.zero_()),
    ("add_", 2, normwise, lambda x, y: x.add_(y)),
    ("mul_", 2, rounded, lambda x, y: x.mul_(y)),
    ("addcdiv_", 3, normwise, lambda x, y, z: x.addcdiv_(y, z, value=-0.5)),
    ("lerp_", 2, normwise, lambda x, y: x.lerp_(y, 0.3)),
    ("masked_fill_", 2, exact, lambda x, y: x.masked_fill_(y > 1, 5)),
    ("index_add_", 2, normwise, lambda x, y: x.index_add_(0, _turned(x), y)),
    ("index_put_", 2, exact, lambda x, y: x.index_put_((_turned(x)[:5],), y[:5])),
    ("add into a given tensor", 3, rounded, _into(torch.add)),
    ("exp into a given tensor", 2, near, _into(torch.exp)),
    ("cat into a given tensor", 2, exact,
     lambda out, x: torch.cat((x[: len(x) // 2], x[len(x) // 2 :]), out=out)),
    ("softmax into a given tensor", 2, normwise, _into(torch.softmax, -1)),
    ("sum into a column", 2, lambda w, d: summed(400, w.abs() + 400, d),
     lambda out, x: torch.sum(x, -1, out=out[:, 1])),
    ("mm into a given tensor", 2, normwise, lambda out, x: torch.mm(x, _unit(x), out=out)),
)  # fmt: skip
"""Name, inputs, bound and an operation that changes its first input: all that stands around that
must stay."""


def _turned(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0] - 1, -1, -1, device=x.device)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[1], device=x.device).to(x.dtype)


WRITTEN: Sequence[tuple[int, int]] = ((17, 33), (256, 144))


@check(
    "what is written into a view or a given tensor stands there, and nothing beside it changes",
    part="device",
    limit_s=TABLE_S,
    means="an optimizer, a mask or a fused layer would write beside its tensor or not at all; look "
    "at how kernels take the offset and the strides of what they write",
)
def forms_that_write(on: Opened) -> None:
    for dtype, size, (name, count, bound, write) in itertools.product(types(on), WRITTEN, WRITES):
        for number, layout in enumerate(LAYOUTS):
            if layout == "expanded" or (on.backend.graph.accumulates and number % 2):
                continue
            arranged = [
                LAYOUTS[layout][n % len(LAYOUTS[layout])](drawn(*size, seed=n, high=2).to(dtype))
                for n in range(count)
            ]

            def run(change: Callable[[torch.Tensor], torch.Tensor], of: Any = arranged) -> Any:
                wholes = [change(whole) for whole, _ in of]
                views = [view(whole) for whole, (_, view) in zip(wholes, of, strict=True)]
                write(*views)  # noqa: B023  (called at once)
                return wholes[0]

            found = run(lambda whole: whole.to(on.device, copy=True))
            wanted = run(lambda whole: whole.double())
            what = f"{name} of {dtype}, {layout}, sizes {list(size)}"
            allowed = bound(wanted, dtype)
            if name.startswith("mm"):
                allowed = allowed + 8 * product_roundoff(on, dtype) * wanted.abs()
            compare(on_host(found), wanted, allowed, what)
