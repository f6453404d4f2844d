"""Counts what operations compute, read and write, as they are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from anygauge.planning.work import Work

UNTOUCHED = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
"""Operations that make room or say what there is, and touch none of it."""
EMBEDDING = torch.ops.aten.embedding.default
COPY = torch.ops.aten.copy_.default


class Counter:
    """Sees operations, and says what they came to."""

    def __init__(self) -> None:
        self.flops: dict[str, float] = {}
        self.matrix_bytes = self.other_bytes = 0.0
        self.operations = 0

    def see(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation that is done."""
        if func.is_view or func.namespace != "aten" or func.overloadpacket.__name__ in UNTOUCHED:
            return
        touched: tuple[Any, ...] = (args, kwargs, result)
        if func is EMBEDDING:  # of its table it reads as much as it writes
            touched = (result, result)
        elif func is COPY:  # what was there is not read
            touched = (args[1:], kwargs, result)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(touched))
        self.operations += 1
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if formula is None:
            self.other_bytes += size
            return
        made = result[0] if isinstance(result, tuple | list) else result
        self.multiply(made.dtype, formula(*args, **kwargs, out_val=result))
        self.matrix_bytes += size

    def multiply(self, dtype: torch.dtype, flops: float) -> None:
        """Count the matrix products of what is no single operation."""
        name = str(dtype).removeprefix("torch.")
        self.flops[name] = self.flops.get(name, 0.0) + flops

    def work(self) -> Work:
        """All of it."""
        return Work(
            flops=dict(self.flops),
            matrix_bytes=self.matrix_bytes,
            other_bytes=self.other_bytes,
            operations=self.operations,
        )


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
