"""Checks on several ranks: every collective of the contract against what it must give.

Tensors that are not plain are in `ranks_tensors`, messages between hosts in `ranks_host`. What
engines call in `torch.distributed` is in `buffers`, `exchanges` and `exchanges_of_one`, and over
all kinds of tensors in `exchanges_of_views`; asynchronous work is in `handles`, subgroups are in
`groups` and `groups_beside`.
"""

from __future__ import annotations

import hashlib
import os

import torch

from anygauge.testing.check import check
from anygauge.testing.together import Together, bound, check_on_ranks, total

SHAPES = ((), (1,), (7,), (5, 3), (1000,), (4099,))
"""No dimension, numbers that no number of ranks and no vector divides, and more."""
IDENTITY = ("RANK", "LOCAL_RANK")
"""Variables by which ranks differ in any case."""
LIBRARY = "the cause is mostly the vendor's library or the process group around it"


@check_on_ranks(
    "all_reduce sums",
    means="Gradients of several ranks are not summed as they are, and training departs from that "
    f"of one rank; {LIBRARY}, which reduces in a shorter type.",
)
def all_reduce_sums(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in SHAPES:
            values = [on.exact(shape, dtype, rank) for rank in on.ranks]
            tensor = on.put(values[on.rank], dtype)
            result = on.collectives.all_reduce(tensor)
            on.backend.placement.synchronize()
            on.same(result, total(values), "all_reduce sum")
            on.same(tensor, total(values), "all_reduce sum, in place")
        values = [on.fractions((1000,), dtype, rank) for rank in on.ranks]
        result = on.collectives.all_reduce(on.put(values[on.rank], dtype), op="sum")
        within = bound(values, dtype, on.world_size - 1)
        on.same(result, total(values), "all_reduce sum of fractions", within=within)


@check_on_ranks(
    "all_reduce takes the mean",
    means="Averaged losses and gradients are wrong by a factor or in their last digits; vendors "
    "divide by the wrong number of ranks, or divide before a sum in a short type.",
)
def all_reduce_means(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in SHAPES:
            values = [on.fractions(shape, dtype, rank) for rank in on.ranks]
            tensor = on.put(values[on.rank], dtype)
            result = on.collectives.all_reduce(tensor, op="mean")
            within = bound(values, dtype, on.world_size + 1) / on.world_size
            wanted = torch.stack(values).mean(0)
            on.same(result, wanted, "all_reduce mean", within=within)
            on.same(tensor, wanted, "all_reduce mean, in place", within=within)


@check_on_ranks(
    "all_reduce takes the maximum",
    means="Ranks disagree on the longest batch, or on whether a step overflowed; vendors start "
    "from zero, so that negative values never win, or compare in a shorter type.",
)
def all_reduce_maximum(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in SHAPES:
            for sign in (1.0, -1.0):
                # All of one sign: a maximum that starts at zero would show with negative ones.
                values = [sign * on.exact(shape, dtype, rank).abs() for rank in on.ranks]
                tensor = on.put(values[on.rank], dtype)
                result = on.collectives.all_reduce(tensor, op="max")
                wanted = torch.stack(values).amax(0)
                on.same(result, wanted, "all_reduce max")
                on.same(tensor, wanted, "all_reduce max, in place")


@check_on_ranks(
    "all_reduce refuses an operation that is none",
    means="A mistyped operation gives the sum without a word; the backend's own all_reduce has a "
    "branch for everything else.",
)
def all_reduce_unknown(on: Together) -> None:
    for name in ("median", "", "MEAN"):
        try:
            on.collectives.all_reduce(torch.ones(1, device=on.device), op=name)
        except ValueError as error:
            on.hold(repr(name) in str(error), f"op={name!r} is refused without its name: {error}")
        else:
            on.hold(False, f"op={name!r} was taken without a word")


@check_on_ranks(
    "broadcast gives everyone the source's values, from each rank",
    means=f"Ranks begin with different weights and drift apart; {LIBRARY}: the root is given in "
    "other numbers, or what the receivers held is mixed in.",
)
def broadcasts(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in SHAPES:
            for source in on.ranks:
                wanted = on.exact(shape, dtype, source)
                # What receivers hold must not show: a sum with it would.
                mine = on.put(wanted, dtype) if on.rank == source else on.empty(shape, dtype)
                what = f"broadcast from rank {source}"
                on.same(on.collectives.broadcast(mine, source=source), wanted, what)
                on.same(mine, wanted, f"{what}, in place")


@check_on_ranks(
    "all_gather gives everyone's tensor in the order of ranks",
    means=f"Gathered logits or measures belong to other ranks than they seem to; {LIBRARY}, which "
    "orders by its own topology.",
)
def all_gathers(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in SHAPES:
            parts = on.collectives.all_gather(on.put(on.exact(shape, dtype, on.rank), dtype))
            on.hold(len(parts) == on.world_size, f"{len(parts)} parts of {on.world_size} ranks")
            for rank, part in enumerate(parts):
                on.same(part, on.exact(shape, dtype, rank), f"all_gather, of rank {rank}")


@check_on_ranks(
    "integers are summed and gathered exactly",
    means="Token counts and indices beyond 2**24, 2**31 or 2**53 are wrong; vendors move int64 as "
    "int32 or as a floating-point type.",
)
def integers(on: Together) -> None:
    corners = [2**31, -(2**31) - 1, 2**53 + 1, -(2**53) - 1, 2**40, -1]
    for dtype in (torch.int64, torch.int32):
        values = [on.whole((1003,), dtype, rank) for rank in on.ranks]
        if dtype is torch.int64:
            edge = torch.tensor(corners)
            values = [torch.cat([each, edge + rank]) for rank, each in enumerate(values)]
        for rank, part in enumerate(on.collectives.all_gather(on.put(values[on.rank], dtype))):
            on.same(part, values[rank], f"all_gather of integers, of rank {rank}")
        stacked = torch.stack(values)
        for op, wanted in {"sum": stacked.sum(0), "max": stacked.amax(0)}.items():
            tensor = on.put(values[on.rank], dtype)
            on.same(on.collectives.all_reduce(tensor, op=op), wanted, f"all_reduce {op}")
        last = on.world_size - 1
        result = on.collectives.broadcast(on.put(values[on.rank], dtype), source=last)
        on.same(result, values[last], f"broadcast of integers from rank {last}")


@check_on_ranks(
    "bytes and truth values are moved as they are, or refused",
    means="Packed weights, masks and serialised objects arrive changed; vendors move bytes in "
    "words, and lose the rest, or treat them as signed.",
)
def bytes_are_moved(on: Together) -> None:
    for dtype, most in ((torch.uint8, 256), (torch.bool, 2)):
        for size in (1, 13, 4099):
            values = [
                (torch.arange(size) * (2 * rank + 3) // (rank + 1) + rank) % most
                for rank in on.ranks
            ]

            def moves(dtype: torch.dtype = dtype, values: list[torch.Tensor] = values) -> None:
                parts = on.collectives.all_gather(on.put(values[on.rank], dtype))
                for rank, part in enumerate(parts):
                    on.same(part, values[rank], f"all_gather, of rank {rank}")
                tensor = on.collectives.broadcast(on.put(values[on.rank], dtype), source=1)
                on.same(tensor, values[1], "broadcast from rank 1")

            on.attempt(moves, f"moving {dtype}")
    values = [on.whole((1003,), torch.uint8, rank) for rank in on.ranks]

    def sums() -> None:
        result = on.collectives.all_reduce(on.put(values[on.rank], torch.uint8))
        on.same(result, total(values), "all_reduce sum of bytes")

    on.attempt(sums, "sums of bytes")


@check(
    "each rank has a device of its own",
    part="ranks",
    capability="collectives",
    means="Ranks share a device and its memory, and others are idle; the backend opens device 0, "
    "or its variable of visible devices is not read.",
)
def devices_differ(on: Together) -> None:
    # Where each process sees one device alone, of number 0, its environment says which.
    seen = sorted((name, value) for name, value in os.environ.items() if name not in IDENTITY)
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    devices = on.collectives.gather_objects((on.device.index, digest))
    if all(index is not None for index, _ in devices):
        numbers = ", ".join(str(index) for index, _ in devices)
        assert len(set(map(tuple, devices))) == on.world_size, (
            f"ranks share: they have opened number {numbers}, in one environment"
        )


@check(
    "every rank had the backend's environment, closed its device and ended with status 0",
    part="ranks",
    of_the_end=True,
    means="A run that was complete is reported as failed; mostly a vendor's library whose threads "
    "outlive the device, or a group that is destroyed after it.",
)
def ends_on_ranks(trouble: str) -> None:
    # One that is missing would hide behind the answers of the others.
    assert not trouble, trouble


# For their checks, which come after these.
from anygauge.testing import (  # noqa: E402
    buffers,  # noqa: F401
    exchanges,  # noqa: F401
    exchanges_of_one,  # noqa: F401
    exchanges_of_views,  # noqa: F401
    groups,  # noqa: F401
    groups_beside,  # noqa: F401
    handles,  # noqa: F401
    ranks_host,  # noqa: F401
    ranks_tensors,  # noqa: F401
)
