"""The mesh of ranks, and what those of a group hand to each other, with the reverse in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def device_mesh(sizes: Mapping[str, int], device: torch.device, *kept: str) -> DeviceMesh:
    """All ranks along the axes that have several, or are to be kept; see `degrees.mesh_axes`."""
    used = {name: size for name, size in sizes.items() if size > 1 or name in kept}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def group_along(mesh: DeviceMesh | None, axis: str) -> dist.ProcessGroup | None:
    """This rank's group along an axis; None where it is alone."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return mesh.get_group(axis) if mesh is not None and axis in names else None


@dataclass(frozen=True, slots=True)
class CountedGroup:
    """Stands in for a process group in a plan: sends nothing, and receives undefined values.

    Attributes:
        size, rank: how many ranks it stands for, and which of them this one is.
    """

    size: int
    rank: int


Group: TypeAlias = "dist.ProcessGroup | CountedGroup"


def size_of(group: Group) -> int:
    """How many ranks are in a group."""
    return group.size if isinstance(group, CountedGroup) else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """This rank's place in a group."""
    return group.rank if isinstance(group, CountedGroup) else dist.get_rank(group)


def gather_dim(part: Tensor, group: Group, dim: int) -> Tensor:
    """Each rank's part of a dimension -> the whole."""
    first = part.movedim(dim, 0).contiguous()
    ranks = size_of(group)
    whole = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    if not isinstance(group, CountedGroup):
        dist.all_gather_into_tensor(whole, first, group=group)
    return whole.movedim(0, dim)


def reduce_scatter_dim(whole: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each gets its part of a dimension."""
    first = whole.movedim(dim, 0).contiguous()
    ranks = size_of(group)
    part = first.new_empty((first.shape[0] // ranks, *first.shape[1:]))
    if not isinstance(group, CountedGroup):
        dist.reduce_scatter_tensor(part, first, group=group)
    return part.movedim(0, dim)


def sum_over_group(part: Tensor, group: Group) -> Tensor:
    """The sum over ranks."""
    total = part.clone(memory_format=torch.contiguous_format)
    if not isinstance(group, CountedGroup):
        dist.all_reduce(total, group=group)
    return total


def own_slice(whole: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part of a dimension that all ranks have, as a view."""
    each = whole.shape[dim] // size_of(group)
    return whole.narrow(dim, rank_in(group) * each, each)


def split_dim(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of a dimension that all ranks have."""
    return own_slice(whole, group, dim).contiguous()


def _identity(x: Tensor, group: Group, *_: int) -> Tensor:
    return x.view_as(x)


def _zero_others(part: Tensor, group: Group, dim: int) -> Tensor:
    """Zero in others' parts of a dimension."""
    shape = list(part.shape)
    shape[dim] *= size_of(group)
    whole = part.new_zeros(shape)
    own_slice(whole, group, dim).copy_(part)
    return whole


def _split_own(whole: Tensor, group: Group, dim: int) -> Tensor:
    return _zero_others(own_slice(whole, group, dim), group, dim)


def _all_to_all(x: Tensor, group: Group, divide: int, join: int) -> Tensor:
    """Divide one dimension over ranks, and put another together."""
    sent = torch.stack(x.chunk(size_of(group), dim=divide)).contiguous()
    received = torch.empty_like(sent)
    if not isinstance(group, CountedGroup):
        dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=join)


def _all_to_all_back(x: Tensor, group: Group, divide: int, join: int) -> Tensor:
    return _all_to_all(x, group, join, divide)


GATHER, SCATTER, EXCHANGE = "gather", "scatter", "exchange"
SUM, SUM_GRADIENT = "sum", "sum gradient"
OWN, OWN_ALONE, OWN_GRADIENT, REJOIN = "own", "own alone", "own gradient", "rejoin"
_OPERATIONS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    # Parts of a dimension -> the whole; gradients are summed over ranks, and divided again.
    GATHER: (gather_dim, reduce_scatter_dim),
    # Sum over ranks, each of which keeps its part of a dimension; gradients are gathered.
    SCATTER: (reduce_scatter_dim, gather_dim),
    # The sum over ranks; the gradient, which all of them have, passes.
    SUM: (sum_over_group, _identity),
    # The same for each rank, which does its part with it; gradients are summed over ranks.
    SUM_GRADIENT: (_identity, sum_over_group),
    # The whole -> this rank's part of a dimension; each rank has all of the gradient.
    OWN: (split_dim, gather_dim),
    # Likewise; the gradient is zero in others' parts.
    OWN_ALONE: (split_dim, _zero_others),
    # The same; of the gradient, which all ranks have, each keeps its part of a dimension.
    OWN_GRADIENT: (_identity, _split_own),
    # Parts of a dimension -> the whole; of the gradient, which all ranks have, each takes its.
    REJOIN: (gather_dim, split_dim),
    # Divide one dimension over ranks and put another together; backward does the reverse.
    EXCHANGE: (_all_to_all, _all_to_all_back),
}


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, group: Group, *dims: int) -> Tensor:
        ctx.given = (name, group, dims)
        return _OPERATIONS[name][0](x, group, *dims)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, group, dims = ctx.given
        return _OPERATIONS[name][1](gradients[0], group, *dims), *(
            None for _ in (name, group, *dims)
        )


def over_ranks(x: Tensor, name: str, group: Group, *dims: int) -> Tensor:
    """What a rank has after an operation of this module, by its name; see `_OPERATIONS`."""
    found: Tensor = _OverRanks.apply(x, name, group, *dims)
    return found
