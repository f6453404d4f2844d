"""Checks of memory: it stays where more is refused, and each rank sees its own."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch

from anygauge.testing.bounds import on_host
from anygauge.testing.check import NotAsked, Opened, check

HELD = 0.9
"""Part of the memory that is in use, as in training, while more is asked for."""
PIECES = 64
MIB, MOST_OF_THE_HOST = 2**20, 2**30
"""Bytes; so many are taken though they are the host's."""


@check(
    "exhausted memory, and nothing else, counts as out of memory, also with nine tenths held; what "
    "is refused takes nothing from what is held, and the device works after it",
    part="device",
    means="the batch size that fits would not be found, a run go on with wrong weights, or end in "
    "an unknown error; look at what a failed request frees, and at the driver's errors of small "
    "and huge requests",
)
def out_of_memory(on: Opened) -> None:
    for other in (ValueError("shape"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        assert not on.placement.is_out_of_memory(other), f"{other!r} counts as out of memory"
    stats = on.placement.memory()
    if stats.kind.split(",")[0] != "allocator" or stats.limit is None:
        raise NotAsked("it shares the host's memory, or its limit is unknown")
    _refuses(on, 2 * stats.limit, 16 * stats.limit, 2**60)
    free = int(HELD * stats.limit) - stats.in_use
    size = max(free // PIECES, MIB)
    if free > MOST_OF_THE_HOST and _is_of_the_host(on, size):
        return  # exhausting the host would harm others
    held = [_taken(on, size, number) for number in range(free // size)]
    _refuses(on, stats.limit // 4, stats.limit, 16 * stats.limit)
    for number in range(len(held), len(held) + PIECES):
        held.append(_taken(on, max(size // 4, MIB), number))
        if held[-1] is None:
            break
    else:
        raise AssertionError(f"{HELD:.0%} of {stats.limit} bytes are held, and any more are given")
    given = [each for each in held if each is not None]
    for number, each in enumerate(given):
        found = on_host(each[:: max(size // 1000, 1)])
        assert bool((found == number % 251).all()), (
            f"piece {number} of {len(given)} that were held holds {found.unique().tolist()[:4]}, "
            f"not {number % 251}, after requests were refused"
        )
    sizes, grown = sum(map(len, given)), on.placement.memory().in_use - stats.in_use
    assert sizes <= grown <= stats.limit, (
        f"{len(given)} pieces hold {sizes} bytes of {stats.limit}, but memory in use grew by "
        f"{grown}"
    )
    del held, given, each, found
    gc.collect()
    on.placement.synchronize()
    left = on.placement.memory().in_use - stats.in_use
    assert left <= MIB, f"{left} bytes stay in use after memory was exhausted and freed"
    assert _taken(on, size, 0) is not None, f"{size} bytes are refused after all was freed"


def _taken(on: Opened, size: int, number: int) -> torch.Tensor | None:
    """Memory that is filled with a number, or None where it was refused in the right way."""
    try:
        taken = torch.empty(size, dtype=torch.uint8, device=on.device)
        taken[-1:].fill_(0)
        on.placement.synchronize()  # some report only now
        return taken.fill_(number % 251)
    except Exception as error:
        assert on.placement.is_out_of_memory(error), (
            f"{size} bytes: {type(error).__name__}: {str(error).splitlines()[0]} does not count as "
            "out of memory"
        )
        return None


def _refuses(on: Opened, *sizes: int) -> None:
    """Requests that cannot be met are refused, and the device goes on computing."""
    for size in sizes:
        assert _taken(on, size, 0) is None, (
            f"{size} bytes were given beyond the limit: memory().limit is None where a device "
            "moves to the host what it has no room for"
        )
        ones = torch.ones(64, 64, device=on.device)
        found = on_host(ones @ ones)
        assert bool(found.eq(64).all()), f"a product of ones is wrong after {size} were refused"


def _is_of_the_host(on: Opened, size: int) -> bool:
    """Whether the device's memory is the process's own."""

    process = psutil.Process()
    before = process.memory_info().rss
    held = torch.ones(size, dtype=torch.uint8, device=on.device)
    on.placement.synchronize()
    grown = process.memory_info().rss - before
    del held
    return bool(grown > size // 2)


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
    wrong: list[str] = []
    for turn in range(on.world_size):
        on.collectives.barrier()
        placement.reset_peak()
        before, held = now(), None
        on.collectives.barrier()
        if turn == on.rank:
            held = torch.ones(size, dtype=torch.uint8, device=on.device)
        during = now()
        on.collectives.barrier()
        del held
        for what, value in (("memory in use", during.in_use), ("the peak", during.peak)):
            grown = value - before.in_use
            fits = grown >= size - size // 64 if turn == on.rank else grown < 8 * MIB
            wrong += [] if fits else [f"{what} grew by {grown} when rank {turn} took memory"]
    assert not wrong, wrong[0]
