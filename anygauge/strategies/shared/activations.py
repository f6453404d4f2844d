"""Keeps in the host's memory what layers need between forward and backward.

Autograd hands each tensor that it keeps to a pair of hooks. A storage goes to the host once,
however many tensors are views of it, and comes back once. Copies are made in the order of the
computation: a buffer that is used again is written after what it held has come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anygauge.interface import HOST_DEVICE, Placement
from anygauge.strategies.shared.materialize import decoder_layers

MIN_BYTES = 1024
"""Bytes; what is smaller is not worth a copy. That of torchtune and TRL."""


class HostBuffers:
    """Memory of the host that is used again, in sizes that are powers of two.

    Args:
        pinned: it is pinned, so that the host need not wait for copies.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.made = 0
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """Bytes, (at least `size`,) uint8."""
        rounded = 1 << (size - 1).bit_length()
        free = self._free.get(rounded)
        if free:
            return free.pop()
        self.made += 1
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self.pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class _Stored:
    """A storage's content on the host; it lives as long as autograd keeps a view of it.

    Args:
        whole: the storage, as one row of numbers.
        source: while it is held, no other storage has the same address.
    """

    def __init__(self, whole: Tensor, source: StorageWeakRef, buffers: HostBuffers) -> None:
        self._source = source
        self._buffers = buffers
        self._device = whole.device
        self._buffer = buffers.take(whole.nbytes)
        self._host = self._buffer[: whole.nbytes].view(whole.dtype)
        self._host.copy_(whole, non_blocking=buffers.pinned)
        self._back: Tensor | None = None

    def view(self, *place: Any) -> Tensor:
        """A view of the same on the device: what `as_strided` takes."""
        if self._back is None:
            self._back = torch.empty_like(self._host, device=self._device)
            self._back.copy_(self._host, non_blocking=self._buffers.pinned)
        return self._back.as_strided(*place)

    def __del__(self) -> None:
        # Not counted in `unpack`: whoever retains a graph unpacks more than once.
        if hasattr(self, "_buffer"):
            self._buffers.give_back(self._buffer)


class Offload:
    """Moves what autograd keeps of layers, weights and small tensors aside.

    Args:
        placement: of an opened device.
    """

    def __init__(self, placement: Placement) -> None:
        on_host = placement.device.type == HOST_DEVICE
        self.buffers = HostBuffers(pinned=placement.pinned_memory and not on_host)
        self._device = placement.device
        self._stored: WeakValueDictionary[tuple[Any, ...], _Stored] = WeakValueDictionary()
        self._weights: set[int] = set()

    def wrap(self, layer: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` of a layer: what autograd keeps of it goes to the host."""

        @functools.wraps(call)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            # Now: an engine that shards weights has gathered those of this layer.
            self._weights = {
                plain.untyped_storage()._cdata for p in layer.parameters() for plain in _parts_of(p)
            }
            with saved_tensors_hooks(self._pack, lambda packed: packed()):
                return call(*args, **kwargs)

        return offloaded

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Pack a tensor that autograd keeps; returns what gives it back."""
        if isinstance(tensor, nn.Parameter):
            return lambda: tensor
        if is_traceable_wrapper_subclass(tensor):
            return self._pack_parts(tensor)
        storage = tensor.untyped_storage()
        if (
            tensor.device != self._device
            or storage.nbytes() < MIN_BYTES
            or storage._cdata in self._weights
            # Of an engine that gathers weights one by one, within the layer.
            or isinstance(tensor._base, nn.Parameter)
        ):
            # An operation's own result would keep the operation, and that its result.
            own = tensor.detach()
            return lambda: own
        source = StorageWeakRef(storage)
        key = (source.cdata, tensor._version, tensor.dtype)
        stored = self._stored.get(key)
        if stored is None:
            numbers = storage.nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((numbers,), (1,), 0)
            stored = self._stored[key] = _Stored(whole, source, self.buffers)
        return functools.partial(
            stored.view, tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    def _pack_parts(self, tensor: Any) -> Callable[[], Tensor]:
        """Pack a tensor made of others, such as a DTensor."""
        kind, shape, stride = type(tensor), tensor.shape, tensor.stride()
        names, context = tensor.__tensor_flatten__()
        parts = {name: self._pack(getattr(tensor, name)) for name in names}

        def back() -> Tensor:
            found = {name: part() for name, part in parts.items()}
            whole: Tensor = kind.__tensor_unflatten__(found, context, shape, stride)
            return whole

        return back


def _parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors that one is made of; of most, itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts_of(getattr(tensor, name))
    else:
        yield tensor


def offload_activations(model: nn.Module, placement: Placement) -> Offload:
    """Have decoder layers keep on the host what they keep for backward."""
    offload = Offload(placement)
    layers: list[Any] = list(decoder_layers(model))
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            # Outside of the recomputed part, of which torch itself keeps the inputs alone.
            again = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = offload.wrap(layer, again)
        else:
            layer.forward = offload.wrap(layer, layer.forward)
    return offload
