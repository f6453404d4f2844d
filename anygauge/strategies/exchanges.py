"""What ranks of a group hand to each other within a forward, with the reverse in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def gathered(part: Tensor, group: Group, dim: int) -> Tensor:
    """Each rank's part of a dimension -> the whole."""
    first = part.movedim(dim, 0).contiguous()
    ranks = dist.get_world_size(group)
    whole = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    dist.all_gather_into_tensor(whole, first, group=group)
    return whole.movedim(0, dim)


def scattered(whole: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each gets its part of a dimension."""
    first = whole.movedim(dim, 0).contiguous()
    ranks = dist.get_world_size(group)
    part = first.new_empty((first.shape[0] // ranks, *first.shape[1:]))
    dist.reduce_scatter_tensor(part, first, group=group)
    return part.movedim(0, dim)


def summed(part: Tensor, group: Group) -> Tensor:
    """The sum over ranks."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def own(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of a dimension that all ranks have."""
    each = whole.shape[dim] // dist.get_world_size(group)
    return whole.narrow(dim, dist.get_rank(group) * each, each)


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
        shape[dim] *= dist.get_world_size(group)
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
        sent = torch.stack(x.chunk(dist.get_world_size(group), dim=divide)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        group, divide, join = ctx.given
        return Exchange.apply(gradients[0], group, join, divide), None, None, None
