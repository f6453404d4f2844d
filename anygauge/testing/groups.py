"""Checks of subgroups and meshes on several ranks: who is in them, who is not, and how long."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from anygauge.testing.check import NotAsked
from anygauge.testing.process import COLLECTIVE_TIMEOUT_S
from anygauge.testing.together import Together, bound, check_on_ranks, limits_of, total

FLOAT = torch.float32
SIZE = 1003
LATE_S = 0.25
"""How much later one rank comes to a barrier than the others."""
PATIENCE_S = 10.0
"""How long a rank waits to learn that others have left a barrier without it."""
OTHER_LIMIT_S = 47.0
OWN_LIMIT_S = 33.0


def members(world_size: int) -> Sequence[tuple[int, ...]]:
    """Ranks of the groups that are made: each alone, all but one, neighbours, others, all."""
    everyone = tuple(range(world_size))
    found: list[tuple[int, ...]] = [(rank,) for rank in everyone]
    if world_size > 2:
        found += [everyone[1:], (*everyone[:-2], everyone[-1])]
    if world_size > 3:
        found += [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
    return [*found, everyone]


def mine(on: Together) -> list[tuple[Sequence[int], Any]]:
    """(ranks, group) of the groups that this rank is in; made once."""
    if "groups" not in on.kept:
        made = [(ranks, dist.new_group(list(ranks))) for ranks in members(on.world_size)]
        on.kept["groups"] = made  # all of them: one that is dropped may be taken down
    return [(ranks, group) for ranks, group in on.kept["groups"] if on.rank in ranks]


def values_of(on: Together, ranks: Sequence[int], salt: int = 0) -> list[Tensor]:
    """What these ranks have, in their order."""
    return [on.exact((SIZE,), FLOAT, rank, salt=salt + len(ranks)) for rank in ranks]


def own(on: Together, ranks: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    """This rank's, on its device."""
    return on.put(values[ranks.index(on.rank)], FLOAT)


@check_on_ranks(
    "a subgroup has the ranks that were named, in their order",
    means="Parts of a tensor belong to other ranks than an engine thinks; the library numbers the "
    "ranks of a group by its topology.",
)
def group_members(on: Together) -> None:
    on.asked_by_engines()
    for ranks, group in mine(on):
        found = dist.get_process_group_ranks(group)
        on.hold(found == list(ranks), f"the group of {list(ranks)} has the ranks {found}")
        size, place = dist.get_world_size(group), dist.get_rank(group)
        on.hold(size == len(ranks), f"the group of {list(ranks)} has the size {size}")
        on.hold(place == ranks.index(on.rank), f"rank {on.rank} is number {place} of {list(ranks)}")
        for n, rank in enumerate(ranks):
            on.hold(
                dist.get_global_rank(group, n) == rank, f"number {n} of {list(ranks)} is not {rank}"
            )
        values = values_of(on, ranks)
        parts = [on.empty((SIZE,), FLOAT) for _ in ranks]
        dist.all_gather(parts, own(on, ranks, values), group=group)
        for rank, part, value in zip(ranks, parts, values, strict=True):
            on.same(part, value, f"all_gather in the group {list(ranks)}, of rank {rank}")


@check_on_ranks(
    "the contract's all_reduce in a subgroup is of that group alone",
    means="Gradients of one part of a model are added to those of another; the backend's "
    "all_reduce does not hand on its group, or divides by the number of all ranks.",
)
def group_reductions(on: Together) -> None:
    on.asked_by_engines()
    for ranks, group in mine(on):
        values = values_of(on, ranks)
        stacked = torch.stack(values)
        wanted = {"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.amax(0)}
        for op, right in wanted.items():
            tensor = own(on, ranks, values)
            result = on.collectives.all_reduce(tensor, op=op, group=group)
            within = bound(values, FLOAT, len(ranks) + 1) if op == "mean" else None
            on.same(result, right, f"all_reduce {op} in the group {list(ranks)}", within=within)


@check_on_ranks(
    "the source in a subgroup is the rank that it has among all",
    means="A part of a model begins with the weights of another; torch gives libraries the number "
    "within the group, and engines give the number among all: one of them is mapped twice.",
)
def group_sources(on: Together) -> None:
    on.asked_by_engines()
    for ranks, group in mine(on):
        for source in ranks:
            values = values_of(on, ranks, salt=source)
            where = f"rank {source} in the group {list(ranks)}"
            tensor = own(on, ranks, values)
            dist.broadcast(tensor, src=source, group=group)
            on.same(tensor, values[ranks.index(source)], f"broadcast from {where}")
            tensor = own(on, ranks, values)
            dist.reduce(tensor, dst=source, group=group)
            if on.rank == source:
                on.same(tensor, total(values), f"reduce to {where}")
            objects = [{"of": source}] if on.rank == source else [None]
            dist.broadcast_object_list(objects, src=source, group=group)
            on.hold(objects == [{"of": source}], f"broadcast_object_list from {where}: {objects}")


@check_on_ranks(
    "buffers are gathered, scattered and exchanged within a subgroup",
    means="FSDP with replicas or tensor parallelism computes with parts of other groups; the "
    "library keeps one communicator, or one buffer, for all groups.",
)
def group_buffers(on: Together) -> None:
    on.asked_by_engines()
    for ranks, group in mine(on):
        place, count = ranks.index(on.rank), len(ranks)
        values = values_of(on, ranks)
        whole = on.empty((SIZE * count,), FLOAT)
        dist.all_gather_into_tensor(whole, own(on, ranks, values), group=group)
        on.same(whole, torch.cat(values), f"all_gather_into_tensor in the group {list(ranks)}")
        given = [on.exact((SIZE * count,), FLOAT, rank, salt=count) for rank in ranks]
        part = on.empty((SIZE,), FLOAT)
        dist.reduce_scatter_tensor(part, own(on, ranks, given), group=group)
        wanted = total(given)[SIZE * place : SIZE * (place + 1)]
        on.same(part, wanted, f"reduce_scatter_tensor in the group {list(ranks)}")
        received = on.empty((SIZE * count,), FLOAT)
        dist.all_to_all_single(received, own(on, ranks, given), group=group)
        wanted = torch.cat([each[SIZE * place : SIZE * (place + 1)] for each in given])
        on.same(received, wanted, f"all_to_all_single in the group {list(ranks)}")


def layouts(world_size: int) -> list[tuple[int, int]]:
    """Rows and columns of every mesh of two dimensions."""
    return [(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0]


@check_on_ranks(
    "the rows and columns of a mesh are those of its layout",
    means="Replicas and shards, or stages and their copies, are swapped; the library makes the "
    "groups of a mesh in another order on some ranks.",
)
def mesh_layouts(on: Together) -> None:
    on.asked_by_engines()
    for rows, columns in layouts(on.world_size):
        mesh = init_device_mesh(on.device.type, (rows, columns), mesh_dim_names=("row", "column"))
        row, column = divmod(on.rank, columns)
        along = {
            "row": [other * columns + column for other in range(rows)],
            "column": [row * columns + other for other in range(columns)],
        }
        for name, ranks in along.items():
            group = mesh.get_group(name)
            what = f"the {name} of a {rows} x {columns} mesh"
            found = dist.get_process_group_ranks(group)
            on.hold(found == ranks, f"{what} has the ranks {found}, not {ranks}")
            place = mesh.get_local_rank(name)
            on.hold(place == ranks.index(on.rank), f"rank {on.rank} is number {place} in {what}")
            values = values_of(on, ranks, salt=rows)
            tensor = own(on, ranks, values)
            dist.all_reduce(tensor, group=group)
            on.same(tensor, total(values), f"all_reduce in {what}")
            whole = on.empty((SIZE * len(ranks),), FLOAT)
            dist.all_gather_into_tensor(whole, own(on, ranks, values), group=group)
            on.same(whole, torch.cat(values), f"all_gather_into_tensor in {what}")


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
    "messages in a subgroup go to the rank that was named",
    means="Stages of a pipeline send to the stage of a copy; the library takes the number among "
    "all for that within the group.",
)
def group_messages(on: Together) -> None:
    on.asked_by_engines()
    refusals = []
    for ranks, group in mine(on):
        if len(ranks) == 1 or on.rank not in (ranks[0], ranks[-1]):
            continue
        first, last = ranks[0], ranks[-1]
        values = values_of(on, ranks)
        tensor, arriving = own(on, ranks, values), on.empty((SIZE,), FLOAT)

        def passes(
            first: int = first,
            last: int = last,
            group: Any = group,
            arriving: Tensor = arriving,
            tensor: Tensor = tensor,
        ) -> None:
            if on.rank == first:
                dist.send(tensor, dst=last, group=group)
            if on.rank == last:
                dist.recv(arriving, src=first, group=group)

        what = f"message from rank {first} in the group {list(ranks)}"
        refused = _tried(passes)
        if on.rank == last and not refused:
            on.same(arriving, values[0], what)
        refusals.append(refused)
    everyone = on.collectives.gather_objects(refusals)
    reasons = [refused for each in everyone for refused in each]
    if any(reasons):
        on.hold(all(reasons), f"the library refuses some messages in subgroups: {reasons}")
        raise NotAsked(f"the library refuses messages in subgroups: {reasons[0]}")


def _tried(action: Callable[[], None]) -> str:
    """What it raises; empty if nothing. Not all ranks make the call, so they cannot agree here."""
    try:
        action()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
