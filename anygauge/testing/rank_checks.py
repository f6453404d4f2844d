"""Checks on several ranks: devices, barriers, time limits and messages of the host.

What is called between them, function by function, is the table of `collectives`.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import dtypes
from anygauge.testing.check import COLLECTIVE_TIMEOUT_S, sharding_spec
from anygauge.testing.collective_checks import groups
from anygauge.testing.rank_context import RankContext, check_on_ranks
from anygauge.util.limits import libraries_of

IDENTITY = ("RANK", "LOCAL_RANK")
"""Variables by which ranks differ in any case."""
LATE_S = 0.25
"""How much later one rank comes to a barrier than the others."""
OTHER_LIMIT_S, OWN_LIMIT_S = 47.0, 33.0
MEBIBYTE = 2**20


@check_on_ranks(
    "after a reduction all ranks hold the same bits",
    means="Replicas drift apart by a last digit in each step, until they are different models.",
)
def ranks_agree(on: RankContext) -> None:
    for dtype in dtypes(on):
        for op in ("sum", "mean"):
            for size in (7, 2**16 + 3):
                thirds = (on.values(size, dtype, on.rank) / 3).to(dtype)
                result = on.collectives.all_reduce(thirds.to(on.device), op=op).to(HOST_DEVICE)
                bits = result.view(torch.uint8).numpy().tobytes()
                digests = on.collectives.gather_objects(hashlib.sha256(bits).hexdigest())
                what = f"all_reduce {op} of {size} x {dtype} differs between ranks"
                on.expect(len(set(digests)) == 1, what)


def _left_together(on: RankContext, late: int, leave: Callable[[], Any]) -> None:
    """Note whoever left before the late rank had come."""
    if on.rank == late:
        time.sleep(LATE_S)
    came = time.monotonic()  # one clock for all processes of a machine
    leave()
    times = on.collectives.gather_objects((came, time.monotonic()))
    for rank, (_, left) in enumerate(times):
        early = times[late][0] - left
        on.expect(early <= 0, f"rank {rank} left {early:.2f} s before rank {late} came")


@check_on_ranks(
    "nobody leaves a barrier, or a stretch of patience, before everyone has come",
    means="A rank reads a checkpoint that another still writes, or runs into the short limit while "
    "another loads; the barrier only queues work on the device.",
)
def barrier_waits(on: RankContext) -> None:
    for late in on.ranks:
        _left_together(on, late, on.collectives.barrier)
    if sharding_spec().engine not in on.backend.unsupported_engines:
        _left_together(on, 0, dist.barrier)  # DeepSpeed's, of the device's group
    patience = on.collectives.patient_timeout(then=COLLECTIVE_TIMEOUT_S)
    patience.__enter__()
    _left_together(on, on.world_size - 1, lambda: patience.__exit__(None, None, None))


@check_on_ranks(
    "groups have the limit that was asked for: when opened, when set, and made later",
    means="A run whose peer has died hangs for half an hour; `open` gives its groups no timeout, "
    "`set_timeout` was replaced, or the library does not take one.",
)
def limits_hold(on: RankContext) -> None:
    def hold(name: str, group: Any, asked: float, fixed: Sequence[str] = ()) -> None:
        for library, backend in libraries_of(group):
            limit = getattr(getattr(backend, "options", None), "_timeout", None)
            if isinstance(limit, datetime.timedelta) and library not in fixed:  # else unknown
                seconds = limit.total_seconds()
                on.expect(
                    seconds == asked,
                    f"the {name} group waits {seconds:g} s by way of {library}, not {asked:g} s, "
                    "and limit() does not name it",
                )

    named = {"default": dist.group.WORLD, "control": on.collectives.control_group}
    for name, group in named.items():
        hold(name, group, COLLECTIVE_TIMEOUT_S)
    named |= {str(list(ranks)): group for ranks, group in groups(on).items() if on.rank in ranks}
    fixed = on.collectives.set_timeout(OTHER_LIMIT_S)
    try:
        for name, group in {**named, "later": dist.new_group(list(on.ranks))}.items():
            hold(name, group, OTHER_LIMIT_S, fixed)
    finally:
        on.collectives.set_timeout(COLLECTIVE_TIMEOUT_S)
    own = dist.new_group(list(on.ranks), timeout=datetime.timedelta(seconds=OWN_LIMIT_S))
    hold(f"{OWN_LIMIT_S:g} s", own, OWN_LIMIT_S)


@check_on_ranks(
    "messages of the host are whole and in the order of ranks: sums in float64, objects, bytes",
    means="Token counts and losses in logs lose digits, or a rank's report is cut or taken for "
    "another's; the backend sums on its device, gave its device group as control group, or "
    "replaced gather_objects by one of its own.",
)
def host_messages(on: RankContext) -> None:
    def numbers(rank: int) -> list[float]:
        # Float32 would lose the ones.
        first = [2.0**40 if rank == 0 else 1.0, (rank + 1) / 3, 2.0**53 if rank == 0 else 0.0]
        return [*first, math.inf, math.nan if rank == 1 else 1.0, *[0.1 * rank] * 1000]

    def told(rank: int) -> object:
        # Nothing from one of them, and more than a MiB from others.
        return {"text": f"é{rank}" * (MEBIBYTE // 4 * rank), "numbers": [2**63 + rank, -0.1, None]}

    found = torch.tensor(on.collectives.sum_on_host(numbers(on.rank)), dtype=torch.float64)
    wanted = [sum(each) for each in zip(*map(numbers, on.ranks), strict=True)]
    on.match(found, torch.tensor(wanted, dtype=torch.float64), "sum_on_host")
    for rank, got in enumerate(on.collectives.gather_objects(told(on.rank))):
        right = repr(got) == repr(told(rank))  # 1.0 would equal 1
        on.expect(right, f"rank {rank} sent something else than {repr(got)[-80:]}")
    raw = [bytes(range(256)) * (4097 * rank) + bytes([rank] * rank) for rank in on.ranks]
    same = list(on.collectives.gather_bytes(raw[on.rank])) == raw
    on.expect(same, "gather_bytes gives other bytes than were sent")
    control = on.collectives.control_group
    on.expect(dist.get_process_group_ranks(control) == list(on.ranks), "control_group lacks ranks")


@check_on_ranks(
    "each rank has a device of its own",
    means="Ranks share a device and its memory, and others are idle; the backend opens device 0, "
    "or its variable of visible devices is not read.",
)
def devices_differ(on: RankContext) -> None:
    # Where each process sees one device alone, of number 0, its environment says which.
    seen = sorted((name, value) for name, value in os.environ.items() if name not in IDENTITY)
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    devices = on.collectives.gather_objects((on.device.index, digest))
    if all(index is not None for index, _ in devices):
        numbers = ", ".join(str(index) for index, _ in devices)
        assert len(set(map(tuple, devices))) == on.world_size, (
            f"ranks share: they have opened number {numbers}, in one environment"
        )
