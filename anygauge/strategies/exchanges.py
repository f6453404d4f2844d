"""What ranks of a group hand to each other within a forward, with the reverse in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CountedGroup:
    """In place of a process group, for a plan: nothing is sent, and what is received is undefined.

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


def gathered(part: Tensor, group: Group, dim: int) -> Tensor:
    """Each rank's part of a dimension -> the whole."""
    first = part.movedim(dim, 0).contiguous()
    ranks = size_of(group)
    whole = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    if not isinstance(group, CountedGroup):
        dist.all_gather_into_tensor(whole, first, group=group)
    return whole.movedim(0, dim)


def scattered(whole: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each gets its part of a dimension."""
    first = whole.movedim(dim, 0).contiguous()
    ranks = size_of(group)
    part = first.new_empty((first.shape[0] // ranks, *first.shape[1:]))
    if not isinstance(group, CountedGroup):
        dist.reduce_scatter_tensor(part, first, group=group)
    return part.movedim(0, dim)


def summed(part: Tensor, group: Group) -> Tensor:
    """The sum over ranks."""
    total = part.clone(memory_format=torch.contiguous_format)
    if not isinstance(group, CountedGroup):
        dist.all_reduce(total, group=group)
    return total


def own(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of a dimension that all ranks have."""
    each = whole.shape[dim] // size_of(group)
    return whole.narrow(dim, rank_in(group) * each, each)


class Gather(torch.autograd.Function):
    """Parts of a dimension -> the whole; gradients are summed over ranks, and divided again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, dim: int) -> Tensor:  # noqa: D102
        ctx.given = (group, dim)
        return gathered(part, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return scattered(gradients[0], *ctx.given), None, None


class Scatter(torch.autograd.Function):
    """Sum over ranks, each of which keeps its part of a dimension; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, dim: int) -> Tensor:  # noqa: D102
        ctx.given = (group, dim)
        return scattered(whole, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return gathered(gradients[0], *ctx.given), None, None


class Sum(torch.autograd.Function):
    """The sum over ranks; the gradient, which all of them have, passes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:  # noqa: D102
        return summed(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return gradients[0], None


class SumGradient(torch.autograd.Function):
    """The same for each rank, which does its part with it; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:  # noqa: D102
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return summed(gradients[0], ctx.group), None


class Own(torch.autograd.Function):
    """The whole -> this rank's part of a dimension.

    The gradient is gathered, so that each rank has all of it, or is zero in others' parts.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, dim: int, gathers: bool) -> Tensor:  # noqa: D102
        ctx.given = (group, dim, gathers)
        return own(whole, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        group, dim, gathers = ctx.given
        (part,) = gradients
        if gathers:
            return gathered(part, group, dim), None, None, None
        shape = list(part.shape)
        shape[dim] *= size_of(group)
        whole = part.new_zeros(shape)
        own(whole, group, dim).copy_(part)
        return whole, None, None, None


class Rejoin(torch.autograd.Function):
    """Parts of a dimension -> the whole; of the gradient, which all ranks have, each takes its."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, dim: int) -> Tensor:  # noqa: D102
        ctx.given = (group, dim)
        return gathered(part, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return own(gradients[0], *ctx.given).contiguous(), None, None


class OwnGradient(torch.autograd.Function):
    """The same; of the gradient, which all ranks have, each keeps its part of a dimension."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, dim: int) -> Tensor:  # noqa: D102
        ctx.given = (group, dim)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        kept = torch.zeros_like(gradients[0])
        own(kept, *ctx.given).copy_(own(gradients[0], *ctx.given))
        return kept, None, None


class Exchange(torch.autograd.Function):
    """Divide one dimension over ranks and put another together; backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, divide: int, join: int) -> Tensor:  # noqa: D102
        ctx.given = (group, divide, join)
        sent = torch.stack(x.chunk(size_of(group), dim=divide)).contiguous()
        received = torch.empty_like(sent)
        if not isinstance(group, CountedGroup):
            dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        group, divide, join = ctx.given
        return Exchange.apply(gradients[0], group, join, divide), None, None, None
