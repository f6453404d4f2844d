"""Where trained parameters are, and their gradients, when each stage has its own layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anygauge.strategies.gradients import LocalGradients
from anygauge.strategies.layout import GroupLayout, scale_to


class Staged(GroupLayout):
    """A rank holds its stages' parameters whole, and nothing of others; see `TensorLayout`.

    A weight that the first and the last stage share counts on the first rank that has it.

    Args:
        owners: for each rank of the pipeline, the identities of the parameters that it has.
        trained: in the engine's order.
    """

    def __init__(
        self,
        owners: Sequence[set[int]],
        trained: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(group, device)
        self._place = dist.get_rank(group)
        self._mine = owners[self._place]
        self._owner = {
            id(p): next(at for at, ids in enumerate(owners) if id(p) in ids) for p in trained
        }
        self._counts = [self._owner[id(p)] == self._place for p in trained]

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        return parameter if id(parameter) in self._mine else nn.Parameter(torch.empty(0))

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `TensorLayout.clip`."""
        counted = [part for part, counts in zip(parts, self._counts, strict=True) if counts]
        return scale_to(parts, self.square(counted).sqrt(), max_norm)

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.whole`; the first rank of the pipeline alone gets it."""
        owner = self._owner[id(parameter)]
        if owner == 0 or self._place not in (0, owner):
            return part
        if self._place == owner:
            send(part.to(self._device), self._group, 0)
            return part
        found = torch.empty(parameter.shape, dtype=part.dtype, device=self._device)
        return receive(found, self._group, owner)


class StageGradients(LocalGradients):
    """Those of a rank's stages, summed after the schedule; see `Gradients`.

    Backward of several micro-batches runs within one call of torch's, so each gradient is taken as
    soon as it is there, to be summed in its own type. A schedule that computes gradients of weights
    one by one adds those up itself, in the type of the weights.
    """

    def __init__(self, trained: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(trained, dtype)
        for at, parameter in enumerate(trained):
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(lambda _, at=at: self._add(at))


def send(tensor: Tensor, group: dist.ProcessGroup, place: int) -> None:
    """Hand a tensor to the rank at a place in a group."""
    dist.send(tensor.contiguous(), dst=dist.get_global_rank(group, place), group=group)


def receive(into: Tensor, group: dist.ProcessGroup, place: int) -> Tensor:
    """Fill a tensor with what the rank at a place in a group sends; returns it."""
    dist.recv(into, src=dist.get_global_rank(group, place), group=group)
    return into
