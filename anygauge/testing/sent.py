"""Counts what a rank hands to collectives: calls and bytes, by operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SPELLED = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_coalesced",
    "all_gather": "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_coalesced",
    "reduce_scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced",
    "reduce": "reduce_",
    "broadcast": "broadcast_ broadcast",
    "all_to_all": "alltoall_base_ alltoall_ all_to_all_single",
    "send": "send",
}
NAMES = {operator: name for name, spelled in _SPELLED.items() for operator in spelled.split()}
"""torch's operators, of c10d and functional; others have their own name."""
QUIET = {"recv_", "wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}
NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")


class CollectiveBytes(TorchDispatchMode):
    """While it is entered: what goes into a reduction, an exchange or a send, what a gather gives.

    Attributes:
        calls, bytes: by operation.
        sizes: bytes of each call, in order, by operation.
        operators: torch's names of all that was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.sizes: dict[str, list[int]] = {}
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and count what it is given."""
        result = func(*args, **(kwargs or {}))
        operator = func._schema.name
        if operator.startswith(NAMESPACES):
            self.operators.add(operator)
            self._count(operator.rpartition("::")[2], (*args, result))
        return result

    def _count(self, operator: str, given: Any) -> None:
        """The larger side of gathers and scatters, the first of others."""
        sides = [[leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in given]
        sizes = [sum(each.numel() * each.element_size() for each in side) for side in sides if side]
        if operator not in QUIET and sizes:
            name = NAMES.get(operator, operator)
            size = max(sizes) if name in ("all_gather", "reduce_scatter") else sizes[0]
            self.calls[name] += 1
            self.bytes[name] += size
            self.sizes.setdefault(name, []).append(size)
