"""Wrong collectives of the contract on tensors that are not plain: see `tests.testing.wrong`."""

from __future__ import annotations

import threading
from typing import Any

from tests.testing.wrong import Wrong, mutant

FOUR_MIB = 2**20
"""Elements of float32."""


def flat(tensor: Any, start: int) -> Any:
    """As many elements of the memory as the tensor has, from one on, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), start)


@mutant("what lies beyond 4 MiB is not summed", part="ranks", check="large_tensors", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        usual(tensor[:FOUR_MIB] if tensor.numel() > FOUR_MIB else tensor, op, group)
        return tensor


@mutant(
    "the second half of a large broadcast is the first",
    part="ranks",
    check="large_tensors",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        usual(tensor, source)
        if tensor.numel() > FOUR_MIB:
            tensor[FOUR_MIB:].copy_(tensor[: tensor.numel() - FOUR_MIB].clone())
        return tensor


@mutant("a gather of nothing has one part", part="ranks", check="empty_tensors", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        return usual(tensor) if tensor.numel() else [tensor.clone()]


@mutant("one rank refuses to reduce nothing", part="ranks", check="empty_tensors", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        import torch.distributed as dist

        if not tensor.numel() and dist.get_rank() == 1:
            raise RuntimeError("no elements")
        return usual(tensor, op, group) if tensor.numel() else tensor


@mutant("NaN counts as zero in sums", part="ranks", check="special_values_are_reduced", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        if tensor.is_floating_point() and op == "sum":
            tensor.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
        return usual(tensor, op, group)


@mutant(
    "infinities are gathered as the largest number",
    part="ranks",
    check="special_values_are_reduced",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        if tensor.is_floating_point():
            tensor = tensor.nan_to_num(nan=float("nan"))
        return usual(tensor)


@mutant("sizes are rounded up to 16 bytes", part="ranks", check="offset_views", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        usual(tensor, op, group)
        end = tensor.storage_offset() + tensor.numel()
        behind = tensor.untyped_storage().nbytes() // tensor.element_size() - end
        rest = min(behind, -tensor.numel() % (16 // tensor.element_size()))
        tensor.as_strided((rest,), (1,), end).zero_()
        return tensor


@mutant(
    "the start of the memory is sent, not the view", part="ranks", check="offset_views", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        usual(flat(tensor, 0), source)
        return tensor


@mutant("views are summed as their memory lies", part="ranks", check="strided_views", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        room = tensor.untyped_storage().nbytes() // tensor.element_size()
        if not tensor.is_contiguous() and tensor.storage_offset() + tensor.numel() <= room:
            usual(flat(tensor, tensor.storage_offset()), op, group)
            return tensor
        return usual(tensor, op, group)


@mutant(
    "a view that was broadcast stays as it was", part="ranks", check="strided_views", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        return usual(tensor.contiguous(), source)


@mutant("a gather works in its input", part="ranks", check="inputs_unchanged", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        parts = usual(tensor)
        tensor.copy_(parts[-1])
        return parts


@mutant("the own part of a gather is the input", part="ranks", check="inputs_unchanged", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        import torch.distributed as dist

        parts = usual(tensor)
        parts[dist.get_rank()] = tensor
        return parts


@mutant("gathers of one shape share a buffer", part="ranks", check="results_kept", base="sim")
def _(on: Wrong) -> None:
    buffers: dict[Any, Any] = {}

    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        parts = usual(tensor)
        kept = buffers.setdefault((tensor.shape, tensor.dtype), parts)
        for ours, part in zip(kept, parts, strict=True):
            ours.copy_(part)
        return kept


@mutant(
    "each rank begins its sum with its own", part="ranks", check="ranks_agree", base="sim", ranks=3
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        import torch.distributed as dist

        if op != "sum" or not tensor.is_floating_point():
            return usual(tensor, op, group)
        parts = self.all_gather(tensor)
        own = dist.get_rank()
        for part in parts[own + 1 :] + parts[:own]:
            tensor.add_(part)
        return tensor


@mutant(
    "nothing is summed in backward's thread", part="ranks", check="backward_reduces", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return tensor
        return usual(tensor, op, group)
