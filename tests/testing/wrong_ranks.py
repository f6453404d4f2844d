"""Wrong collectives of the contract, for the kit's part `ranks`: see `tests.testing.wrong`.

Tensors that are not plain are in `wrong_tensors`, what engines call is in `wrong_exchanges`,
asynchronous work in `wrong_handles`; subgroups are in `wrong_groups`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
from typing import Any

from tests.testing.wrong import Wrong, mutant


def on_card(tensor: Any) -> bool:
    """Whether it is of the simulated card: messages between hosts stay right."""
    return bool(tensor.device.type == "sim")


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
        everyone = zip(*self.gather_objects(values), strict=True)
        return [functools.reduce(operator.add, reversed(each)) for each in everyone]


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


@mutant("a rank's device does not close", part="ranks", check="ends_on_ranks", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.close")
    def close(self: Any, usual: Any) -> None:
        usual()
        if os.environ["RANK"] == "1":
            raise RuntimeError("the driver is gone")
