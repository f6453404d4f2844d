"""The backend object: a device that compiles graphs, with a limit on their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge.interface import (
    FULL,
    Backend,
    Level,
    MemoryStats,
    NotAvailableError,
    Placement,
    RunFileError,
    Support,
)
from anygauge_lazy.graph import LazyGraph

if TYPE_CHECKING:
    import torch


class LazyPlacement(Placement):
    """The one lazy device, in the host's memory."""

    pinned_memory = False

    def device_count(self) -> int:
        """There is one."""
        return 1

    def open(self, local_rank: int) -> torch.device:
        """Start torch's TorchScript backend of lazy tensors.

        Raises:
            NotAvailableError: there is no second device.
        """
        import torch
        import torch._lazy
        import torch._lazy.ts_backend

        from anygauge_lazy.operations import register

        if local_rank >= 1:
            raise NotAvailableError(
                f"local rank {local_rank} has no device: there is 1 of type 'lazy' in a process; "
                "ask for --devices 1"
            )
        if not _started():
            torch._lazy.ts_backend.init()
            register()
        self._device = torch.device(self.device_type)
        return self._device

    def synchronize(self) -> None:
        """End the graph and wait for it."""
        from anygauge_lazy.cuts import end_graph

        end_graph()

    def memory(self) -> MemoryStats:
        """Resident bytes of the process, now and at most: the device has no allocator."""
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryStats(in_use=in_use, peak=max(peak, in_use), kind="process")

    def reset_peak(self) -> None:
        """The kernel's peak of a process cannot be reset here."""

    def seed(self, seed: int) -> None:
        """Random numbers come from the host's generator."""
        import torch

        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """The host's generator alone."""
        import torch

        return {"host": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        import torch

        torch.set_rng_state(state["host"])


class LazyBackend(Backend):
    """Lazy tensors. Options: ``graph_limit`` (operations per graph; default none)."""

    name = "lazy"
    device_type = "lazy"
    placement_class = LazyPlacement
    graph_class = LazyGraph
    capabilities: Mapping[str, Support] = {
        "bfloat16": FULL,
        "float16": Support(Level.PARTIAL, "as the host computes it"),
        "collectives": Support(
            Level.UNSUPPORTED_BY_VERSION, "torch has no process group for lazy tensors"
        ),
        "zero": Support(
            Level.UNSUPPORTED_BY_VERSION,
            "torch has no process group for lazy tensors; use strategy.name: single",
        ),
        "compile": Support(
            Level.NOT_WRITTEN_YET, "the device compiles its graphs by itself already"
        ),
        "mark_step": FULL,
        "graph_limit": Support(
            Level.PARTIAL, "where backend_options.graph_limit asks for one"
        ),
        "memory_statistics": Support(
            Level.UNSUPPORTED_BY_VERSION, "resident memory of the process, without a peak to reset"
        ),
        "peak_flops": Support(Level.UNSUPPORTED_BY_HARDWARE, "as fast as the host is"),
    }

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Args: options: the run file's ``backend_options``."""
        super().__init__(options)
        for name, value in self.options.items():
            if name != "graph_limit":
                raise RunFileError(
                    f"backend_options.{name}: unknown to the lazy backend; it knows graph_limit only"
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RunFileError(
                    f"backend_options.graph_limit: {value!r} is no whole number of at least 1"
                )

    def open(self, local_rank: int = 0) -> torch.device:
        """Take the device; operations are counted from now on."""
        device = super().open(local_rank)
        self.graph.start(self.options.get("graph_limit"))
        return device

    def close(self) -> None:
        """Run what is left."""
        self.graph.stop()
        super().close()


def _started() -> bool:
    from anygauge_lazy import operations

    return operations._library is not None
