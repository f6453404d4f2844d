"""Checks of memory: none is given twice, views share it, and it stays where more is refused."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import on_host, roundoff, types
from anygauge.testing.check import NotAsked, Opened, check

HELD = 0.9
"""Part of the memory that is in use, as in training, while more is asked for."""
PIECES = 64
MIB, MOST_OF_THE_HOST = 2**20, 2**30
"""Bytes; so many are taken though they are the host's."""


@check(
    "tensors that are alive do not share memory, whatever is freed and taken between",
    part="device",
    means="weights would change where nobody writes; look for an allocator that gives memory out "
    "twice, or rounds sizes down",
)
def memory_is_not_given_twice(on: Opened) -> None:
    held: dict[int, torch.Tensor] = {}
    for number in range(120):
        size = (number * 7919) % 40_000 + 1
        held[number] = torch.full((size,), number, dtype=torch.int32, device=on.device)
        if number % 3 == 2:
            del held[number - 1]
        if number % 7 == 6:
            held.pop(number - 4, None)
    for number, each in held.items():
        got = each.to(HOST_DEVICE)
        assert bool((got == number).all()), (
            f"tensor {number} of {got.numel()} elements holds {got.unique().tolist()[:4]}"
        )
    for size in range(1, 40):
        first, second = (
            torch.full((size,), n, dtype=torch.uint8, device=on.device) for n in (1, 2)
        )
        first.add_(4)
        both = [first.to(HOST_DEVICE).tolist(), second.to(HOST_DEVICE).tolist()]
        assert both == [[5] * size, [2] * size], f"two tensors of {size} bytes hold {both}"


@check(
    "with nine tenths of the memory in use, what is refused takes nothing from what is held",
    part="device",
    means="a run that is told to take smaller batches would go on with wrong weights, or end in an "
    "unknown error; look at what a failed request frees, and at errors of the driver",
)
def held_memory_stays(on: Opened) -> None:
    stats = on.placement.memory()
    if stats.kind.split(",")[0] != "allocator" or stats.limit is None:
        raise NotAsked("it shares the host's memory, or its limit is unknown")
    free = int(HELD * stats.limit) - stats.in_use
    size = max(free // PIECES, MIB)
    if free > MOST_OF_THE_HOST and _is_of_the_host(on, size):
        raise NotAsked("it lives in the host's memory, and exhausting that would harm others")
    held = []
    for number in range(free // size):
        held.append(torch.full((size,), number % 251, dtype=torch.uint8, device=on.device))
    for asked in (stats.limit // 4, stats.limit, 16 * stats.limit):
        try:
            torch.empty(asked, dtype=torch.uint8, device=on.device)[-1:].fill_(1)
            on.placement.synchronize()  # some report only now
        except Exception as error:
            assert on.placement.is_out_of_memory(error), (
                f"{asked} bytes with {HELD:.0%} held: {type(error).__name__}: "
                f"{str(error).splitlines()[0]} does not count as out of memory"
            )
        else:
            raise NotAsked(f"memory is oversubscribed: {asked} bytes were given of {stats.limit}")
        sums = on_host(torch.ones(64, 64, device=on.device) @ torch.ones(64, 64, device=on.device))
        assert sums.eq(64).all(), f"a product of ones is {sums[0, 0].item()} after a refusal"
    for number, each in enumerate(held):
        found = on_host(each[:: size // 1000])
        assert bool((found == number % 251).all()), (
            f"piece {number} of {len(held)} that were held holds {found.unique().tolist()[:4]}, "
            f"not {number % 251}, after requests were refused"
        )


def _is_of_the_host(on: Opened, size: int) -> bool:
    """Whether the device's memory is the process's own."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])

    before = resident()
    held = torch.ones(size, dtype=torch.uint8, device=on.device)
    on.placement.synchronize()
    grown = (resident() - before) * resource.getpagesize()
    del held
    return grown > size // 2


@check(
    "on every rank, memory and its peak are those of the rank's own device",
    part="ranks",
    means="the memory that a run reports, and its plan, would be the first device's on all ranks; "
    "look at memory() and reset_peak(), which must ask for the device that this rank opened",
)
def memory_of_each_rank(on: Any) -> None:
    placement = on.backend.placement
    size = (
        256 if placement.memory().kind.split(",")[0] != "allocator" else 16 * (on.rank + 1)
    ) * MIB

    def now() -> Any:
        gc.collect()
        placement.synchronize()
        return placement.memory()

    # One rank takes memory at a time; the others must see nothing of it.
    seen = []
    for turn in range(on.world_size):
        on.collectives.barrier()
        placement.reset_peak()
        before, held = now(), None
        on.collectives.barrier()
        if turn == on.rank:
            held = torch.ones(size, dtype=torch.uint8, device=on.device)
        during = now()
        on.collectives.barrier()
        seen.append((during.in_use - before.in_use, during.peak - before.in_use))
        del held
    for turn, grown in enumerate(seen):
        for what, value in zip(("memory in use", "the peak"), grown, strict=True):
            if turn == on.rank:
                least = size - size // 64
                assert value >= least, f"{what} grew by {value} when this rank took {size} bytes"
            else:
                assert value < 8 * MIB, f"{what} grew by {value} when rank {turn} took memory"


@check(
    "what is written through a view stands in its base and in other views, and nowhere else",
    part="device",
    means="caches, masks and sharded parameters, which are views of one buffer, would be lost; "
    "look for operations that copy a view before they write it",
)
def views_share_memory(on: Opened) -> None:
    def work(x: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = x.view(-1)[8:24].view(4, 4)
        turned = x.t()
        x[1:] += 1
        x[:, 1::2] *= 2
        turned[3].fill_(5)
        rows.sub_(3)
        x.view(-1)[5:9] = torch.arange(4, device=x.device).to(x.dtype)
        x[2].copy_(x[3])
        x.diagonal()[:3].zero_()
        torch.add(x[0], 1, out=x[5])
        x.unfold(0, 2, 2)[0, 4] = 9
        for row in range(0, 6, 2):
            x[row : row + 2][:, 6].add_(row)
        x.narrow(1, 6, 1).mul_(2)
        x[[0, 5]] = x[[5, 0]]
        x[x > 30] = -1
        return x, rows, turned, x.view(-1)[7:11]

    base = torch.arange(42.0).reshape(6, 7)
    for dtype in (*types(on), torch.int64, torch.int32):
        here = base.to(dtype, copy=True)
        there = base.to(dtype).to(on.device, copy=True)
        for number, (found, wanted) in enumerate(zip(work(there), work(here), strict=True)):
            got = on_host(found)
            assert torch.equal(got, wanted), (
                f"{('the base', 'rows', 'transposed', 'a later view')[number]} of {dtype} after "
                f"writes through views: {got.tolist()}, expected {wanted.tolist()}"
            )


@check(
    "a value that is overwritten later keeps its gradient, or the write is refused",
    part="device",
    means="gradients would silently be of the wrong values; look for memory that is given back "
    "before the backward pass has read it",
)
def saved_values_stay(on: Opened) -> None:
    x = torch.linspace(-2, 2, 5001, device=on.device).requires_grad_()
    kept = []
    for n in range(8):  # much memory is freed and taken again between forward and backward
        y = torch.exp(x * (n + 1) / 8)
        kept.append((y * y).sum())
        del y
        torch.full((5001,), float(n), device=on.device)
    sum(kept).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    here = torch.linspace(-2, 2, 5001).double()
    wanted = sum((n + 1) / 4 * torch.exp(here * (n + 1) / 4) for n in range(8))
    assert isinstance(wanted, torch.Tensor)
    error = float(((on_host(x.grad).double() - wanted) / wanted).abs().max())
    assert error <= 256 * roundoff(torch.float32), f"gradients of eight terms differ by {error:.1e}"
