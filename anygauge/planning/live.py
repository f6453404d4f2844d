"""Bytes of live tensors, counted as they come and go."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from anygauge.planning.counting import Counter, tensors_of
from anygauge.planning.memory import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    KINDS,
    LOAD,
    LOGITS,
    WEIGHTS,
    Peak,
)
from anygauge.planning.quick import VIEW

if TYPE_CHECKING:
    from anygauge.planning.valueless import ValuelessOperations

DEVICE_OF = torch.ops.prim.device.default
"""What torch asks of a tensor that is not what it seems, far more often than all else."""
RECORD_STREAM = torch.ops.aten.record_stream.default


def device_of(tensor: Tensor) -> torch.device:
    """As ``tensor.device``, without an operation."""
    found = getattr(tensor, "fake_device", None)
    return tensor.device if found is None else found


@contextlib.contextmanager
def _within(mode: TorchDispatchMode) -> Iterator[None]:
    """Within it, a mode that is about to run an operation sees others again."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


Sizes = tuple[int, ...]
"""Bytes by kind, in the order of `KINDS`."""


class _Phase:
    """The most at once of one phase, outside of backward and of each operation in it."""

    def __init__(self, now: int, sizes: Sizes) -> None:
        self.outside = now, sizes
        self.backward: list[tuple[int, Sizes]] = []

    def taken(self) -> Peak:
        half = len(self.backward) // 2
        none: tuple[int, Sizes] = (0, ())
        halves = self.backward[:half], self.backward[half:]
        parts = [self.outside, *(max(h, default=none, key=lambda one: one[0]) for h in halves)]
        kinds = [{k: v for k, v in zip(KINDS, sizes, strict=False) if v} for _, sizes in parts]
        totals = [total for total, _ in parts]
        return Peak(
            total=max(totals),
            kinds=kinds[totals.index(max(totals))],
            parts=(totals[0], totals[1], totals[2]),
            kinds_of_parts=tuple(kinds),
        )


class _Count:
    """Of one type of device."""

    def __init__(self) -> None:
        self.now = 0
        self.sizes = [0] * len(KINDS)
        self.start()

    def start(self) -> None:
        """Forget peaks."""
        self.recent, self.at_recent = self.now, tuple(self.sizes)
        self.phases: dict[str, _Phase] = {}

    def add(self, kind: int, change: int) -> None:
        self.now += change
        self.sizes[kind] += change
        if self.now > self.recent:
            self.recent, self.at_recent = self.now, tuple(self.sizes)

    def move(self, before: int, kind: int, size: int) -> None:
        """Tensors turn out to be of another kind."""
        self.sizes[before] -= size
        self.sizes[kind] += size
        if self.recent == self.now:
            self.at_recent = tuple(self.sizes)

    def end_operation(self, name: str, in_backward: bool) -> None:
        phase = self.phases.get(name)
        if phase is None:
            phase = self.phases[name] = _Phase(self.recent, self.at_recent)
        if in_backward:
            phase.backward.append((self.recent, self.at_recent))
        elif self.recent >= phase.outside[0]:
            phase.outside = self.recent, self.at_recent
        if self.recent != self.now:
            self.recent, self.at_recent = self.now, tuple(self.sizes)


class LiveBytes(TorchDispatchMode):
    """Counts the storages of tensors that operations give out, until nobody has them any more.

    Memory that an operation takes for itself, and what an allocator rounds up, is not seen. A
    storage that is freed or grown in place, as FSDP's are, is counted as what it holds.

    Attributes:
        phase, kind: the current phase, and what tensors made from now on are for.
        in_backward: the kind of what backward makes from now on.
        counter: sees each operation, too.
        answers: run each operation; None: torch does.
        opened: operation -> what is run in its place, if anything; its operations are counted. It
            may call the operation itself, which is then run.

    Args:
        devices: types of the devices whose tensors are counted.
    """

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.phase, self.kind = LOAD, WEIGHTS
        self.in_backward = ACTIVATIONS
        self.counter: Counter | None = None
        self.answers: ValuelessOperations | None = None
        self.opened: Callable[[Any], Callable[..., Any] | None] = lambda func: None
        self._open: Any = None
        self._counts = {device: _Count() for device in devices}
        self._storages: dict[int, tuple[_Count, int, int]] = {}
        self._resize = torch.UntypedStorage.resize_

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs as much as the rest

    def __enter__(self) -> LiveBytes:
        resize, see = self._resize, self._see

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                see(storage, self._storages[storage._cdata][0])
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at what it gives out."""
        if func is DEVICE_OF:
            return device_of(args[0])
        if func is RECORD_STREAM and self.answers is not None:
            return None  # there are no streams
        kwargs = kwargs or {}
        opened = self.opened(func)
        if opened is not None and func is not self._open:
            before, self._open = self._open, func
            try:
                with _within(self):
                    return opened(*args, **kwargs)
            finally:
                self._open = before
        recipe = None
        if self.answers is None:
            result = func(*args, **kwargs)
        else:
            result, recipe = self.answers.run(func, args, kwargs)
        in_backward = torch._C._current_graph_task_id() >= 0
        if in_backward:
            self.phase, self.kind = BACKWARD, self.in_backward
        elif self.phase == BACKWARD:
            self.kind = GRADIENTS  # which are added up
        if recipe is VIEW and args[0].untyped_storage()._cdata in self._storages:
            for one in self._counts.values():
                one.end_operation(self.phase, in_backward)
            return result
        if self.counter is not None:
            kept = None if recipe is None else recipe.counted
            self.counter.see(func, args, kwargs, result, kept)
        for value in result if isinstance(result, tuple | list) else (result,):
            # What wraps other tensors, as DTensor, has no memory but theirs, and says otherwise.
            if isinstance(value, Tensor) and (
                recipe is not None or not is_traceable_wrapper_subclass(value)
            ):
                count = self._counts.get(device_of(value).type)
                if count is not None:
                    self._see(value.untyped_storage(), count)
        if func.namespace in _EXCHANGED:
            self._exchanged(func, args, kwargs or {})
        elif func is _JOINED:
            self._joined(args[0], result)
        for count in self._counts.values():
            count.end_operation(self.phase, in_backward)
        return result

    def now(self, device: str) -> int:
        """Bytes that are live."""
        return self._counts[device].now

    def take_peaks(self, device: str) -> dict[str, Peak]:
        """The most of each phase since the last call; a new peak starts from what is live."""
        count = self._counts[device]
        count.end_operation(self.phase, False)
        found = {name: phase.taken() for name, phase in count.phases.items()}
        count.start()
        return found

    def take_peak(self, device: str) -> Peak:
        """The most of all phases."""
        return max(self.take_peaks(device).values(), key=lambda peak: peak.total)

    def assign(self, tensor: Tensor | None, kind: str, over: Sequence[str] = KINDS) -> None:
        """Say what a tensor is for, unless it is for something else than `over`."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor is None or is_traceable_wrapper_subclass(tensor):
            return
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is not None and KINDS[found[1]] in over:
            self._move(tensor.untyped_storage()._cdata, kind)

    def assign_rest(self, kind: str, to: str) -> None:
        """Say what all are for that were for something else."""
        for address, (_, before, _) in list(self._storages.items()):
            if KINDS[before] == kind:
                self._move(address, to)

    def _move(self, address: int, kind: str) -> None:
        count, before, size = self._storages[address]
        self._storages[address] = count, _PLACE[kind], size
        count.move(before, _PLACE[kind], size)

    def _exchanged(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Tell by an operation that exchanges tensors between ranks what these are for."""
        for place, kind in _EXCHANGED[func.namespace].get(func.overloadpacket.__name__, ()):
            given = kwargs.get(place) if isinstance(place, str) else args[place]
            for tensor in tensors_of(given):
                # Flat tensors that are summed are gradients; others are of a divided layer.
                if func.overloadpacket.__name__ != "allreduce_" or tensor.dim() == 1:
                    self.assign(tensor, kind, _MADE)

    def _joined(self, pieces: Sequence[Tensor], result: Tensor) -> None:
        """What is put together of gathered weights is one."""
        addresses = (piece.untyped_storage()._cdata for piece in pieces)
        if all(self._is(address, GATHERED) for address in addresses):
            self.assign(result, GATHERED, _MADE)

    def _is(self, address: int, kind: str) -> bool:
        found = self._storages.get(address)
        return found is not None and KINDS[found[1]] == kind

    def _see(self, storage: torch.UntypedStorage, count: _Count) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            _, kind, before = self._storages[address]
        else:
            kind, before = _PLACE[self.kind], 0
            weakref.finalize(storage, self._gone, address)
        self._storages[address] = (count, kind, size)
        if size != before:
            count.add(kind, size - before)

    def _gone(self, address: int) -> None:
        count, kind, size = self._storages.pop(address)
        count.add(kind, -size)


_JOINED = torch.ops.aten.cat.default
_PLACE = {kind: place for place, kind in enumerate(KINDS)}
_MADE = (GATHERED, GRADIENTS, ACTIVATIONS, LOGITS, BUFFERS)
"""Kinds of tensors that may turn out to be what is exchanged between ranks."""
_EXCHANGED: Mapping[str, Mapping[str, Sequence[tuple[int | str, str]]]] = {
    "c10d": {
        "_allgather_base_": [(0, GATHERED)],
        "allgather_": [(0, GATHERED)],
        "allgather_into_tensor_coalesced_": [(0, GATHERED)],
        "_reduce_scatter_base_": [(1, BUFFERS), (0, GRADIENTS)],
        "reduce_scatter_": [(1, BUFFERS), (0, GRADIENTS)],
        "reduce_scatter_tensor_coalesced_": [(1, BUFFERS), (0, GRADIENTS)],
        "allreduce_": [(0, GRADIENTS)],
    },
    "fsdp": {
        "all_gather_copy_in": [(1, GATHERED)],
        "split_with_sizes_copy": [("out", GATHERED)],
        "chunk_cat": [("out", BUFFERS)],
    },
}
"""Operations that strategies exchange weights and gradients by -> arguments, and what these are."""
