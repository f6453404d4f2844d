"""Counts what operations compute, read, write and send, as they are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from anygauge.planning.work import Work

COLLECTIVES = {
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
}
"""Operation of ``c10d`` -> its name, and the argument with the bytes; what comes in was sent."""

FUNCTIONAL = {
    "all_gather_into_tensor": ("all_gather", None),
    "all_gather_into_tensor_coalesced": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
}
"""The same of ``_c10d_functional``; None: the result has the bytes."""

UNTOUCHED = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
}
"""Operations that make room or say what there is, and touch none of it."""
_ATTENDED = ("query", "key", "value")
_HOST_ATTENTION: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop_count,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop_count,
}
"""Operation -> its products' FLOPs, given the shapes of gradient, if any, query, key and value."""
EMBEDDING = torch.ops.aten.embedding.default
COPY = torch.ops.aten.copy_.default


class Counter:
    """Sees operations, and says what they came to.

    Args:
        device: type of the device whose operations count; collectives count on all.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.figures: dict[tuple[Any, ...], float] = {}

    def see(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        kept: list[Any] | None = None,
    ) -> None:
        """Count an operation that is done.

        Args:
            kept: the same list for all that come to the same; what they come to is kept in it.
        """
        if not kept:
            others, self.figures = self.figures, {}
            self._see(func, args, kwargs, result)
            found, self.figures = self.figures, others
            if kept is not None:
                kept.append(found)
        else:
            found = kept[0]
        for key, value in found.items():
            self._add(key, value)

    def _see(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, result)
            return
        if func.is_view or func.namespace != "aten" or func.overloadpacket.__name__ in UNTOUCHED:
            return
        touched: tuple[Any, ...] = (args, kwargs, result)
        if func is EMBEDDING:  # of its table it reads as much as it writes
            touched = (result, result)
        elif func is COPY:  # what was there is not read
            touched = (args[1:], kwargs, result)
        here, away = self._sizes(touched)
        if away and here:
            self._add(("copied_bytes",), here)
        elif away:
            self._add(("host_bytes",), away)
            return
        size = here
        self._add(("operations",), 1)
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if func.overloadpacket in _HOST_ATTENTION:
            self._attention(func, args, kwargs)
            formula = None  # torch has one since 2.15; it knows of no causal mask
        if formula is None:
            self._add(("other_bytes",), size)
            return
        made = result[0] if isinstance(result, tuple | list) else result
        self.multiply(made.dtype, formula(*args, **kwargs, out_val=result))
        self._add(("matrix_bytes",), size)

    def _attention(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Count that of a host.

        Its kernels leave out what a causal mask hides, half of the products.
        """
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        shapes = [given[name].shape for name in ("grad_out", *_ATTENDED) if name in given]
        formula = _HOST_ATTENTION[func.overloadpacket]
        flops = formula(*shapes) / (2 if given.get("is_causal") else 1)
        self.multiply(given["query"].dtype, flops)

    def multiply(self, dtype: torch.dtype, flops: float) -> None:
        """Count the matrix products of what is no single operation."""
        self._add(("flops", str(dtype).removeprefix("torch.")), flops)

    def taken(self) -> Work:
        """What was counted since the last call."""
        figures = {**Work.none().flat(), **self.figures}
        self.figures = {}
        return Work.of_flat(figures)

    def _add(self, key: tuple[Any, ...], value: float) -> None:
        self.figures[key] = self.figures.get(key, 0) + value

    def _sizes(self, values: Any) -> tuple[int, int]:
        """Bytes on the device, and on others; numbers alone are not counted."""
        here = away = 0
        for tensor in tensors_of(values):
            found = getattr(tensor, "fake_device", None) or tensor.device
            size = tensor.numel() * tensor.element_size()
            if found.type == self._device:
                here += size
            elif tensor.dim():
                away += size
        return here, away

    def _collective(self, func: Any, args: Any, result: Any) -> None:
        functional = func.namespace != "c10d"
        known = (FUNCTIONAL if functional else COLLECTIVES).get(func.overloadpacket.__name__)
        if known is None:
            return
        operation, place = known
        payload = result if place is None else args[place]
        size = sum(t.numel() * t.element_size() for t in tensors_of(payload))
        group = _group(func, args, functional)
        if len(group) > 1:
            # torch's functional collectives are waited for where their result is used: at once.
            self._add(("times", operation, group, functional), 1)
            self._add(("bytes", operation, group, functional), size)


class Seen(TorchDispatchMode):
    """Within it a counter sees the operations of real tensors."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation, and have it counted."""
        result = func(*args, **(kwargs or {}))
        self._counter.see(func, args, kwargs or {}, result)
        return result


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in arguments, or in what an operation gives out."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_of(value)


def _group(func: Any, args: Any, functional: bool) -> tuple[int, ...]:
    """Ranks of the group that an operation is over, as the job numbers them."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if functional and argument.name == "group_name":
            group: Any = torch._C._distributed_c10d._resolve_process_group(value)
            return tuple(dist.get_process_group_ranks(group))
        if not functional and argument.name == "process_group":
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return ()
