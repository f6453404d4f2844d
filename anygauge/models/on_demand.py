"""Tensors by name that are made when they are asked for, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class OnDemand(Mapping[str, Tensor]):
    """A mapping whose values are made at each look, so that one at a time is in memory.

    Args:
        makers: name -> what makes its tensor.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, made now."""
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        """Names, in their order."""
        return iter(self._makers)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._makers)
