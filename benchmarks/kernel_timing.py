"""Timing of single operations: contenders in alternation, medians, memory, copy bandwidth."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anygauge.interface import Backend
from anygauge.kernels.choose import choose_kernels, load_kernel, unfit
from anygauge.registry import Registry
from benchmarks.ratios import paired, rotated
from benchmarks.table import TableRow

Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where operations are timed, in which type, and in how many rounds."""

    device: torch.device
    dtype: torch.dtype
    rounds: int

    def compare(
        self,
        case: str,
        contenders: Mapping[str, Callable[[], Tensor]],
        given: Sequence[Tensor],
        upstream: Tensor | None = None,
        copied: tuple[float, float] | None = None,
    ) -> list[TableRow]:
        """Time forward and backward of all contenders, round by round; a row for each.

        The figures: medians of the times; bytes of all tensors that lived at once, beyond those
        that were given; the median over rounds of the first contender's time to this one's (below
        1, the first is faster); and, with `copied`, shares of a copy's speed.

        Args:
            contenders: the first is ours. A call computes the result from `given`.
            given: leaves whose gradients are cleared before each call.
            upstream: the gradient to go back with; None: ones.
            copied: seconds that a copy of all that forward and backward must move would take.
        """
        problems: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for name, operation in contenders.items():
            try:
                with peak_bytes(self.device) as peak:
                    self._once(operation, upstream)
                peaks[name] = peak[0]
            except Exception as error:
                problems[name] = first_line(error)
            _clear(given)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in peaks}
        for round_ in range(self.rounds + 1):
            for name in rotated(list(peaks), round_):
                times[name].append(self._once(contenders[name], upstream))
                _clear(given)
        # The first round is a warm-up.
        whole = {name: [sum(pair) for pair in each[1:]] for name, each in times.items()}
        first = next(iter(contenders))
        rows = []
        for name in contenders:
            if name in problems:
                rows.append(TableRow(case=case, name=name, note=problems[name]))
                continue
            forward, backward = (median(part) for part in zip(*times[name][1:], strict=True))
            figures: dict[str, Any] = {
                "forward, ms": forward * 1e3,
                "backward, ms": backward * 1e3,
                "forward + backward, ms": (forward + backward) * 1e3,
                "memory, MiB": peaks[name] / 2**20,
                "first / its time": paired(whole.get(first, whole[name]), whole[name]).median,
            }
            if copied is not None:
                figures["of copy, forward"] = copied[0] / forward
                figures["of copy, backward"] = copied[1] / backward
            rows.append(TableRow(case=case, name=name, figures=figures))
        return rows

    def _once(
        self, operation: Callable[[], Tensor], upstream: Tensor | None
    ) -> tuple[float, float]:
        began = self._now()
        result = operation()
        between = self._now()
        gradient = torch.ones_like(result) if upstream is None else upstream
        ready = self._now()
        result.backward(gradient)
        return between - began, self._now() - ready

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def copy_bandwidth(self, elements: int) -> float:
        """Bytes read and written per second by a copy of that many elements."""
        source = torch.randn(elements, device=self.device).to(self.dtype)
        target = torch.empty_like(source)
        times = []
        for _ in range(self.rounds + 2):
            began = self._now()
            target.copy_(source)
            times.append(self._now() - began)
        return 2 * source.nbytes / median(times[2:])


def first_line(error: Exception) -> str:
    """What an error says, for a table."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _clear(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int]]:
    """Most bytes that tensors made inside held at once; in the list at the end."""
    found = [0]
    if device.type != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        yield found
        torch.accelerator.synchronize()
        found[0] = torch.accelerator.max_memory_allocated() - before
        return
    with _Living() as living:
        yield found
    found[0] = living.most


class _Living(TorchDispatchMode):
    """Bytes of storages that operations made and that still live; the host counts none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see([args, kwargs], made=False)
        result = function(*args, **(kwargs or {}))
        self._see(result, made=True)
        return result

    def _see(self, values: Any, *, made: bool) -> None:
        for tensor in (each for each in tree_leaves(values) if isinstance(each, Tensor)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            # A meta tensor has a size, and no memory.
            size = storage.nbytes() if made and not tensor.is_meta else 0

            def gone(_: Any, key: int = key, size: int = size) -> None:
                self.now -= size
                self._known.pop(key, None)

            self._known[key] = weakref.ref(storage, gone)
            self.now += size
            self.most = max(self.most, self.now)


def chosen_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the accelerator that torch sees, or the host."""
    if name != "auto":
        return torch.device(name)
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def chosen_kernel(
    operation: str, device: torch.device, name: str | None = None
) -> tuple[str, Kernel]:
    """Name and kernel of an operation that a run on this device would have.

    Args:
        name: of a kernel that the run file asks for; None for what is chosen otherwise.
    """
    registry = Registry.load()
    asked = {operation: name} if name else {}
    choices = choose_kernels(registry, _backend(registry, device), asked)
    return choices[operation].name, load_kernel(choices, operation)


def fitting_kernels(operation: str, device: torch.device) -> dict[str, Kernel]:
    """Kernels of an operation that can run on this device here, by name."""
    registry = Registry.load()
    backend = _backend(registry, device)
    specs = [each.spec for each in registry.kernels if each.spec.operation == operation]
    names = [spec.name for spec in specs if unfit(spec, backend) is None]
    return {name: chosen_kernel(operation, device, name)[1] for name in names}


def _backend(registry: Registry, device: torch.device) -> Backend:
    backends = (registry.create_backend(each.spec.name) for each in registry.backends)
    return next(each for each in backends if each.device_type == device.type)
