"""Operations by their shapes alone, for models of a size that no host could compute.

An operation runs on torch's "meta" device, which computes shapes and types; what it makes is memory
of the card that nobody writes, so that it costs the machine no pages. What comes to the host are
ones: a loss, a norm and a flag for "finite" that let a run go on. Few whole numbers do move, for
ranks compare some that come from the host.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

FEW = 2**16
_MOVES = ("aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense")
SMALL = 2**20
REGION = 2**40
MAP_NORESERVE = 0x4000
_region: Any = None


def _is_exact(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are whole numbers, and few; bytes are flags, which nobody has computed."""
    return bool(tensors) and all(
        not t.is_floating_point() and t.dtype not in (torch.bool, torch.uint8) and t.numel() <= FEW
        for t in tensors
    )


def _memory(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of the card with the shape and strides of `like`. Large ones have an address in one
    region that is never touched: the simulated cards would write all that they hand out."""
    needed = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    needed = dtype.itemsize * (needed if like.numel() else 0)
    if needed <= SMALL:
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
    storage = torch._C._construct_storage_from_data_pointer(_address(), device, needed)
    made = torch.empty(0, dtype=dtype, device=device)
    return made.set_(storage, 0, like.shape, like.stride())


@functools.cache
def _address() -> int:
    global _region
    _region = mmap.mmap(-1, REGION, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return ctypes.addressof(ctypes.c_char.from_buffer(_region))


def _number(dtype: torch.dtype, asked_by: str) -> Any:
    """Flags that DeepSpeed reads say that something overflowed, others that all is finite. Older
    releases of it read a byte."""
    if dtype is torch.bool:
        return asked_by != "deepspeed"
    return 0.0 if dtype.is_floating_point else 0


def run(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], asked_by: str = ""
) -> Any:
    """The results of an operation, none of them computed.

    Args:
        tensors: all that are among its arguments.
        asked_by: whose code runs it, where a number of it comes to the host.
    """
    name = func._schema.name
    if (func.namespace == "c10d" or name in _MOVES) and _is_exact(tensors):
        return func(*args, **kwargs)
    if func.namespace == "c10d":
        return _collective(func, args)
    if name == "aten::_local_scalar_dense":
        return _number(args[0].dtype, asked_by)
    if name == "aten::equal":
        return True
    if name in ("aten::copy_", "aten::_to_copy"):
        return _copy(name, args, kwargs)
    device = next((t.device for t in tensors if t.device.type == "hpu"), torch.device("hpu", 0))
    # Memory that an operation writes stays what it is; in meta it has a shape alone.
    given: dict[int, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in moved:
                meta = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
                moved[id(value)] = meta
                given[id(meta)] = value
            return moved[id(value)]
        return torch.device("meta") if isinstance(value, torch.device) else value

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        return _memory(value, value.dtype, device)

    # A generator belongs to its device.
    meta_kwargs = {
        name: None if isinstance(value, torch.Generator) else tree_map(to_meta, value)
        for name, value in kwargs.items()
    }
    return tree_map(back, func(*tree_map(to_meta, args), **meta_kwargs))


def _copy(name: str, args: Any, kwargs: Any) -> Any:
    if name == "aten::copy_":
        target, source = args[0], args[1]
        if target.device.type != "hpu":
            target.fill_(1)
        return target
    source = args[0]
    device = torch.device(kwargs.get("device") or source.device)
    dtype = kwargs.get("dtype") or source.dtype
    if device.type == "hpu":
        return _memory(source, dtype, device)
    return torch.ones(source.shape, dtype=dtype, device=device)


def _collective(func: Any, args: Any) -> Any:
    """Done at once; what it writes stays as it is."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    made = len(func._schema.returns) - 1
    return (*args[:made], work) if made else work
