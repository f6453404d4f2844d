"""Where graphs end: on request, and when they are full."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch._lazy
import torch._lazy.metrics
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only describe memory, and what to call instead: in a dispatch mode the device has
# no views, and a copy of a lazy tensor costs a node of the graph, not memory.
_KEPT = frozenset({"aten::detach", "aten::detach_"})


class CutWhenFull(TorchDispatchMode):
    """Counts operations, and ends the graph at the limit.

    Args:
        limit: operations of a graph at most; None counts only.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view and func._schema.name not in _KEPT:
            return copied(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        self.operations += 1
        if self._limit is not None and self.operations >= self._limit:
            self.operations = 0
            end_graph()
        return result


def copied(func: Any) -> Any:
    """The operation that makes a copy where `func` makes a view."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, f"{name}_copy")
    return getattr(packet, func._overloadname)


def end_graph() -> None:
    """End the graph accumulated so far, and wait for it."""
    torch._lazy.mark_step()
    torch._lazy.wait_device_ops()


def largest_graph() -> float:
    """Nodes of the largest graph so far."""
    report = torch._lazy.metrics.metrics_report()
    found = re.search(r"Metric: TensorsGraphSize.*?Percentiles:[^\n]*100%=([\d.]+)", report, re.S)
    return float(found.group(1)) if found else 0.0


def counters() -> Mapping[str, float]:
    """Of this process so far: graphs ended, compiled and found compiled; the largest one."""
    names = torch._lazy.metrics.counter_names()
    values = {name: float(torch._lazy.metrics.counter_value(name)) for name in names}
    return {
        "graphs": values.get("MarkStep", 0.0),
        "compiled": values.get("UncachedCompile", 0.0),
        "cached": values.get("CachedCompile", 0.0),
        "host_operations": sum(v for name, v in values.items() if name.startswith("aten::")),
        "largest": largest_graph(),
    }
