"""Counts what a rank hands to collectives: calls and bytes, by operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
}
"""torch's operators, of c10d and functional; others are refused."""

QUIET = {"recv_", "wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}
NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")


class CollectiveBytes(TorchDispatchMode):
    """While it is entered: what goes into a reduction, an exchange or a send, what a gather gives.

    Attributes:
        calls, bytes: by operation.
        sizes: bytes of each call, in order, by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.sizes: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, operator = func._schema.name.rpartition("::")
        result = func(*args, **(kwargs or {}))
        if f"{namespace}::" in NAMESPACES and operator not in QUIET:
            name = NAMES[operator]
            self.calls[name] += 1
            size = _bytes_of(name, namespace, args, result)
            self.bytes[name] += size
            self.sizes.setdefault(name, []).append(size)
        return result


class CalledOperators(TorchDispatchMode):
    """While it is entered: the names of the operators by which ranks exchange something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.startswith(NAMESPACES):
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def _bytes_of(name: str, namespace: str, args: tuple[Any, ...], result: Any) -> int:
    """Of one call: the larger side of gathers and scatters, either side of the others."""
    if name in ("all_gather", "reduce_scatter"):
        given = [_size(one) for one in (*args, result) if _tensors(one)]
        return max(given)
    return _size(next(one for one in args if _tensors(one)))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _size(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
