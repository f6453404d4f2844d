"""Checks on several ranks: the contract's messages, barriers and limits, subgroups and meshes.

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
from torch.distributed.device_mesh import init_device_mesh

from anygauge.interface import HOST_DEVICE
from anygauge.testing.check import COLLECTIVE_TIMEOUT_S, check, sharding
from anygauge.testing.collectives import groups
from anygauge.testing.rank_context import RankContext, check_on_ranks, limits_of, total

IDENTITY = ("RANK", "LOCAL_RANK")
"""Variables by which ranks differ in any case."""
LATE_S = 0.25
"""How much later one rank comes to a barrier than the others."""
OTHER_LIMIT_S, OWN_LIMIT_S = 47.0, 33.0
MEBIBYTE = 2**20
FLOAT, SIZE = torch.float32, 1003


@check_on_ranks(
    "all_reduce refuses an operation that is none",
    means="A mistyped operation gives the sum without a word.",
)
def all_reduce_unknown(on: RankContext) -> None:
    for name in ("median", "", "MEAN"):
        try:
            on.collectives.all_reduce(torch.ones(1, device=on.device), op=name)
        except ValueError as error:
            on.hold(repr(name) in str(error), f"op={name!r} is refused without its name: {error}")
        else:
            on.hold(False, f"op={name!r} was taken without a word")


@check_on_ranks(
    "after a reduction all ranks hold the same bits",
    means="Replicas drift apart by a last digit in each step, until they are different models.",
)
def ranks_agree(on: RankContext) -> None:
    for dtype in on.dtypes():
        for op in ("sum", "mean"):
            for size in (7, 2**16 + 3):
                thirds = (on.exact((size,), dtype, on.rank) / 3).to(dtype)
                result = on.collectives.all_reduce(thirds.to(on.device), op=op).to(HOST_DEVICE)
                bits = result.view(torch.uint8).numpy().tobytes()
                digests = on.collectives.gather_objects(hashlib.sha256(bits).hexdigest())
                what = f"all_reduce {op} of {size} x {dtype} differs between ranks"
                on.hold(len(set(digests)) == 1, what)


def _left_together(on: RankContext, late: int, leave: Callable[[], Any]) -> None:
    """Note whoever left before the late rank had come."""
    if on.rank == late:
        time.sleep(LATE_S)
    came = time.monotonic()  # one clock for all processes of a machine
    leave()
    times = on.collectives.gather_objects((came, time.monotonic()))
    for rank, (_, left) in enumerate(times):
        early = times[late][0] - left
        on.hold(early <= 0, f"rank {rank} left {early:.2f} s before rank {late} came")


@check_on_ranks(
    "nobody leaves a barrier, or a stretch of patience, before everyone has come",
    means="A rank reads a checkpoint that another still writes, or runs into the short limit while "
    "another loads; the barrier only queues work on the device.",
)
def barrier_waits(on: RankContext) -> None:
    for late in on.ranks:
        _left_together(on, late, on.collectives.barrier)
    if sharding().engine not in on.backend.unsupported_engines:
        _left_together(on, 0, dist.barrier)  # DeepSpeed's, of the device's group
    patience = on.collectives.patient(then=COLLECTIVE_TIMEOUT_S)
    patience.__enter__()
    _left_together(on, on.world_size - 1, lambda: patience.__exit__(None, None, None))


@check_on_ranks(
    "groups have the limit that was asked for: when opened, when set, and made later",
    means="A run whose peer has died hangs for half an hour; `open` gives its groups no timeout, "
    "`limit` was replaced, or the library does not take one.",
)
def limits_hold(on: RankContext) -> None:
    found = {"default": dist.group.WORLD, "control": on.collectives.control_group}
    for name, group in found.items():
        for library, seconds in limits_of(group):
            on.hold(
                seconds == COLLECTIVE_TIMEOUT_S,
                f"the {name} group waits {seconds:g} s by way of {library}; "
                f"{COLLECTIVE_TIMEOUT_S:g} s were asked for",
            )
    found |= {str(list(ranks)): group for ranks, group in groups(on).items() if on.rank in ranks}
    fixed = on.collectives.limit(OTHER_LIMIT_S)
    try:
        found["made afterwards"] = dist.new_group(list(on.ranks))
        for name, group in found.items():
            for library, seconds in limits_of(group):
                known = any(library.startswith(each) for each in fixed)
                on.hold(
                    known or seconds == OTHER_LIMIT_S,
                    f"the group {name} waits {seconds:g} s by way of {library}, not "
                    f"{OTHER_LIMIT_S:g} s, and limit() does not name it",
                )
    finally:
        on.collectives.limit(COLLECTIVE_TIMEOUT_S)
    own = dist.new_group(list(on.ranks), timeout=datetime.timedelta(seconds=OWN_LIMIT_S))
    for library, seconds in limits_of(own):
        what = f"a group asked for {OWN_LIMIT_S:g} s and waits {seconds:g} s by way of {library}"
        on.hold(seconds == OWN_LIMIT_S, what)


@check_on_ranks(
    "numbers are summed on the host, in float64, in the order of ranks",
    means="Token counts and losses in logs lose digits, or ranks disagree on them; the backend "
    "sums on its device, which has no float64.",
)
def sums_on_host(on: RankContext) -> None:
    def values(rank: int) -> list[float]:
        # Float32 would lose the ones.
        first = [2.0**40 if rank == 0 else 1.0, float(rank), (rank + 1) / 3, -0.1 * rank]
        special = [math.inf, math.nan if rank == 1 else 1.0, 2.0**53 if rank == 0 else 0.0]
        return [*first, *special, *((rank + 1) / (n + 3) for n in range(1000))]

    found = on.collectives.sum_on_host(values(on.rank))
    wanted = [sum(each) for each in zip(*map(values, on.ranks), strict=True)]
    got = torch.tensor(found, dtype=torch.float64)
    on.same(got, torch.tensor(wanted, dtype=torch.float64), "sum_on_host")
    empty = on.collectives.sum_on_host([])
    on.hold(list(empty) == [], f"sum_on_host of nothing gave {empty}")


@check_on_ranks(
    "objects and bytes are gathered whole, in the order of ranks, whatever their sizes",
    means="A rank's report is taken for another's, is cut or filled up, or loses what JSON has no "
    "exact form for; the backend replaced gather_objects by one of its own.",
)
def gathers_objects(on: RankContext) -> None:
    def value(rank: int) -> object:
        numbers = [2**63 + rank, 0.1 * rank, -rank, 1e300]
        # Nothing from one of them, and more than a MiB from others.
        long = f"é{rank}" * (MEBIBYTE // 4 * rank + rank)
        return {"rank": rank, "text": long, "numbers": numbers, "none": None, "yes": True}

    for rank, got in enumerate(on.collectives.gather_objects(value(on.rank))):
        right = repr(got) == repr(value(rank))  # 1.0 would equal 1
        on.hold(right, f"rank {rank} sent something else than {repr(got)[:80]}")
    for rank, text in enumerate(on.collectives.gather_objects("é" * (MEBIBYTE // 2 * on.rank))):
        on.hold(len(text) == MEBIBYTE // 2 * rank, f"rank {rank}: {len(text):,} characters came")

    def data(rank: int) -> bytes:
        return bytes(range(256)) * (4097 * rank) + bytes([rank] * rank)

    for rank, raw in enumerate(on.collectives.gather_bytes(data(on.rank))):
        on.hold(raw == data(rank), f"rank {rank} sent {len(data(rank)):,} bytes: {len(raw):,}")


@check_on_ranks(
    "the control group is of all ranks and works on the host",
    means="Messages between ranks wait for the device or lose digits; the backend gave its device "
    "group as control group.",
)
def control_group(on: RankContext) -> None:
    group = on.collectives.control_group
    ranks = dist.get_process_group_ranks(group)
    on.hold(ranks == list(on.ranks), f"it has the ranks {ranks}")
    for make, dtype in ((on.exact, FLOAT), (on.whole, torch.int64)):
        wanted = [make((SIZE,), dtype, rank) for rank in on.ranks]
        tensor = wanted[on.rank].to(dtype, copy=True)
        dist.all_reduce(tensor, group=group)
        on.same(tensor, total(wanted), f"its sum of {dtype}")
        parts = [torch.empty_like(tensor) for _ in on.ranks]
        dist.all_gather(parts, wanted[on.rank].to(dtype), group=group)
        on.same(torch.cat(parts), torch.cat(wanted), f"its gather of {dtype}")


@check(
    "each rank has a device of its own",
    part="ranks",
    capability="collectives",
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


# -- subgroups ------------------------------------------------------------------------------------


def _sums(on: RankContext, ranks: Sequence[int], group: Any, what: str, salt: int = 0) -> Any:
    """Start a sum in a group: (handle, its tensor, what it must hold, in words)."""
    values = [on.exact((SIZE,), FLOAT, rank, salt=salt) for rank in ranks]
    tensor = on.put(values[list(ranks).index(on.rank)], FLOAT)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work, tensor, total(values), f"a sum in the group {list(ranks)}, {what}"


def _judge(on: RankContext, *begun: Any) -> None:
    for work, tensor, wanted, what in begun:
        work.wait()
        on.same(tensor, wanted, what)


@check_on_ranks(
    "subgroups have the ranks that were named and are apart: at once, with unequal calls, taken "
    "down",
    means="Sums over shards and replicas are mixed, or a run hangs where stages have unequal work; "
    "the library numbers ranks by its topology, or has one buffer or counter for all groups.",
)
def subgroups(on: RankContext) -> None:
    on.asked_by_engines()
    own = {ranks: group for ranks, group in groups(on).items() if on.rank in ranks}
    for ranks, group in own.items():
        found = dist.get_process_group_ranks(group)
        on.hold(found == list(ranks), f"the group of {list(ranks)} has the ranks {found}")
        place = dist.get_rank(group)
        on.hold(place == ranks.index(on.rank), f"rank {on.rank} is number {place} of {list(ranks)}")
        for n, rank in enumerate(ranks):
            same = dist.get_global_rank(group, n) == rank
            on.hold(same, f"number {n} of {list(ranks)} is not {rank}")
    begun = [_sums(on, *each, "beside others", t) for t in range(2) for each in own.items()]
    _judge(on, _sums(on, on.ranks, None, "beside those of groups", 99))
    _judge(on, *reversed(begun))
    for ranks, group in own.items():
        # The lower the first rank, the more calls: others are then far ahead.
        for turn in range(2 * (on.world_size - ranks[0]) * (len(ranks) < on.world_size)):
            _judge(on, _sums(on, ranks, group, f"call {turn + 1}", turn))
    _judge(on, _sums(on, on.ranks, None, "after unequal calls in groups", 98))
    for _ in range(2):
        group = dist.new_group(list(on.ranks))
        _judge(on, _sums(on, on.ranks, group, "made later"))
        on.backend.placement.synchronize()
        on.collectives.barrier()
        dist.destroy_process_group(group)
        _judge(on, _sums(on, on.ranks, None, "after a group was taken down"))
    _judge(on, *(_sums(on, *each, "after another was taken down") for each in own.items()))


def _layouts(world_size: int) -> list[tuple[int, ...]]:
    """Sizes of every mesh of two dimensions, and one of three."""
    pairs = [(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0]
    return [*pairs, *((first, 1, rest) for first, rest in pairs if first > 1 < rest)]


@check_on_ranks(
    "the groups of a mesh are those of its layout",
    means="Replicas and shards, or stages and their copies, are swapped; the library makes the "
    "groups of a mesh in another order on some ranks.",
)
def meshes(on: RankContext) -> None:
    on.asked_by_engines()
    for layout in _layouts(on.world_size):
        names = ("dp", "cp", "tp")[: len(layout)]
        mesh = init_device_mesh(on.device.type, layout, mesh_dim_names=names)
        for dimension, name in enumerate(names):
            step = math.prod(layout[dimension + 1 :])
            place = on.rank // step % layout[dimension]
            ranks = [on.rank + (other - place) * step for other in range(layout[dimension])]
            group = mesh.get_group(name)
            what = f"{name} of a mesh {layout}"
            found = dist.get_process_group_ranks(group)
            on.hold(found == ranks, f"{what} has the ranks {found}, not {ranks}")
            number = mesh.get_local_rank(name)
            on.hold(number == place, f"rank {on.rank} is number {number} in {what}, not {place}")
            _judge(on, _sums(on, ranks, group, what, dimension))


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
