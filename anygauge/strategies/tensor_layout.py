"""Where the parts of a model's parameters are under tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anygauge.strategies.exchanges import gathered
from anygauge.strategies.layout import GroupLayout, TensorLayout
from anygauge.strategies.tensor_division import Cut


class TensorParts(GroupLayout):
    """This rank's parts of cut parameters, laid out by another layout; see `TensorLayout`.

    Args:
        inner: of what is cut already.
        cuts: by the identity of a parameter, trained or not.
        trained: in the engine's order.
    """

    def __init__(
        self,
        inner: TensorLayout,
        cuts: Mapping[int, Cut],
        trained: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(group, device)
        self._inner = inner
        self._cuts = cuts
        self._cut = [id(parameter) in cuts for parameter in trained]

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        return self._inner.local(parameter)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `TensorLayout.shape`."""
        shape = list(self._inner.shape(parameter))
        cut = self._cuts.get(id(parameter))
        if cut is not None:
            shape[cut.dim] *= cut.count
        return tuple(shape)

    def square(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """See `TensorLayout.square`; what every rank of the group has counts once."""
        cut = [part for part, is_cut in zip(parts, self._cut, strict=True) if is_cut]
        whole = [part for part, is_cut in zip(parts, self._cut, strict=True) if not is_cut]
        total = self._inner.square(cut).to(self._device)
        dist.all_reduce(total, group=self._group)
        return total + self._inner.square(whole).to(self._device)

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.whole`."""
        mine = self._inner.whole(parameter, part).to(self._device)
        cut = self._cuts.get(id(parameter))
        return mine if cut is None else gathered(mine, self._group, cut.dim)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """See `TensorLayout.part`."""
        cut = self._cuts.get(id(parameter))
        if cut is not None:
            at = (*(slice(None),) * cut.dim, cut.place(whole.shape[cut.dim]))
            whole = whole[at]
        return self._inner.part(parameter, whole)
