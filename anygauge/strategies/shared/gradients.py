"""Adds up a step's gradients, and decides when ranks sum them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gradients:
    """The gradients of one step, for one engine."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of a micro-batch; `last` of the step."""
        return contextlib.nullcontext()

    def collect(self) -> None:
        """Collect gradients after backward of each micro-batch."""

    def take(self) -> list[Tensor | None]:
        """This rank's part of the sums over all ranks, one for each trained parameter.

        In the type of reductions, and the engine's from then on; None counts as zero.
        """
        raise NotImplementedError

    def export_rank_state(self) -> Mapping[str, Tensor]:
        """See `HasRankState.export_rank_state`."""
        return {}

    def import_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `HasRankState.import_rank_state`."""
        if tensors:
            raise ValueError(f"no state of a rank's own is kept, but there is {sorted(tensors)}")


class LocalGradients(Gradients):
    """Added up on one rank, which has all of them; see `Gradients`.

    Args:
        trained: parameters, each whole.
        dtype: of the sums.
    """

    def __init__(self, trained: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._trained = trained
        self._dtype = dtype
        self._sums: list[Tensor | None] = [None] * len(trained)

    def collect(self) -> None:
        """See `Gradients.collect`."""
        for index in range(len(self._trained)):
            self._add(index)

    def _add(self, index: int) -> None:
        """Take one parameter's gradient, if it has one."""
        parameter = self._trained[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        total = self._sums[index]
        if total is None:
            self._sums[index] = gradient.to(self._dtype)
        else:
            total.add_(gradient)

    def take(self) -> list[Tensor | None]:
        """See `Gradients.take`."""
        taken, self._sums = self._sums, [None] * len(self._trained)
        return taken


def sum_at(
    gradients: list[Tensor | None],
    places: Sequence[int],
    held: Sequence[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Sum some of the gradients over a group, in place, in one message.

    Args:
        gradients: None counts as zero.
        held: what each gradient is of, on this rank.
        device: on which ranks speak with each other.
    """
    dtype = next((g.dtype for g in gradients if g is not None), torch.float32)
    flat = [
        torch.zeros(held[at].numel(), dtype=dtype, device=device)
        if (gradient := gradients[at]) is None
        else gradient.to(device).flatten()
        for at in places
    ]
    if not flat:
        return
    total = torch.cat(flat)
    dist.all_reduce(total, group=group)
    for at, piece in zip(places, total.split([len(one) for one in flat]), strict=True):
        gradients[at] = piece.view(held[at].shape).to(held[at].device)
