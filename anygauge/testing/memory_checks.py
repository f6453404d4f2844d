"""Checks of memory: it is counted, stays where more is refused, and each rank sees its own."""

from __future__ import annotations

import gc

import psutil
import torch

from anygauge.interface import MemoryStats
from anygauge.testing.bounds import on_host
from anygauge.testing.check import Device, SkipCheck, check, of_type
from anygauge.testing.rank_context import RankContext, check_on_ranks

USED_SHARE = 0.9
"""Part of the memory that is in use, as in training, while more is asked for."""
PIECES = 64
MIB, MOST_OF_THE_HOST, LARGEST_MEMORY = 2**20, 2**30, 2**50
"""Bytes: a unit; so many are taken though they are the host's; what no device of today has."""
OF_A_PROCESS = 256 * MIB
"""A process's allocator keeps up to 64 MiB that were freed, and may give them again."""


@check(
    "memory is counted in whole bytes: in use follows what is taken and freed, its peak stays "
    "until it is reset, its limit stays the same",
    part="device",
    means="plans of memory, and the peak that a run reports, would be wrong; look at memory(), "
    "which must count what the allocator has given out, and at reset_peak(); the vendor's tool "
    "gives mebibytes, a share, -1 for unknown, or numbers of several devices",
)
def memory_moves(on: Device) -> None:
    size = 64 * MIB if _has_allocator(on) else OF_A_PROCESS
    on.placement.reset_peak()
    before = _memory(on)
    held = torch.ones(size, dtype=torch.uint8, device=on.device)
    during = _memory(on)
    del held
    after = _memory(on)
    grown, freed = (during.in_use - each.in_use for each in (before, after))
    assert grown >= size, f"{size} bytes were taken, and memory in use grew by {grown}"
    assert freed >= size, "memory that was freed still counts as in use"
    # The kernel counts a process's pages in batches for each thread.
    slack = 0 if _has_allocator(on) else size // 64
    assert after.peak >= before.in_use + size - slack, (
        f"the peak is {after.peak}, but {before.in_use + size} bytes were in use"
    )
    for name in ("limit", "kind"):
        was, now = getattr(before, name), getattr(during, name)
        assert was == now, f"the {name} of memory was {was!r}, then {now!r}"
    on.placement.reset_peak()
    fresh = _memory(on)
    assert fresh.peak < after.peak, "resetting the peak leaves it where it was"


@check(
    "exhausted memory, and nothing else, counts as out of memory, also with nine tenths held; what "
    "is refused takes nothing from what is held, and the device works after it",
    part="device",
    means="the batch size that fits would not be found, a run go on with wrong weights, or end in "
    "an unknown error; look at what a failed request frees, and at the driver's errors of small "
    "and huge requests",
)
def out_of_memory(on: Device) -> None:
    for other in (ValueError("shape"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        assert not on.placement.is_out_of_memory(other), f"{other!r} counts as out of memory"
    stats = on.placement.memory()
    if not _has_allocator(on) or stats.limit is None:
        raise SkipCheck("it shares the host's memory, or its limit is unknown")
    _expect_refusal(on, 2 * stats.limit, 16 * stats.limit, 2**60)
    free = int(USED_SHARE * stats.limit) - stats.in_use
    size = max(free // PIECES, MIB)
    if free > MOST_OF_THE_HOST and _is_of_the_host(on, size):
        return  # exhausting the host would harm others
    held = [_take_memory(on, size, number) for number in range(free // size)]
    _expect_refusal(on, stats.limit // 4, stats.limit, 16 * stats.limit)
    for number, each in enumerate(held):
        assert each is not None, f"{number} pieces of {size} are all of {stats.limit} bytes"
        found = on_host(each[:: max(size // 1000, 1)])
        assert bool((found == number % 251).all()), (
            f"piece {number} of {len(held)} that were held holds {found.unique().tolist()[:4]}, "
            f"not {number % 251}, after requests were refused"
        )
    grown = on.placement.memory().in_use - stats.in_use
    assert size * len(held) <= grown <= stats.limit, (
        f"{len(held)} pieces of {size} bytes are held, but memory in use grew by {grown}"
    )
    del held, each, found
    left = _memory(on).in_use - stats.in_use
    assert left <= MIB, f"{left} bytes stay in use after memory was exhausted and freed"
    assert _take_memory(on, size, 0) is not None, f"{size} bytes are refused after all was freed"


def _take_memory(on: Device, size: int, number: int) -> torch.Tensor | None:
    """Memory that is filled with a number, or None where it was refused in the right way."""
    try:
        taken = torch.empty(size, dtype=torch.uint8, device=on.device)
        taken[-1:].fill_(0)
        on.placement.synchronize()  # some report only now
        return taken.fill_(number % 251)
    except Exception as error:
        what = f"{size} bytes do not count as out of memory: {type(error).__name__}: {error}"
        assert on.placement.is_out_of_memory(error), what
        return None


def _expect_refusal(on: Device, *sizes: int) -> None:
    """Requests that cannot be met are refused, and the device goes on computing."""
    for size in sizes:
        assert _take_memory(on, size, 0) is None, (
            f"{size} bytes were given beyond the limit: memory().limit is None where a device "
            "moves to the host what it has no room for"
        )
        ones = torch.ones(64, 64, device=on.device)
        found = on_host(ones @ ones)
        assert bool(found.eq(64).all()), f"a product of ones is wrong after {size} were refused"


def _is_of_the_host(on: Device, size: int) -> bool:
    """Whether the device's memory is the process's own."""
    used = psutil.Process().memory_info
    before, held = used().rss, torch.ones(size, dtype=torch.uint8, device=on.device)
    on.placement.synchronize()
    return used().rss - before > held.numel() // 2


@check_on_ranks(
    "on every rank, memory and its peak are those of the rank's own device",
    means="the memory that a run reports, and its plan, would be the first device's on all ranks; "
    "look at memory() and reset_peak(), which must ask for the device that this rank opened",
)
def memory_of_each_rank(on: RankContext) -> None:
    size = 16 * (on.rank + 1) * MIB if _has_allocator(on) else OF_A_PROCESS
    # One rank takes memory at a time; the others must see nothing of it.
    for turn in on.ranks:
        on.collectives.barrier()
        on.backend.placement.reset_peak()
        before, held = _memory(on), None
        on.collectives.barrier()
        if turn == on.rank:
            held = torch.ones(size, dtype=torch.uint8, device=on.device)
        during = _memory(on)
        on.collectives.barrier()
        del held
        for what, value in (("memory in use", during.in_use), ("the peak", during.peak)):
            grown = value - before.in_use
            fits = grown >= size - size // 64 if turn == on.rank else grown < 8 * MIB
            on.expect(fits, f"{what} grew by {grown} when rank {turn} took memory")


def _has_allocator(on: Device | RankContext) -> bool:
    """Whether the device has an allocator of its own; else it is the process's memory."""
    return on.backend.placement.memory().kind.split(",")[0] == "allocator"


def _memory(on: Device | RankContext) -> MemoryStats:
    """Return the statistics once all work is done."""
    gc.collect()
    on.backend.placement.synchronize()
    stats = on.backend.placement.memory()
    of_type("memory()", stats, MemoryStats)
    assert stats.kind.split(",")[0] in ("allocator", "process"), f"kind is {stats.kind!r}"
    for name in ("in_use", "peak", "reserved", "limit"):
        value = getattr(stats, name) or 0
        assert 0 <= value < LARGEST_MEMORY, f"{name} is {value!r}, which no device has in bytes"
    assert stats.in_use <= stats.peak, f"{stats.in_use} bytes in use, {stats.peak} at the peak"
    assert stats.reserved is None or stats.reserved >= stats.in_use
    assert stats.limit is None or stats.limit >= max(stats.in_use, MIB), (
        f"limit is {stats.limit} bytes; it is not counted in larger units, and None where unknown"
    )
    return stats
