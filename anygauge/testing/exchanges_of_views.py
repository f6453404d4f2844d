"""Checks of every function of `torch.distributed` over views, sizes and types.

A line of `REDUCTIONS`, `COPIES` and `EXCHANGES` is a function; each is called for every type, with
every line of `CASES`. All that a rank holds afterwards is compared: results, inputs, and what lies
around both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.interface import HOST_DEVICE
from anygauge.testing.together import GUARD, Together, check_on_ranks

AROUND = 5
"""What stands in memory around a view."""
WHOLE, WITHIN, ROWS, GAPS = "whole", "within a buffer", "rows of a buffer", "every second"
COLUMNS = 3
MADE = "values of views"
"""Of `Together.kept`: values of the host, while a check runs."""


@dataclass(frozen=True, slots=True)
class ViewCase:
    """How the tensors of a call lie, and how many elements they have.

    Attributes:
        size: of the first dimension of what a rank has for one rank.
        waits: the call returns a handle, which is waited for.
    """

    layout: str
    size: int
    waits: bool = False


CASES = (
    ViewCase(WITHIN, 7),
    ViewCase(WITHIN, 64, waits=True),
    ViewCase(WITHIN, 1),
    ViewCase(ROWS, 5, waits=True),
    ViewCase(WHOLE, 48),
    ViewCase(WITHIN, 2**16 + 3),
    ViewCase(WHOLE, 2**17, waits=True),
)
GAPPED = (ViewCase(GAPS, 7), ViewCase(GAPS, 2**10, waits=True))
"""For functions that every known library either refuses or does right."""


def _values(on: Together, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """What a rank gives, in float64 or int64 on the host; never written to."""
    made = on.kept.setdefault(MADE, {})
    name = shape, dtype, rank
    if name not in made:
        whole = not dtype.is_floating_point
        made[name] = on.whole(shape, dtype, rank) if whole else on.exact(shape, dtype, rank)
    found: Tensor = made[name]
    return found


@dataclass(slots=True)
class Call:
    """One call of a function on this rank: it makes tensors, and then judges them.

    Attributes:
        root: the rank that sends or receives, where there is one.
    """

    on: Together
    case: ViewCase
    dtype: torch.dtype
    root: int
    what: str
    made: list[tuple[Tensor, Tensor, Tensor | None, str]] = field(default_factory=list)

    def values(self, rank: int, parts: int = 1) -> Tensor:
        """What a rank gives, on the host: for one rank, or a part for each."""
        columns = (COLUMNS,) if self.case.layout == ROWS else ()
        return _values(self.on, (self.case.size * parts, *columns), self.dtype, rank)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Of a tensor with a part for each rank, that of one."""
        return whole[self.case.size * rank : self.case.size * (rank + 1)]

    def holds(self, values: Tensor, wanted: Tensor | None, name: str = "input") -> Tensor:
        """A tensor of these values on the device, which must hold those wanted afterwards.

        Args:
            wanted: None where that is left to the library.
        """
        size, shape = values.numel(), tuple(values.shape)
        step, guard = (2, GUARD) if self.case.layout == GAPS else (1, GUARD)
        guard = 0 if self.case.layout == WHOLE else guard * math.prod(shape[1:])
        memory = torch.full((size * step + 2 * guard,), AROUND).to(values.dtype)
        inside = slice(guard, guard + size * step, step)
        memory[inside] = values.reshape(-1)
        there = self.on.put(memory, self.dtype)
        if wanted is not None:
            memory[inside] = wanted.reshape(-1)
        self.made.append((there, memory, wanted, name))
        return there[inside].view(shape)

    def input(self, values: Tensor) -> Tensor:
        """A tensor that stays as it is."""
        return self.holds(values, values)

    def output(self, wanted: Tensor) -> Tensor:
        """A tensor for a result."""
        return self.holds(torch.full_like(wanted, 77), wanted, "result")

    def judge(self) -> None:
        """Note each tensor that does not hold what it must, with all that lies around it."""
        for there, memory, wanted, name in self.made:
            if wanted is None:
                continue
            found = there.to(HOST_DEVICE).to(memory.dtype)
            if torch.equal(found, memory):
                continue
            wrong = (found != memory).nonzero()[:, 0]
            first = int(wrong[0])
            self.on.hold(
                False,
                f"{self.what}: {len(wrong)} of {memory.numel()} places in the memory of its {name} "
                f"are wrong; number {first} should be {memory[first].item()!r} and is "
                f"{found[first].item()!r}",
            )


def _summed(call: Call, parts: int = 1) -> Tensor:
    return torch.stack([call.values(rank, parts) for rank in call.on.ranks]).sum(0)


def _all_reduce(call: Call) -> Callable[..., Any]:
    tensor = call.holds(call.values(call.on.rank), _summed(call), "result")
    return functools.partial(dist.all_reduce, tensor)


def _all_reduce_max(call: Call) -> Callable[..., Any]:
    most = torch.stack([call.values(rank) for rank in call.on.ranks]).amax(0)
    tensor = call.holds(call.values(call.on.rank), most, "result")
    return functools.partial(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)


def _reduce(call: Call) -> Callable[..., Any]:
    wanted = _summed(call) if call.on.rank == call.root else None
    tensor = call.holds(call.values(call.on.rank), wanted, "result")
    return functools.partial(dist.reduce, tensor, dst=call.root)


def _reduce_scatter_tensor(call: Call) -> Callable[..., Any]:
    every = call.on.world_size
    part = call.output(call.part(_summed(call, every), call.on.rank))
    whole = call.input(call.values(call.on.rank, every))
    return functools.partial(dist.reduce_scatter_tensor, part, whole)


def _reduce_scatter(call: Call) -> Callable[..., Any]:
    every = call.on.world_size
    part = call.output(call.part(_summed(call, every), call.on.rank))
    mine = call.values(call.on.rank, every)
    parts = [call.input(call.part(mine, rank)) for rank in call.on.ranks]
    return functools.partial(dist.reduce_scatter, part, parts)


def _broadcast(call: Call) -> Callable[..., Any]:
    tensor = call.holds(call.values(call.on.rank), call.values(call.root), "result")
    return functools.partial(dist.broadcast, tensor, src=call.root)


def _all_gather(call: Call) -> Callable[..., Any]:
    parts = [call.output(call.values(rank)) for rank in call.on.ranks]
    return functools.partial(dist.all_gather, parts, call.input(call.values(call.on.rank)))


def _all_gather_into_tensor(call: Call) -> Callable[..., Any]:
    whole = call.output(torch.cat([call.values(rank) for rank in call.on.ranks]))
    mine = call.input(call.values(call.on.rank))
    return functools.partial(dist.all_gather_into_tensor, whole, mine)


def _gather(call: Call) -> Callable[..., Any]:
    is_root = call.on.rank == call.root
    parts = [call.output(call.values(rank)) for rank in call.on.ranks] if is_root else None
    return functools.partial(dist.gather, call.input(call.values(call.on.rank)), parts, call.root)


def _scatter(call: Call) -> Callable[..., Any]:
    whole = call.values(call.root, call.on.world_size)
    is_root = call.on.rank == call.root
    parts = [call.input(call.part(whole, rank)) for rank in call.on.ranks] if is_root else None
    part = call.output(call.part(whole, call.on.rank))
    return functools.partial(dist.scatter, part, parts, call.root)


def _arriving(call: Call) -> list[Tensor]:
    every = call.on.world_size
    return [call.part(call.values(rank, every), call.on.rank) for rank in call.on.ranks]


def _all_to_all_single(call: Call) -> Callable[..., Any]:
    received = call.output(torch.cat(_arriving(call)))
    sent = call.input(call.values(call.on.rank, call.on.world_size))
    return functools.partial(dist.all_to_all_single, received, sent)


def _all_to_all(call: Call) -> Callable[..., Any]:
    mine = call.values(call.on.rank, call.on.world_size)
    leaving = [call.input(call.part(mine, rank)) for rank in call.on.ranks]
    arriving = [call.output(each) for each in _arriving(call)]
    return functools.partial(dist.all_to_all, arriving, leaving)


def _messages(call: Call) -> Callable[..., Any]:
    """From the root to the next rank; the others have none."""
    after = (call.root + 1) % call.on.world_size
    if call.on.rank == call.root:
        mine = call.input(call.values(call.root))
        return lambda async_op: (dist.isend if async_op else dist.send)(mine, after)
    if call.on.rank != after:
        return lambda async_op: None
    theirs = call.output(call.values(call.root))
    return lambda async_op: (dist.irecv if async_op else dist.recv)(theirs, call.root)


@dataclass(frozen=True, slots=True)
class Function:
    """A line of a table.

    Attributes:
        prepare: makes the tensors of a call, and what calls the function with `async_op`.
        lacked: a library may refuse it; otherwise only integers, and gaps.
        gaps: try `GAPPED`, too.
    """

    name: str
    prepare: Callable[[Call], Callable[..., Any]]
    lacked: bool = False
    gaps: bool = False


REDUCTIONS = (
    Function("all_reduce", _all_reduce),
    Function("all_reduce with MAX", _all_reduce_max),
    Function("reduce", _reduce),
    Function("reduce_scatter_tensor", _reduce_scatter_tensor, gaps=True),
    Function("reduce_scatter", _reduce_scatter, lacked=True),
)
COPIES = (
    Function("broadcast", _broadcast),
    Function("all_gather", _all_gather, gaps=True),
    Function("all_gather_into_tensor", _all_gather_into_tensor, gaps=True),
    Function("gather", _gather, lacked=True),
    Function("scatter", _scatter, lacked=True),
)
EXCHANGES = (
    Function("all_to_all_single", _all_to_all_single),
    Function("all_to_all", _all_to_all, lacked=True, gaps=True),
    Function("send and recv", _messages, lacked=True),
)


def _try(on: Together, functions: Sequence[Function]) -> None:
    on.asked_by_engines()
    try:
        for function in functions:
            number = 0
            for dtype in (*on.dtypes(), torch.int64):
                for case in (*CASES, *(GAPPED if function.gaps else ())):
                    number += 1
                    _call(on, function, case, dtype, number % on.world_size)
    finally:
        on.kept.pop(MADE, None)


def _call(on: Together, function: Function, case: ViewCase, dtype: torch.dtype, root: int) -> None:
    how = ", waited for" if case.waits else ""
    what = f"{function.name} of {case.size} x {dtype} for each rank, {case.layout}{how}"
    call = Call(on, case, dtype, root, what)
    ask = function.prepare(call)

    def asks() -> None:
        work = ask(async_op=case.waits)
        if case.waits and work is not None:
            work.wait()

    if function.lacked or case.layout == GAPS or not dtype.is_floating_point:
        if on.attempt(asks, what):
            return
    else:
        asks()
        on.backend.placement.synchronize()
    call.judge()


@check_on_ranks(
    "every reduction is right for views, large tensors, odd sizes and each type",
    means="Sums of gradients are wrong for some layers alone; the library takes the address of "
    "the storage, cuts a message where it is large, or has another kernel for the type.",
)
def reductions_of_views(on: Together) -> None:
    _try(on, REDUCTIONS)


@check_on_ranks(
    "every gather, scatter and broadcast is right for views, large tensors, odd sizes and each "
    "type",
    means="Weights that were gathered or sent are wrong for some layers alone; the library takes "
    "the address of the storage, cuts a message where it is large, or copies by whole blocks.",
)
def copies_of_views(on: Together) -> None:
    _try(on, COPIES)


@check_on_ranks(
    "every exchange and message is right for views, large tensors, odd sizes and each type",
    means="Experts or stages of a pipeline work on wrong values for some sizes alone; the library "
    "computes where parts begin from the storage, or in too few bits.",
)
def exchanges_of_views(on: Together) -> None:
    _try(on, EXCHANGES)
