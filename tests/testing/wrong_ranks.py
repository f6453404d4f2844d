"""Wrong collectives of the contract, for the kit's part `ranks`: see `tests.testing.wrong`.

What engines call is in `wrong_exchanges`, asynchronous work in `wrong_handles`, subgroups in
`wrong_groups`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from tests.testing.wrong import Wrong, mutant

FOUR_MIB = 2**20
"""Elements of float32."""


def on_card(tensor: Any) -> bool:
    """Whether it is of the simulated card: messages between hosts stay right."""
    return bool(tensor.device.type == "sim")


def flat(tensor: Any, start: int) -> Any:
    """As many elements of the memory as the tensor has, from one on, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), start)


@mutant("sums are reduced in bfloat16", part="ranks", check="all_reduce_sums", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        return tensor.copy_(usual(tensor.bfloat16(), op, group))


@mutant("sums lose the last 13 bits of float32", part="ranks", check="all_reduce_sums", base="sim")
def _(on: Wrong) -> None:
    import torch

    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        if tensor.dtype is torch.float32:
            tensor.view(torch.int32).bitwise_and_(-(2**13))
        return usual(tensor, op, group)


@mutant("what 4 does not divide is not summed", part="ranks", check="all_reduce_sums", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        part = tensor.view(-1)[: max(1, tensor.numel() // 4 * 4)]
        part.copy_(usual(part.clone(), op, group))
        return tensor


@mutant("means are of two ranks", part="ranks", check="all_reduce_means", base="sim", ranks=3)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        return usual(tensor, "sum", group).div_(2) if op == "mean" else usual(tensor, op, group)


@mutant(
    "the mean is returned, the tensor a sum", part="ranks", check="all_reduce_means", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        import torch.distributed as dist

        if op == "mean":
            return usual(tensor, "sum", group) / dist.get_world_size(group)
        return usual(tensor, op, group)


@mutant("the maximum starts at zero", part="ranks", check="all_reduce_maximum", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        found = usual(tensor, op, group)
        return found.clamp_(min=0) if op == "max" else found


@mutant("the maximum is of magnitudes", part="ranks", check="all_reduce_maximum", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        return usual(tensor.abs_() if op == "max" else tensor, op, group)


@mutant("an unknown operation is a sum", part="ranks", check="all_reduce_unknown", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        return usual(tensor, op if op in ("mean", "max") else "sum", group)


@mutant("a broadcast is a sum with zeros", part="ranks", check="broadcasts", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        import torch.distributed as dist

        if dist.get_rank() != source:
            tensor.mul_(0)
        return self.all_reduce(tensor)


@mutant("any source but 0 is the last rank", part="ranks", check="broadcasts", base="sim", ranks=3)
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        return usual(tensor, source and 2)


@mutant(
    "ranks 1 and 2 are swapped in a gather", part="ranks", check="all_gathers", base="sim", ranks=3
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        parts = usual(tensor)
        return [parts[0], parts[2], parts[1]]


@mutant("int64 is summed in float64", part="ranks", check="integers", base="sim")
def _(on: Wrong) -> None:
    import torch

    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        if tensor.dtype is torch.int64:
            return tensor.copy_(usual(tensor.double(), op, group))
        return usual(tensor, op, group)


@mutant("int64 is gathered as int32", part="ranks", check="integers", base="sim")
def _(on: Wrong) -> None:
    import torch

    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        if tensor.dtype is torch.int64:
            return [part.long() for part in usual(tensor.int())]
        return usual(tensor)


@mutant("bytes are moved in words of four", part="ranks", check="bytes_are_moved", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.broadcast")
    def broadcast(self: Any, usual: Any, tensor: Any, source: int = 0) -> Any:
        if tensor.element_size() == 1 and tensor.numel() > 4:
            usual(tensor[: tensor.numel() // 4 * 4], source)
            return tensor
        return usual(tensor, source)


@mutant("bytes saturate at 127", part="ranks", check="bytes_are_moved", base="sim")
def _(on: Wrong) -> None:
    import torch

    @on.method("collectives.all_gather")
    def all_gather(self: Any, usual: Any, tensor: Any) -> Any:
        return usual(tensor.clamp(max=127) if tensor.dtype is torch.uint8 else tensor)


@mutant("only the first barrier waits", part="ranks", check="barrier_waits", base="sim")
def _(on: Wrong) -> None:
    calls: list[None] = []

    @on.method("collectives.barrier")
    def barrier(self: Any, usual: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            usual()


@mutant("groups are opened without a limit", part="ranks", check="opened_with_limit", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.open")
    def open_groups(self: Any, usual: Any, **given: Any) -> None:
        usual(**{**given, "timeout_s": 1800.0})


@mutant(
    "each rank's patience ends by itself", part="ranks", check="patience_ends_together", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.patient")
    def patient(self: Any, usual: Any, *, then: float) -> Any:
        return contextlib.nullcontext()


@mutant(
    "sums on the host begin at the last rank",
    part="ranks",
    check="sums_on_host",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.method("collectives.sum_on_host")
    def sum_on_host(self: Any, usual: Any, values: list[float]) -> list[float]:
        return [sum(each[::-1]) for each in zip(*self.gather_objects(values), strict=True)]


@mutant("integers in objects become floats", part="ranks", check="gathers_objects", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.gather_objects")
    def gather_objects(self: Any, usual: Any, value: Any) -> Any:
        return json.loads(json.dumps(usual(value)), parse_int=float)


@mutant("objects end after 64 KiB", part="ranks", check="gathers_large_objects", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.gather_objects")
    def gather_objects(self: Any, usual: Any, value: Any) -> Any:
        return usual(value[: 2**16] if isinstance(value, str) else value)


@mutant(
    "bytes are filled up to the longest", part="ranks", check="gathers_large_objects", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("collectives.gather_bytes")
    def gather_bytes(self: Any, usual: Any, value: bytes) -> list[bytes]:
        found = usual(value)
        return [each.ljust(max(map(len, found)), b"\0") for each in found]


@mutant(
    "the control group sums integers in float32", part="ranks", check="control_group", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if on_card(tensor) or tensor.is_floating_point():
            return usual(tensor, *args, **kwargs)
        short = tensor.float()
        work = usual(short, *args, **kwargs)
        tensor.copy_(short)
        return work


# -- tensors that are not plain ---------------------------------------------------------------


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
