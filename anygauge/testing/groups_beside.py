"""Checks of subgroups beside each other: at the same time, with unequal calls, barriers, limits."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from anygauge.testing.check import COLLECTIVE_TIMEOUT_S
from anygauge.testing.groups import FLOAT, SIZE, members, mine, own, values_of
from anygauge.testing.together import Together, check_on_ranks, limits_of, total

LATE_S = 0.25
"""How much later one rank comes to a barrier than the others."""
PATIENCE_S = 10.0
"""How long a rank waits to learn that others have left a barrier without it."""
OTHER_LIMIT_S = 47.0
OWN_LIMIT_S = 33.0


@check_on_ranks(
    "work in several groups may be under way at the same time",
    means="Sums over shards and replicas are mixed where they overlap; the library has one stream, "
    "one buffer or one counter of messages for all groups.",
)
def groups_at_once(on: Together) -> None:
    on.asked_by_engines()
    begun = []
    for turn in range(2):
        for ranks, group in mine(on):
            values = values_of(on, ranks, salt=turn)
            tensor = own(on, ranks, values)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            begun.append((f"all_reduce in {list(ranks)}", work, tensor, total(values)))
            whole = on.empty((SIZE * len(ranks),), FLOAT)
            mine_again = own(on, ranks, values)
            work = dist.all_gather_into_tensor(whole, mine_again, group=group, async_op=True)
            begun.append((f"all_gather in {list(ranks)}", work, whole, torch.cat(values)))
    everyone = [on.exact((SIZE,), FLOAT, rank, salt=99) for rank in on.ranks]
    tensor = on.put(everyone[on.rank], FLOAT)
    dist.all_reduce(tensor)  # of all, while those of the groups may run
    on.same(tensor, total(everyone), "all_reduce of all, beside those of groups")
    for name, work, tensor, wanted in reversed(begun):
        work.wait()
        on.same(tensor, wanted, f"{name}, beside other groups")


@check_on_ranks(
    "groups without a common rank need not make the same calls",
    means="A run hangs, or mixes results, where experts or stages have unequal work; the library "
    "counts the calls of all groups together.",
)
def groups_are_independent(on: Together) -> None:
    on.asked_by_engines()
    for ranks, group in mine(on):
        if len(ranks) == on.world_size:
            continue
        # The lower the first rank, the more calls: others are then far ahead.
        for turn in range(2 * (on.world_size - ranks[0])):
            values = values_of(on, ranks, salt=turn)
            tensor = own(on, ranks, values)
            dist.all_reduce(tensor, group=group)
            on.same(tensor, total(values), f"call {turn + 1} in the group {list(ranks)}")
    everyone = [on.exact((SIZE,), FLOAT, rank, salt=98) for rank in on.ranks]
    result = on.collectives.all_reduce(on.put(everyone[on.rank], FLOAT))
    on.same(result, total(everyone), "all_reduce of all, after unequal calls in groups")


@check_on_ranks(
    "a subgroup's barrier waits for its members, and for nobody else",
    means="A run hangs where the ranks of one stage meet; the library's barrier is one of all "
    "ranks, or returns at once.",
)
def group_barriers(on: Together) -> None:
    on.asked_by_engines()
    with tempfile.TemporaryDirectory(prefix="anygauge-kit-") as folder:
        # The first rank's, for all: ranks of the kit share a machine.
        _pass_barriers(on, Path(on.collectives.gather_objects(folder)[0]))


def _pass_barriers(on: Together, folder: Path) -> None:
    groups, everyone = dict(mine(on)), members(on.world_size)
    # One alone, all but the first, two of four, all.
    for ranks in dict.fromkeys((everyone[1], everyone[on.world_size], everyone[-2], everyone[-1])):
        sign = folder / "-".join(map(str, ranks))
        late = ranks[-1]
        if on.rank == late and len(ranks) > 1:
            time.sleep(LATE_S)
        came = time.monotonic()
        if on.rank in ranks:
            dist.barrier(group=groups[ranks])
            on.backend.placement.synchronize()
            sign.touch()
        else:
            _look_on(on, ranks, sign)
        left = time.monotonic()
        times = on.collectives.gather_objects((came, left))
        for rank in ranks:
            on.hold(
                times[rank][1] >= times[late][0],
                f"rank {rank} left the barrier of {list(ranks)} before rank {late} came",
            )


def _look_on(on: Together, ranks: Sequence[int], sign: Path) -> None:
    """Wait until others have left their barrier; join it only if they do not."""
    until = time.monotonic() + PATIENCE_S
    while not sign.exists() and time.monotonic() < until:
        time.sleep(0.01)
    if not sign.exists():
        on.complaints.append(
            f"the barrier of {list(ranks)} did not end within {PATIENCE_S:g} s: it waits for "
            f"rank {on.rank}, which is not one of them"
        )
        dist.barrier()  # lets those go who wait for it


@check_on_ranks(
    "every group has the limit that was set, and those made later, too",
    means="A run whose peer has died hangs for half an hour in the group of an engine; the backend "
    "replaced `limit`, or its library does not take one.",
)
def limits_hold(on: Together) -> None:
    groups = {str(list(ranks)): group for ranks, group in mine(on)}
    fixed = on.collectives.limit(OTHER_LIMIT_S)
    try:
        groups["made afterwards"] = dist.new_group(list(on.ranks))
        groups["control"] = on.collectives.control_group
        groups["default"] = dist.group.WORLD
        for name, group in groups.items():
            for library, seconds in limits_of(group):
                known = any(library.startswith(each) for each in fixed)
                on.hold(
                    known or seconds == OTHER_LIMIT_S,
                    f"the group {name} waits {seconds:g} s by way of {library}, not "
                    f"{OTHER_LIMIT_S:g} s, and limit() does not name it",
                )
    finally:
        on.collectives.limit(COLLECTIVE_TIMEOUT_S)
    limit = datetime.timedelta(seconds=OWN_LIMIT_S)
    group = dist.new_group(list(on.ranks), timeout=limit)
    for library, seconds in limits_of(group):
        on.hold(
            seconds == OWN_LIMIT_S,
            f"a group asked for {OWN_LIMIT_S:g} s and waits {seconds:g} s by way of {library}",
        )


@check_on_ranks(
    "when a group is taken down the others still work",
    means="A run fails at its end, or after an engine was built twice; the library takes down what "
    "all groups share with the first.",
)
def groups_are_taken_down(on: Together) -> None:
    on.asked_by_engines()
    for _ in range(2):
        group = dist.new_group(list(on.ranks))
        values = [on.exact((SIZE,), FLOAT, rank) for rank in on.ranks]
        tensor = on.put(values[on.rank], FLOAT)
        dist.all_reduce(tensor, group=group)
        on.same(tensor, total(values), "all_reduce in a group")
        on.backend.placement.synchronize()
        on.collectives.barrier()
        dist.destroy_process_group(group)
        result = on.collectives.all_reduce(on.put(values[on.rank], FLOAT))
        on.same(result, total(values), "all_reduce of all, after a group was taken down")
    for ranks, group in mine(on):
        values = values_of(on, ranks)
        tensor = own(on, ranks, values)
        dist.all_reduce(tensor, group=group)
        on.same(tensor, total(values), f"all_reduce in {list(ranks)}, after another was taken down")
