"""Checks of what ranks agree on by way of their hosts: barriers, limits, sums, objects."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from anygauge.testing.check import COLLECTIVE_TIMEOUT_S
from anygauge.testing.together import Together, check_on_ranks, limits_of, total

LATE_S = 0.25
"""How much later one rank comes to a barrier than the others."""
MEBIBYTE = 2**20


@check_on_ranks(
    "nobody leaves a barrier before everyone has come",
    means="A rank reads a checkpoint that another still writes; the backend's barrier only queues "
    "work on the device, and does not wait for it.",
)
def barrier_waits(on: Together) -> None:
    on.collectives.barrier()
    for late in on.ranks:
        if on.rank == late:
            time.sleep(LATE_S)
        # One clock for all processes of a machine.
        came = time.monotonic()
        on.collectives.barrier()
        left = time.monotonic()
        times = on.collectives.gather_objects((came, left))
        for rank, (_, its_end) in enumerate(times):
            on.hold(
                its_end >= times[late][0],
                f"rank {rank} left {times[late][0] - its_end:.2f} s before rank {late} came",
            )


@check_on_ranks(
    "groups are opened with the limit that was asked for",
    means="A run whose peer has died hangs for half an hour, or ends while others still load; the "
    "backend's `open` gives its groups no timeout.",
)
def opened_with_limit(on: Together) -> None:
    asked = (
        ("the default group", dist.group.WORLD),
        ("the control group", on.collectives.control_group),
    )
    for name, group in asked:
        for library, seconds in limits_of(group):
            on.hold(
                seconds == COLLECTIVE_TIMEOUT_S,
                f"{name} waits {seconds:g} s by way of {library}; {COLLECTIVE_TIMEOUT_S:g} s were "
                "asked for",
            )


@check_on_ranks(
    "ranks leave a stretch of patience together",
    means="A rank that has loaded its model runs into the short limit while another still loads; "
    "the backend replaced `patient`, or its barrier does not wait.",
)
def patience_ends_together(on: Together) -> None:
    late = on.world_size - 1
    with on.collectives.patient(then=COLLECTIVE_TIMEOUT_S):
        if on.rank == late:
            time.sleep(LATE_S)
        came = time.monotonic()
    left = time.monotonic()
    times = on.collectives.gather_objects((came, left))
    for rank, (_, its_end) in enumerate(times):
        on.hold(
            its_end >= times[late][0],
            f"rank {rank} left {times[late][0] - its_end:.2f} s before rank {late} had ended",
        )


@check_on_ranks(
    "numbers are summed on the host, in float64, in the order of ranks",
    means="Token counts and losses in logs lose digits, or ranks disagree on them; the backend "
    "sums on its device, which has no float64.",
)
def sums_on_host(on: Together) -> None:
    def values(rank: int) -> list[float]:
        # Float32 would lose the ones.
        first = [2.0**40 if rank == 0 else 1.0, float(rank), (rank + 1) / 3, -0.1 * rank]
        special = [math.inf, math.nan if rank == 1 else 1.0, 2.0**53 if rank == 0 else 0.0]
        return [*first, *special, *((rank + 1) / (n + 3) for n in range(1000))]

    found = on.collectives.sum_on_host(values(on.rank))
    wanted = [sum(each) for each in zip(*map(values, on.ranks), strict=True)]
    on.hold(len(found) == len(wanted), f"{len(found)} sums of {len(wanted)} numbers")
    for n, (got, right) in enumerate(zip(found, wanted, strict=False)):
        same = got == right or (math.isnan(got) and math.isnan(right))
        on.hold(same, f"sum_on_host: number {n} should be {right!r} and is {got!r}")
    empty = on.collectives.sum_on_host([])
    on.hold(list(empty) == [], f"sum_on_host of nothing gave {empty}")


@check_on_ranks(
    "objects are gathered in the order of ranks",
    means="A rank's report is taken for another's, or loses what JSON has no exact form for; the "
    "backend replaced gather_objects by one of its own.",
)
def gathers_objects(on: Together) -> None:
    def value(rank: int) -> object:
        numbers = [2**63 + rank, 0.1 * rank, -rank, 1e300]
        return {"rank": rank, "text": "é" * rank, "numbers": numbers, "none": None, "yes": True}

    found = on.collectives.gather_objects(value(on.rank))
    on.hold(found == [value(rank) for rank in on.ranks], f"gave {found}")


@check_on_ranks(
    "large objects of unequal size are gathered whole",
    means="Long messages between ranks are cut or filled up; the backend's own way of carrying "
    "them has one length for all, or a buffer that is too short.",
)
def gathers_large_objects(on: Together) -> None:
    def text(rank: int) -> str:
        # Nothing from one of them, and more than a MiB in bytes from others.
        return f"é{rank}" * (MEBIBYTE // 4 * rank + rank)

    found = on.collectives.gather_objects(text(on.rank))
    for rank, got in enumerate(found):
        on.hold(got == text(rank), f"rank {rank} sent {len(text(rank)):,} characters: {len(got):,}")

    def data(rank: int) -> bytes:
        return bytes(range(256)) * (4097 * rank) + bytes([rank] * rank)

    for rank, got in enumerate(on.collectives.gather_bytes(data(on.rank))):
        on.hold(got == data(rank), f"rank {rank} sent {len(data(rank)):,} bytes: {len(got):,}")


@check_on_ranks(
    "the control group is of all ranks and works on the host",
    means="Messages between ranks wait for the device or lose digits; the backend gave its device "
    "group as control group.",
)
def control_group(on: Together) -> None:
    group = on.collectives.control_group
    ranks = dist.get_process_group_ranks(group)
    on.hold(ranks == list(on.ranks), f"it has the ranks {ranks}")
    for dtype, wanted in (
        (torch.float32, [on.exact((1003,), torch.float32, rank) for rank in on.ranks]),
        (torch.int64, [on.whole((1003,), torch.int64, rank) for rank in on.ranks]),
    ):
        tensor = wanted[on.rank].to(dtype, copy=True)
        dist.all_reduce(tensor, group=group)
        on.hold(torch.equal(tensor.to(wanted[0].dtype), total(wanted)), f"it sums {dtype} wrongly")
    numbers = torch.tensor([1 / 3 + on.rank, 2.0**53 - on.rank], dtype=torch.float64)
    parts = [torch.empty_like(numbers) for _ in on.ranks]
    dist.all_gather(parts, numbers, group=group)
    for rank, part in enumerate(parts):
        on.hold(
            part.tolist() == [1 / 3 + rank, 2.0**53 - rank],
            f"it gathers {part.tolist()} of rank {rank}",
        )
