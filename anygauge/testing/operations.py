"""Operations in a table: each over strides, offsets, sizes, dimensions and types, against float64.

A line names an operation, its inputs (words of `DOMAINS`) and how exact its result must be.
Everything is queued on the device first and read afterwards, as a step of training does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anygauge.testing.bounds import (
    Bound,
    compare,
    level,
    normwise,
    on_host,
    rounded,
    summed,
    types,
    unbiased,
)
from anygauge.testing.check import Opened

View = Callable[[torch.Tensor], torch.Tensor]
INTEGERS = (torch.int64, torch.int32)
OUTSIDE = 77
"""What stands in memory around a view: it must be neither read nor written."""
WIDE = 2**40 + 1
"""Times a small integer it is one that neither 32 bits nor a float32 hold."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A line of a table.

    Attributes:
        name: of torch.
        function: gets the inputs, and `dim` if `dims`.
        inputs: words of `DOMAINS`, one for each.
        bound: of a result; None for a sum (see `bounds.summed`).
        gradient: compare the inputs' gradients, too.
        writes: it changes its first input, which is then compared with all that stands around it.
        dims: try each dimension.
        integers: try the types of integers, too.
        lower: try the types below float32, too.
    """

    name: str
    function: Callable[..., Any]
    inputs: str
    bound: Bound | None = rounded
    gradient: bool = False
    writes: bool = False
    dims: bool = False
    integers: bool = False
    lower: bool = True


@dataclass(frozen=True, slots=True)
class Draw:
    """Makes inputs of a shape and type on the host, the same each time.

    Attributes:
        wide: integers of 64 bits are `WIDE` times as large.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator
    wide: bool = False

    def numbers(self, low: float, high: float) -> torch.Tensor:
        """Evenly between two bounds; whole ones between ten times both for a type of integers."""
        if not self.dtype.is_floating_point:
            bounds = int(10 * low), int(10 * high) + 1
            values = torch.randint(*bounds, self.shape, generator=self.generator)
            return (values * (WIDE if self.wide else 1)).to(self.dtype)
        values = torch.rand(self.shape, generator=self.generator, dtype=torch.float64)
        return (values * (high - low) + low).to(self.dtype)

    def signed(self) -> torch.Tensor:
        """Of either sign and not near zero."""
        negative = torch.rand(self.shape, generator=self.generator) < 0.5
        values = self.numbers(0.5, 2)
        return torch.where(negative, -values, values)

    def mask(self) -> torch.Tensor:
        """Truths."""
        return torch.rand(self.shape, generator=self.generator) < 0.4

    def peaks(self) -> torch.Tensor:
        """One value in each row is the largest, mostly in its second half; one is so of all."""
        values = self.numbers(-3, 3)
        columns = self.shape[-1] if self.shape else 0
        for number, row in enumerate(values.view(-1, columns) if columns else ()):
            row[-1 - number * 7 % columns * 5 // 8] = 40 if number == self.shape[0] - 2 else 20
        return values

    def classes(self) -> torch.Tensor:
        """For each row a place in it, or -100: it does not count."""
        columns = max(self.shape[-1], 1)
        found = torch.randint(0, columns, self.shape[:-1], generator=self.generator)
        return torch.where(found % 4 == 1, -100, found)

    def row(self) -> torch.Tensor:
        """Values of the last dimension, which are broadcast."""
        return Draw(self.shape[-1:], self.dtype, self.generator).numbers(-2, 2)

    def index(self) -> torch.Tensor:
        """Places in a dimension of at least three, many of them twice, in no order."""
        least = min(self.shape, default=0)
        return torch.randint(0, max(least, 1), self.shape, generator=self.generator)

    def places(self) -> torch.Tensor:
        """Places in the first dimension, as many again as it has, so that some come twice."""
        size = self.shape[0]
        return torch.randint(0, max(size, 1), (size + 2,), generator=self.generator)


DOMAINS: dict[str, Callable[[Draw], torch.Tensor]] = {
    "any": lambda draw: draw.numbers(-3, 3),
    "positive": lambda draw: draw.numbers(0.5, 4),
    "nonzero": Draw.signed,
    "unit": lambda draw: draw.numbers(-1, 1),
    "mask": Draw.mask,
    "row": Draw.row,
    "index": Draw.index,
    "places": Draw.places,
    "peaks": Draw.peaks,
    "classes": Draw.classes,
}
OF_INTEGERS = ("mask", "index", "places", "classes")
"""Words of what has a type of its own."""


# -- layouts --------------------------------------------------------------------------------------


def _whole(values: torch.Tensor) -> tuple[torch.Tensor, View]:
    return values, lambda whole: whole


def _transposed(values: torch.Tensor) -> tuple[torch.Tensor, View]:
    return values.transpose(0, -1).contiguous(), lambda whole: whole.transpose(0, -1)


def _sliced(values: torch.Tensor) -> tuple[torch.Tensor, View]:
    def view(whole: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(values.shape):
            whole = whole.narrow(dim, dim + 1, size)
        return whole

    sizes = [size + dim + 2 for dim, size in enumerate(values.shape)]
    whole = torch.full(sizes, OUTSIDE).to(values.dtype)
    view(whole).copy_(values)
    return whole, view


def _stepped(values: torch.Tensor) -> tuple[torch.Tensor, View]:
    whole = torch.full((*values.shape[:-1], 2 * values.shape[-1]), OUTSIDE).to(values.dtype)
    whole[..., 1::2] = values
    return whole, lambda whole: whole[..., 1::2]


def _expanded(values: torch.Tensor) -> tuple[torch.Tensor, View]:
    shape = values.shape
    return values[:1].clone(), lambda whole: whole.expand(shape)


LAYOUTS = {
    "contiguous": (_whole,),
    "transposed": (_transposed,),
    "sliced": (_sliced,),
    "every second": (_stepped,),
    "expanded": (_expanded,),
    "contiguous with transposed": (_whole, _transposed),
    "sliced with expanded": (_sliced, _expanded),
}
"""How inputs stand in memory: of several, each takes the next."""
SMALL = (17, 33)
CASES: Sequence[tuple[str, tuple[int, ...]]] = (
    *((layout, SMALL) for layout in LAYOUTS),
    ("contiguous", ()),
    ("contiguous", (0, 7)),
    ("contiguous", (1,)),
    ("sliced", (3, 5, 7)),
    ("transposed", (3, 5, 7)),
    ("contiguous", (257, 301)),
    ("transposed", (301, 130)),
    ("contiguous", (32, 48)),  # whole blocks, whose kernels are others
    ("sliced", (256, 144)),
)
"""(Layout, sizes) for what works on each element."""
DIMENSION_CASES: Sequence[tuple[str, tuple[int, ...]]] = (
    ("contiguous", (5, 7, 9)),
    ("transposed", (5, 7, 9)),
    ("sliced", (5, 7, 9)),
    ("every second", (5, 6, 7)),
    ("contiguous", (3, 257, 45)),
    ("transposed", (3, 257, 45)),
    ("contiguous", (4, 16, 32)),
    ("sliced", (4, 64, 144)),
)
"""The same for what works along a dimension."""


# -- running --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Queued:
    """What was computed on the host, and what was queued on the device."""

    what: str
    operation: Operation
    dtype: torch.dtype
    terms: int
    found: list[torch.Tensor]
    wanted: list[torch.Tensor]
    magnitudes: list[torch.Tensor]
    repeats: Sequence[int]  # for each gradient, the elements whose gradients are added up in one


def try_all(
    on: Opened, table: Sequence[Operation], cases: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Fail with the line, type, layout and sizes of the first wrong result, and how many are."""
    for number, dtype in enumerate((*types(on), *INTEGERS)):
        failures: list[str] = []
        queued = []
        for operation, layout, shape, dim in _runs(on, table, cases, dtype, number):
            of = "" if dim is None else f" along {dim}"
            what = (
                f"{operation.name}{of} of {str(dtype).removeprefix('torch.')}, {layout}, "
                f"sizes {list(shape)}"
            )
            try:
                queued.append(_queue(on, operation, dtype, layout, shape, dim, what))
            except Exception as error:
                failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
        try:
            on.placement.synchronize()
        except Exception as error:
            # Which of them failed is unknown: reading each says more.
            failures.append(f"synchronize after {dtype}: {str(error).splitlines()[0]}")
        for each in queued:
            try:
                _judge(each)
            except Exception as error:
                failures.append(str(error).splitlines()[0])
        if failures:
            more = f" (and {len(failures) - 1} more)" if failures[1:] else ""
            raise AssertionError(failures[0] + more)


def _runs(
    on: Opened,
    table: Sequence[Operation],
    cases: Sequence[tuple[str, tuple[int, ...]]],
    dtype: torch.dtype,
    number: int,
) -> Iterator[tuple[Operation, str, tuple[int, ...], int | None]]:
    """Float32 takes each case; of those after it each operation takes another half."""
    # Where every new shape is compiled, that would take minutes.
    step = 3 if on.backend.graph.accumulates else 2
    for row, operation in enumerate(table):
        if dtype in INTEGERS and not operation.integers:
            continue
        if dtype in (torch.bfloat16, torch.float16) and not operation.lower:
            continue
        chosen = cases if step == 2 and number == 0 else cases[(row + number) % step :: step]
        for layout, shape in chosen:
            if operation.writes and "expanded" in layout.split()[:1]:
                continue  # several elements of it are one place in memory
            dims = (*range(len(shape) - 1), -1) if operation.dims else (None,)
            for dim in dims:
                yield operation, layout, shape, dim


def _queue(
    on: Opened,
    operation: Operation,
    dtype: torch.dtype,
    layout: str,
    shape: tuple[int, ...],
    dim: int | None,
    what: str,
) -> _Queued:
    generator = torch.Generator().manual_seed(len(what))
    words = operation.inputs.split()
    # Alone: a product of two such numbers has no room.
    wide = next((n for n, word in enumerate(words) if word not in OF_INTEGERS), -1)
    layouts = LAYOUTS[layout]

    def arranged(values: torch.Tensor, number: int) -> tuple[torch.Tensor, View]:
        return layouts[number % len(layouts)](values) if values.dim() else _whole(values)

    inputs = []
    for number, word in enumerate(words):
        draw = Draw(shape, dtype, generator, wide=number == wide and dtype is torch.int64)
        inputs.append(arranged(DOMAINS[word](draw), number))
    extra = {} if dim is None else {"dim": dim}
    gradient = operation.gradient and dtype.is_floating_point
    repeats: list[int] = []

    def run(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        wholes = [change(whole) for whole, _ in inputs]
        if gradient:
            wholes = [w.requires_grad_() if w.dtype.is_floating_point else w for w in wholes]
        seen = [view(whole) for whole, (_, view) in zip(wholes, inputs, strict=True)]
        result = operation.function(*seen, **extra)
        results = list(result) if isinstance(result, tuple | list) else [result]
        if operation.writes:
            return [wholes[0]]
        if gradient:
            leaves = [whole for whole in wholes if whole.requires_grad]
            out = results[0]
            above = torch.linspace(-1, 1, max(out.numel(), 1))[: out.numel()].to(dtype)
            upstream, seen_of_it = arranged(above.reshape(out.shape), len(inputs))
            results += torch.autograd.grad(out, leaves, seen_of_it(change(upstream)))
            repeats[:] = [
                out.numel() // max(_places(view), 1) for view in seen if view.requires_grad
            ]
        return [each.detach() for each in results]

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(on.device, copy=True)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.double() if tensor.dtype.is_floating_point else tensor
        return wide.clone()

    def absolute(tensor: torch.Tensor) -> torch.Tensor:
        return here(tensor).abs() if tensor.dtype.is_floating_point else here(tensor)

    wanted = run(here)
    is_sum = operation.bound is None and dtype.is_floating_point
    return _Queued(
        what=what,
        operation=operation,
        dtype=dtype,
        terms=max(shape, default=1) if operation.dims else max(1, torch.Size(shape).numel()),
        found=run(there),
        wanted=wanted,
        magnitudes=run(absolute) if is_sum else wanted,
        repeats=repeats,
    )


def _places(view: torch.Tensor) -> int:
    """Elements that do not stand in one place of memory."""
    sizes = zip(view.shape, view.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def _judge(queued: _Queued) -> None:
    operation, dtype = queued.operation, queued.dtype
    for number, (there, wanted) in enumerate(zip(queued.found, queued.wanted, strict=True)):
        what = queued.what if number == 0 else f"{queued.what}, result {number}"
        try:
            found = on_host(there)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        if not wanted.dtype.is_floating_point:
            compare(found, wanted, torch.zeros(()), what)
            continue
        assert found.dtype == dtype, f"{what}: a result of {found.dtype}"
        is_gradient = number > 0 and operation.gradient
        if is_gradient:
            # The terms that cancel in it are about as large as what comes from above: 1.
            allowed = normwise(torch.cat((wanted.reshape(-1), torch.ones(1))), dtype)
            allowed = allowed[:-1].reshape(wanted.shape)
            repeats = queued.repeats[number - 1]
            if repeats > 1:  # it was broadcast, so its gradient is a sum, of terms up to about 3
                magnitude = torch.full_like(wanted, 3.0 * repeats)
                allowed = allowed + summed(repeats, magnitude, dtype)
        elif operation.bound is None:
            allowed = summed(queued.terms, queued.magnitudes[number].abs(), dtype)
        else:
            allowed = operation.bound(wanted, dtype)
        compare(found, wanted, allowed, what)
        if is_gradient:
            level(found, wanted, dtype, what)
        elif operation.bound is rounded:
            unbiased(found, wanted, dtype, what)
