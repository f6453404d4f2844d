"""The backend object: a device that compiles graphs, with a limit on their size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import (
    FULL,
    Backend,
    Level,
    MemoryStats,
    Placement,
    Support,
    UnsupportedError,
)
from anygauge_lazy.graph import LazyGraph
from anygauge_lazy.options import LazyOptions

if TYPE_CHECKING:
    import torch


class LazyPlacement(Placement):
    """The one lazy device of a process, in the host's memory."""

    pinned_memory = False

    def device_count(self) -> int:
        """There is one in a process."""
        return 1

    def open(self, local_rank: int) -> torch.device:
        """Make the device known to torch, and return it.

        Raises:
            NotAvailableError: there is no second device.
        """
        from anygauge_lazy.device import load

        load()
        super().open(local_rank)
        import torch

        self._device = torch.device(self.device_type)  # it has no index
        return self._device

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Only to float32, which changes nothing.

        Raises:
            UnsupportedError: to any other type.
        """
        import torch

        if dtype is not torch.float32:
            raise UnsupportedError(
                f"autocast to {dtype}: torch.autocast has no list of operations for lazy tensors; "
                "convert the model instead"
            )
        return super().autocast(dtype)

    def memory(self) -> MemoryStats:
        """Resident bytes of the process, now and at most: the device has no allocator."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":", 1) for line in lines)
        in_use, peak = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return MemoryStats(in_use=in_use, peak=max(peak, in_use), kind="process")

    def reset_peak(self) -> None:
        """Start a new peak; 5 is the kernel's number for that (proc_pid_clear_refs(5))."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class LazyBackend(Backend):
    """Lazy tensors."""

    name = "lazy"
    device_type = "lazy"
    placement_class = LazyPlacement
    graph_class = LazyGraph
    graph: LazyGraph
    options: LazyOptions
    capabilities: Mapping[str, Support] = {
        "bfloat16": FULL,
        "float16": Support(Level.PARTIAL, "as the host computes it"),
        "collectives": Support(
            Level.UNSUPPORTED_BY_VERSION,
            "torch has no process group for lazy tensors; use strategy.name: single",
        ),
        "fp8_products": Support(
            Level.NOT_WRITTEN_YET, "its graphs run on the host, in the run's type"
        ),
    }

    def __init__(self, options: LazyOptions | None = None) -> None:
        super().__init__(options or LazyOptions())
        self.graph.limit = self.options.graph_limit

    def open(self, local_rank: int = 0) -> torch.device:
        """Take the device; operations are counted from now on."""
        device = super().open(local_rank)
        self.graph.start()
        return device

    def close(self) -> None:
        """Run what is left."""
        self.graph.stop()
        super().close()
