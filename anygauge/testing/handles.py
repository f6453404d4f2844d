"""Checks of asynchronous work on several ranks: each handle means its own, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.interface import HOST_DEVICE
from anygauge.testing.together import LARGE, Together, check_on_ranks, total

SIZES = (5, 1003, 2**18 + 1, 17)
"""Elements: the third takes longer than those that are started after it."""
FLOAT = torch.float32


@check_on_ranks(
    "an asynchronous collective has its result once it was waited for",
    means="Engines that overlap communication read gradients before they are summed; a handle of "
    "the vendor's library says that it is done when it has begun.",
)
def asynchronous(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        tensors, wanted, works = [], [], []
        for n, size in enumerate(SIZES):
            values = [on.exact((size,), dtype, rank, salt=n) for rank in on.ranks]
            tensors.append(on.put(values[on.rank], dtype))
            wanted.append(total(values))
            works.append(dist.all_reduce(tensors[-1], async_op=True))
        for tensor, right, work in zip(tensors, wanted, works, strict=True):
            work.wait()
            on.same(tensor, right, "asynchronous all_reduce")


def _started(on: Together, turn: int) -> list[tuple[str, Any, Tensor, Tensor]]:
    """(name, handle, tensor of the result, what it must hold) of one call of each kind."""
    size, started = 1003 + turn, []
    values = [on.exact((size,), FLOAT, rank, salt=turn) for rank in on.ranks]
    wholes = [on.exact((size * on.world_size,), FLOAT, rank, salt=turn) for rank in on.ranks]

    def begin(name: str, result: Tensor, wanted: Tensor, call: Callable[[Tensor], Any]) -> None:
        started.append((name, call(result), result, wanted))

    def mine() -> Tensor:
        return on.put(values[on.rank], FLOAT)

    def own(of: Tensor) -> Tensor:
        return of[size * on.rank : size * (on.rank + 1)]

    root = turn % on.world_size
    given = on.put(wholes[on.rank], FLOAT)
    begin("all_reduce", mine(), total(values), lambda t: dist.all_reduce(t, async_op=True))
    begin(
        "all_gather_into_tensor",
        on.empty((size * on.world_size,), FLOAT),
        torch.cat(values),
        lambda t: dist.all_gather_into_tensor(t, mine(), async_op=True),
    )
    begin(
        "reduce_scatter_tensor",
        on.empty((size,), FLOAT),
        own(total(wholes)),
        lambda t: dist.reduce_scatter_tensor(t, given, async_op=True),
    )
    begin("broadcast", mine(), values[root], lambda t: dist.broadcast(t, root, async_op=True))
    begin(
        "all_to_all_single",
        on.empty((size * on.world_size,), FLOAT),
        torch.cat([own(each) for each in wholes]),
        lambda t: dist.all_to_all_single(t, given, async_op=True),
    )
    return started


@check_on_ranks(
    "handles may be waited for in any order, the last first",
    means="Engines that wait for the layer that they need next read one that is under way; the "
    "library's handles share one event, or waiting for one ends another.",
)
def handles_in_any_order(on: Together) -> None:
    on.asked_by_engines()
    for order in (range(len(SIZES) - 1, -1, -1), (2, 0, 3, 1)):
        begun = []
        for n, size in enumerate(SIZES):
            values = [on.exact((size,), FLOAT, rank, salt=n) for rank in on.ranks]
            tensor = on.put(values[on.rank], FLOAT)
            begun.append((dist.all_reduce(tensor, async_op=True), tensor, total(values)))
        for n in order:
            work, tensor, wanted = begun[n]
            work.wait()
            on.same(tensor, wanted, f"all_reduce {n + 1} of {len(SIZES)}, waited for out of order")


@check_on_ranks(
    "collectives of different kinds run at the same time",
    means="Prefetched weights and reduced gradients are mixed; the library has one buffer for all "
    "kinds, or a queue for each without order between them.",
)
def handles_of_kinds(on: Together) -> None:
    on.asked_by_engines()
    started = [each for turn in range(3) for each in _started(on, turn)]
    # 7 and their number have no common divisor: each is waited for once.
    for n in range(len(started)):
        name, work, result, wanted = started[7 * n % len(started)]
        work.wait()
        on.same(result, wanted, f"asynchronous {name}, beside others")


@check_on_ranks(
    "a result does not change after it was waited for",
    means="Gradients change while the optimizer reads them; a handle says too early that it is "
    "done, or the library finishes into the tensor of another.",
)
def handles_are_final(on: Together) -> None:
    on.asked_by_engines()
    started = [each for turn in range(2) for each in _started(on, turn)]
    seen = []
    for _, work, result, _ in started:
        work.wait()
        # The tensor now is this rank's: later work must neither see nor undo a change of it.
        seen.append(result.to(HOST_DEVICE, copy=True))
        result.add_(1)
    on.backend.placement.synchronize()
    on.collectives.barrier()
    for (name, _, result, _), before in zip(started, seen, strict=True):
        on.same(result, before.double() + 1, f"{name}, changed after its wait and read later")


@check_on_ranks(
    "waiting again for work that has ended changes nothing",
    means="Engines that ask a handle twice get a mean that was divided twice; the library runs its "
    "last step in each wait.",
)
def handles_are_waited_for_twice(on: Together) -> None:
    on.asked_by_engines()
    for name, work, result, wanted in _started(on, 4):
        for _ in range(2):
            work.wait()
        on.backend.placement.synchronize()
        on.same(result, wanted, f"{name}, waited for twice")
    values = [on.exact((1003,), FLOAT, rank) for rank in on.ranks]
    tensor = on.put(values[on.rank], FLOAT)
    refused = False
    try:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
    except (RuntimeError, ValueError):
        refused = True  # it has no mean
    if not refused:
        work.wait()
        mean = total(values) / on.world_size
        on.same(tensor, mean, "a mean, waited for twice", within=mean.abs() * 2.0**-20)


@check_on_ranks(
    "what is to follow a collective finds its result",
    means="DDP's hooks divide or keep gradients that are not summed yet; the library's future is "
    "complete when its work has begun.",
)
def futures(on: Together) -> None:
    on.asked_by_engines()
    found: dict[int, Tensor] = {}
    following, wanted = [], []
    for n, size in enumerate(SIZES):
        values = [on.exact((size,), FLOAT, rank, salt=n) for rank in on.ranks]
        tensor = on.put(values[on.rank], FLOAT)
        wanted.append(total(values))

        def keep(_: Any, n: int = n, tensor: Tensor = tensor) -> Tensor:
            found[n] = tensor * 2
            return tensor

        work = dist.all_reduce(tensor, async_op=True)
        following.append(work.get_future().then(keep))
    for n, future in enumerate(following):
        on.same(future.wait(), wanted[n], "what a future gives")
        on.hold(n in found, "what was to follow a collective had not run when its future was done")
        if n in found:
            on.same(found[n], wanted[n] * 2, "what a function that follows a collective computed")


@check_on_ranks(
    "work that backward starts is complete once it was waited for",
    means="DDP and ZeRO overlap sums with backward and update with part of them; backward's thread "
    "has a stream of its own, for which the library does not wait.",
)
def started_in_backward(on: Together) -> None:
    on.asked_by_engines()
    values = [on.exact((1003,), FLOAT, rank) for rank in on.ranks]
    weight = torch.ones(1003, device=on.device, requires_grad=True)
    works: list[tuple[Any, Tensor]] = []

    def begins(gradient: Tensor) -> None:
        copy = gradient.clone()
        works.append((dist.all_reduce(copy, async_op=True), copy))

    weight.register_hook(begins)
    for turn in range(3):
        (weight * on.put(values[on.rank], FLOAT) * 2**turn).sum().backward()
    for turn, (work, copy) in reversed(list(enumerate(works))):
        work.wait()
        on.same(copy, total(values) * 2**turn, "all_reduce that a hook of backward started")
    on.hold(len(works) == 3, f"{len(works)} of 3 hooks ran")


@check_on_ranks(
    "tensors that only running work knows are not used for others",
    means="Gradients of a layer hold numbers of another, now and then; the allocator gives memory "
    "away that a collective still reads: the library does not record its stream.",
)
def inputs_are_held(on: Together) -> None:
    on.asked_by_engines()
    size = 2**18 + 3
    values = [on.exact((size,), FLOAT, rank) for rank in on.ranks]
    whole = on.empty((size * on.world_size,), FLOAT)
    # The input has no other name: it is free as soon as the library lets it go.
    work = dist.all_gather_into_tensor(whole, on.put(values[on.rank], FLOAT), async_op=True)
    others = [torch.full((size,), -1.0, device=on.device) for _ in range(4)]
    work.wait()
    on.same(whole, torch.cat(values), "all_gather_into_tensor of a tensor that nobody holds")
    for other in others:
        on.same(other, torch.full((size,), -1.0).double(), "a tensor made while it was under way")


@check_on_ranks(
    "collectives and the device's own work follow each other in the order of the calls",
    means="A sum holds gradients of the step before, now and then; the library's stream does not "
    "wait for that of the computation, or not the other way round.",
)
def in_order_with_work(on: Together) -> None:
    on.asked_by_engines()
    values = [on.exact((LARGE // 8,), FLOAT, rank) for rank in on.ranks]
    tensor = on.put(values[on.rank], FLOAT)
    beside = torch.zeros(1003, device=on.device)
    wanted = values
    for turn in range(4):
        # Nothing here waits for the device: only the order of calls tells what is to be summed.
        tensor.mul_(2.0).sub_(1.0)
        wanted = [each * 2.0 - 1.0 for each in wanted]
        work = dist.all_reduce(tensor, async_op=True)
        beside.add_(turn)
        work.wait()
        tensor.mul_(1.0 / 16)
        wanted = [total(wanted) / 16] * on.world_size
    within = wanted[0].abs().max() * 64 * 2.0**-24
    on.same(tensor, wanted[0], "sums between computations", within=within.expand_as(wanted[0]))
    on.same(beside, torch.full((1003,), 6.0).double(), "what was computed beside a collective")
