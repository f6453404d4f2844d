"""What the card would compile, copy to the host and leave to the host, counted without a card.

In lazy mode operations are gathered into graphs, which end where the bridge ends them: at the
limit, at a mark, before a synchronization, an eager collective and a copy to the host. A graph is
compiled once for each key: its operators, and of every argument the type, the shape, the place
within its memory (what a slice leaves out is part of it), or the value; but numbers that the bridge
keeps as tensors of the card are no part of it. Otherwise each operation is a graph of its own, and
so is what the compiler was given.

Not modelled: which results are still needed when a graph ends, and how the card's compiler cuts a
graph further.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import habana_facts as facts
import habana_shapes
import habana_standin
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = int(os.environ.get("PT_HPU_MAX_COMPOUND_OP_SIZE") or 2**63 - 1)
WAITS = os.environ.get("PT_HPU_MAX_COMPOUND_OP_SYNC") == "1"
SHAPES = os.environ.get("HABANA_STANDIN_SHAPES") == "1"
"""Whether results are left as the memory is: their shapes are right, their values mean nothing."""

_MAKERS = {
    *("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
}
_QUIET = {
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
    *("resize_", "record_stream", "is_set_to", "_unsafe_view", "lift_fresh", "detach"),
    *("_has_compatible_shallow_copy_type", "_fused_sdp_choice", "is_pinned", "_reshape_alias"),
}
"""They change what is known of a tensor, and run nothing on the card."""
_ASKS = {"_local_scalar_dense", "equal", "is_nonzero"}
_SIZES = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    "repeat_interleave.Tensor",
}
"""The host needs the size of their result: the bridge runs them at once and reads it."""


class Census(TorchDispatchMode):
    """Sees every operation of the thread that opened the card, and of its backward passes.

    Attributes:
        new, reused: graphs that were compiled, and that ran as compiled before.
        fallbacks: operator -> how often it was left to the host.
        unproven: operator -> how often, where no source says that the card has its type.
        copies: who -> copies to the host.
    """

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self._lazy = lazy
        self.new = self.reused = 0
        self.fallbacks: Counter[str] = Counter()
        self.unproven: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._nodes: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._pending: set[int] = set()
        self._inside = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilation goes on below this mode."""
        return True

    # -- where graphs end

    def cut(self, reason: str) -> None:
        """End the growing graph."""
        if not self._nodes:
            return
        nodes, self._nodes = tuple(self._nodes), []
        self._forget()
        self._count(nodes, len(nodes), reason, reason == "limit" and WAITS)

    def _count(self, key: Any, operations: int, reason: str, waited: bool = False) -> None:
        digest = hash(key)
        is_new = digest not in self._seen
        self._seen.add(digest)
        self.new += is_new
        self.reused += not is_new
        what = "new" if is_new else "reused"
        habana_standin.record("graph", operations, what, reason, waited)

    def copied(self, what: str) -> None:
        """Count a copy to the host; the graph that it waits for ends before it."""
        self.cut(what)
        who, where = _caller()
        self.copies[who] += 1
        habana_standin.record("host_copy", who, what, where)

    @contextlib.contextmanager
    def whole(self, name: str, inputs: Sequence[Any], *values: Any) -> Iterator[list[Any]]:
        """One operation of the card, whatever the stand-in computes it with.

        Yields:
            a list that takes the results.
        """
        node = (name, tuple(self._described(each) for each in inputs), *map(str, values))
        results: list[Any] = []
        self._inside += 1
        try:
            yield results
        finally:
            self._inside -= 1
        self._add(node, results)

    @contextlib.contextmanager
    def compiled(self, region: int, inputs: Sequence[Any]) -> Iterator[None]:
        """What the compiler was given runs as one graph."""
        if self._inside:
            yield
            return
        key = (region, tuple(self._described(each) for each in inputs))
        self._forget()
        self._count(key, 1, "region")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)  # torch has its mode of fake tensors below all others
        if any(hasattr(each, "__torch_dispatch__") and _is_own(each) for each in types):
            return NotImplemented  # distributed tensors know their parts
        tensors = list(_tensors(func, args, kwargs))
        on_card = [(name, each) for name, each in tensors if each.device.type == "hpu"]
        device = kwargs.get("device")
        if not on_card and (device is None or torch.device(device).type != "hpu"):
            return func(*args, **kwargs)
        name = facts.name_of(func)
        if name in _QUIET or _is_view(func):
            return func(*args, **kwargs)
        if self._inside:
            result = self._run(func, args, kwargs, tensors)
            self._fresh(result)
            return result
        if func.namespace == "c10d":
            self.cut("collective")
            return self._run(func, args, kwargs, tensors)
        if name in _MAKERS:
            result = self._run(func, args, kwargs, tensors)
            self._fresh(result)
            return result
        if name in _ASKS:
            self.copied("item" if name == "_local_scalar_dense" else name)
            return self._run(func, args, kwargs, tensors)
        if name in ("_to_copy", "copy_"):
            moved = self._move(func, name, args, kwargs, tensors)
            if moved is not None:
                return moved
        if name in _SIZES or _has_bool_index(name, args):
            self.copied("size")
        judged = facts.verdict(func, [(n, t.dtype) for n, t in on_card], kwargs.get("dtype"))
        if judged == facts.FALLBACK:
            self.cut("fallback")
            self.fallbacks[name] += 1
            types_ = sorted({str(t.dtype).removeprefix("torch.") for _, t in on_card})
            habana_standin.record("fallback", name, types_, *_caller())
            result = self._run(func, args, kwargs, tensors)
            self._fresh(result)
            return result
        if judged == facts.UNPROVEN_TYPE:
            self.unproven[name] += 1
            habana_standin.record("unproven", name, *_caller())
        node = (name, tuple(self._key(func, args, kwargs)))
        result = self._run(func, args, kwargs, tensors)
        self._add(node, result if isinstance(result, (list, tuple)) else [result], func, args)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        if SHAPES:
            asked_by = _caller()[0] if func is torch.ops.aten._local_scalar_dense.default else ""
            return habana_shapes.run(func, args, kwargs, [t for _, t in tensors], asked_by)
        return func(*args, **kwargs)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Between host and card; None for a copy within the card."""
        source = args[0] if name == "_to_copy" else args[1]
        to = (
            torch.device(kwargs.get("device") or source.device)
            if name == "_to_copy"
            else args[0].device
        )
        if source.device.type == to.type:
            return None
        if to.type != "hpu":
            self.copied("copy")
            return self._run(func, args, kwargs, tensors)
        if source.dtype is torch.int64 and source.dim() == 2:
            habana_standin.record("rows", *source.shape)  # tokens of a micro-batch
        if name == "copy_" and _storage(args[0]) in self._pending:
            self.cut("upload")  # what is overwritten has to be there
        result = self._run(func, args, kwargs, tensors)
        self._fresh(result)
        return result

    def _add(self, node: Any, results: Sequence[Any], func: Any = None, args: Any = ()) -> None:
        if not self._lazy:
            self._forget()
            self._count(node, 1, "eager")
            return
        written = {id(each) for each in args if isinstance(each, torch.Tensor)}
        self._nodes.append(node)
        for each in results:
            if isinstance(each, torch.Tensor) and each.device.type == "hpu":
                storage = _storage(each)
                if id(each) not in written:
                    self._number(storage)
                self._pending.add(storage)
        if func is not None and func._schema.is_mutable:
            self._pending |= {
                _storage(each)
                for each in args
                if isinstance(each, torch.Tensor) and each.device.type == "hpu"
            }
        if len(self._nodes) >= LIMIT:
            self.cut("limit")

    # -- keys

    def _forget(self) -> None:
        self._numbers.clear()
        self._pending.clear()
        self._next = 0

    def _number(self, storage: int) -> None:
        """Memory that a graph has not seen: by its place in the graph, not its address."""
        self._numbers[storage] = self._next
        self._next += 1

    def _fresh(self, result: Any) -> None:
        """What was made outside the graph is an input; its memory may have been another's."""
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.Tensor) and each.device.type == "hpu":
                self._numbers.pop(_storage(each), None)
                self._pending.discard(_storage(each))

    def _key(self, func: Any, args: Sequence[Any], kwargs: Any) -> Iterator[Any]:
        numbers = facts.tensor_numbers(func)
        arguments = func._schema.arguments
        named = [(arguments[at].name, value) for at, value in enumerate(args)]
        for name, value in (*named, *sorted(kwargs.items())):
            if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
                if name == "alpha":  # another than 1 is a product more
                    yield name, value == 1
                    continue
                if name in numbers:
                    yield name, type(value).__name__
                    continue
            yield name, self._described(value)

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "hpu":
                return ("host", str(value.dtype), tuple(value.shape))
            storage = _storage(value)
            first = storage not in self._numbers
            if first:
                self._number(storage)
            return (
                self._numbers[storage],
                value.untyped_storage().nbytes() if first else 0,
                str(value.dtype),
                tuple(value.shape),
                value.stride(),
                value.storage_offset(),
            )
        if isinstance(value, (list, tuple)):
            return tuple(self._described(each) for each in value)
        return str(value)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_own(kind: type) -> bool:
    """Whether a class of tensors dispatches by itself; parameters and buffers do not."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and not issubclass(
        kind, torch.nn.Parameter
    )


def _tensors(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    arguments = func._schema.arguments
    for at, value in enumerate(args):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield arguments[at].name, each
            elif isinstance(each, (list, tuple)):
                yield from ((arguments[at].name, t) for t in each if isinstance(t, torch.Tensor))
    for name, value in kwargs.items():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield name, each


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _has_bool_index(name: str, args: Any) -> bool:
    return name in ("index.Tensor", "index_put_", "index_put") and any(
        isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in args[1]
    )


_ROOTS = {
    "deepspeed": "deepspeed",
    "anygauge": "anygauge",
    "anygauge_hpu": "anygauge",
    "anygauge_kernels": "anygauge",
}


@functools.cache
def _whose(file: str) -> str | None:
    for package, who in _ROOTS.items():
        origin = getattr(sys.modules.get(package), "__file__", None)
        if origin and Path(file).is_relative_to(Path(origin).parent):
            return who
    return None


def _caller() -> tuple[str, str]:
    """Whose code asks (anygauge, deepspeed or other), and the nearest line of it."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        who = _whose(file)
        if who is not None:
            return who, f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "other", ""
