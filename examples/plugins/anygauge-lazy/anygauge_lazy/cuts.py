"""Where graphs end: on request, and when they are full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._lazy
import torch._lazy.metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = "lazy"


class CutWhenFull(TorchDispatchMode):
    """Counts the device's operations, and ends the graph at the limit.

    Args:
        limit: operations of a graph at most.

    Attributes:
        largest: operations of the largest graph so far.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._operations = 0
        self._ends = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_new(result, args):
            # A mode stands below the layer that gives the device's tensors views that can be
            # written through. What comes onto the device here has missed it.
            result = torch._to_functional_tensor(result)
        if self._ends != _ends:  # somebody else has ended the graph
            self._operations, self._ends = 0, _ends
        if not _ending and (_on_device(result) or _on_device(args)):
            self._operations += 1
            self.largest = max(self.largest, self._operations)
            if self._operations >= self._limit:
                end_graph()
        return result


def _is_new(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation has put a tensor onto the device, from the host or out of nothing."""
    return (
        isinstance(result, torch.Tensor)
        and result.device.type == DEVICE
        and not torch._is_functional_tensor(result)
        and not _on_device(args)
    )


def _on_device(values: Any) -> bool:
    """Whether any tensor among them is on the device: others are not part of a graph."""
    return any(
        isinstance(each, torch.Tensor) and each.device.type == DEVICE
        for each in tree_leaves(values)
    )


_ending = False
_ends = 0


def end_graph() -> None:
    """End the graph accumulated so far, and wait for it."""
    global _ending, _ends
    _ends += 1
    _ending = True  # torch runs operations of its own meanwhile, which must not end it once more
    try:
        torch._lazy.mark_step()
        torch._lazy.wait_device_ops()
    finally:
        _ending = False


def counters() -> Mapping[str, float]:
    """Of this process so far: graphs ended, compiled, found compiled; operations of the host."""
    names = torch._lazy.metrics.counter_names()
    values = {name: float(torch._lazy.metrics.counter_value(name)) for name in names}
    return {
        "graphs": values.get("MarkStep", 0.0),
        "compiled": values.get("UncachedCompile", 0.0),
        "cached": values.get("CachedCompile", 0.0),
        "host_operations": sum(v for name, v in values.items() if name.startswith("aten::")),
    }
