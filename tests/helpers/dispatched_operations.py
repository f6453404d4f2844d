"""What a computation dispatches, as a device that compiles graphs would key it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

VIEW = ("aten::slice", "aten::narrow", "aten::select", "aten::split", "aten::as_strided")
"""Operations that say where in a tensor they look."""

TRIANGLES = frozenset({"aten::tril", "aten::tril_", "aten::triu", "aten::triu_", "aten::eye"})
"""Operations that few devices have for truths."""


class Operations(TorchDispatchMode):
    """Records operations in graphs, which `mark_step` ends.

    Attributes:
        graphs: of each graph its operations, in order: (name, arguments), where a tensor is its
            shape, type and place in its memory, and all else is what it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[list[tuple[str, str]]] = [[]]

    def mark_step(self, *phase: Any) -> None:
        """End a graph."""
        self.graphs.append([])

    def names(self) -> set[str]:
        """Of all operations, without their overloads: ``aten::mm``."""
        return {name.partition(".")[0] for graph in self.graphs for name, _ in graph}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.graphs[-1].append((function.name(), str(tree_map(_keyed, (args, kwargs)))))
        return function(*args, **kwargs)


def _keyed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), value.dtype, value.stride(), value.storage_offset()
