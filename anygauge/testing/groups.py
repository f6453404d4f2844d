"""Checks of subgroups and meshes on several ranks: who is in them, and who is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from anygauge.testing.check import NotAsked
from anygauge.testing.together import Together, bound, check_on_ranks, total

FLOAT = torch.float32
SIZE = 1003


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
        tensor = own(on, ranks, values)

        def averages(tensor: Tensor = tensor, group: Any = group) -> None:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)

        if not _tried(averages):
            what = f"the library's mean in the group {list(ranks)}"
            on.same(tensor, wanted["mean"], what, within=bound(values, FLOAT, len(ranks) + 1))


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


def layouts(world_size: int) -> list[tuple[int, ...]]:
    """Sizes of every mesh of two dimensions, and of three."""
    found: list[tuple[int, ...]] = []
    for first in range(1, world_size + 1):
        if world_size % first == 0:
            rest = world_size // first
            found.append((first, rest))
            found += [(first, n, rest // n) for n in range(2, rest) if rest % n == 0]
            found += [(first, 1, rest)] if first > 1 < rest else []
    return found


def along(layout: Sequence[int], rank: int, dimension: int) -> list[int]:
    """Ranks that differ from this one in one coordinate alone; the last coordinate runs first."""
    step = math.prod(layout[dimension + 1 :])
    place = rank // step % layout[dimension]
    return [rank + (other - place) * step for other in range(layout[dimension])]


@check_on_ranks(
    "the groups of a mesh are those of its layout",
    means="Replicas and shards, or stages and their copies, are swapped; the library makes the "
    "groups of a mesh in another order on some ranks.",
)
def mesh_layouts(on: Together) -> None:
    on.asked_by_engines()
    for layout in layouts(on.world_size):
        names = ("dp", "cp", "tp")[: len(layout)]
        mesh = init_device_mesh(on.device.type, layout, mesh_dim_names=names)
        for dimension, name in enumerate(names):
            ranks = along(layout, on.rank, dimension)
            group = mesh.get_group(name)
            what = f"{name} of a mesh {layout}"
            found = dist.get_process_group_ranks(group)
            on.hold(found == ranks, f"{what} has the ranks {found}, not {ranks}")
            place = mesh.get_local_rank(name)
            on.hold(place == ranks.index(on.rank), f"rank {on.rank} is number {place} in {what}")
            values = values_of(on, ranks, salt=dimension)
            tensor = own(on, ranks, values)
            dist.all_reduce(tensor, group=group)
            on.same(tensor, total(values), f"all_reduce in {what}")
            whole = on.empty((SIZE * len(ranks),), FLOAT)
            dist.all_gather_into_tensor(whole, own(on, ranks, values), group=group)
            on.same(whole, torch.cat(values), f"all_gather_into_tensor in {what}")


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
