"""Opens a share of the host's cores as a device, and answers for its memory and arithmetic."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.interface import MemoryStats, NotAvailableError, Placement, file_text
from anygauge_cpu.environment import CORES_VARIABLE, THREADS_VARIABLE
from anygauge_cpu.probe import memory_limit, resident_bytes

if TYPE_CHECKING:
    import torch

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets that multiply bfloat16, as /proc/cpuinfo names them (the last one is Arm's)."""

CLEAR_REFS = Path("/proc/self/clear_refs")


def hardware_dtypes(root: Path = Path("/")) -> frozenset[str]:
    """Types that the processor computes in without emulation; not all are worth choosing."""
    flags: set[str] = set()
    for line in file_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
    return frozenset({"float32", "bfloat16"} if flags & _BFLOAT16_FLAGS else {"float32"})


class CpuPlacement(Placement):
    """The host's memory, and the cores that the environment gave to this rank."""

    pinned_memory = False
    # Of torch's DefaultCPUAllocator, which has no exception of its own.
    out_of_memory_texts = ("can't allocate memory", "not enough memory")

    _affinity_before: set[int] | None = None
    _threads_before: int | None = None
    _peak_note = ""

    # -- opening ---------------------------------------------------------------------------

    def open(self, local_rank: int) -> torch.device:
        """Bind this process to its cores, if it was given any, and return the device."""
        cores = os.environ.get(CORES_VARIABLE)
        if cores:
            self._bind(cores)
        # Only now: threads that torch starts take over the binding.
        import torch

        # Without an index: DeepSpeed and gloo know the host's memory by its bare name only.
        self._device = torch.device(self.device_type)
        return self._device

    def close(self) -> None:
        """Give the other cores back to this process."""
        if self._affinity_before is not None:
            _set_affinity(self._affinity_before)
            self._affinity_before = None
        if self._threads_before is not None:
            import torch

            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        super().close()

    def device_count(self) -> int:
        """Cores this process may use: the most ranks that can have one of their own."""
        return len(os.sched_getaffinity(0))

    def _bind(self, text: str) -> None:
        before = os.sched_getaffinity(0)
        try:
            cores = {int(part) for part in text.split(",")}
            _set_affinity(cores)
        except (ValueError, OSError) as error:
            raise NotAvailableError(
                f"{CORES_VARIABLE}={text}: cannot bind to these cores ({error}); this process may "
                f"use {','.join(map(str, sorted(before)))}. Unset the variable, or set the backend "
                "option bind_cores to false"
            ) from error
        self._affinity_before = before
        # Torch reads the variable itself, and a user's own number of threads must win.
        if not os.environ.get(THREADS_VARIABLE):
            import torch

            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(len(cores))

    # -- memory ----------------------------------------------------------------------------

    def memory(self) -> MemoryStats:
        """Resident bytes of this process: tensors, libraries and everything else."""
        in_use, peak = resident_bytes()
        return MemoryStats(
            in_use=in_use,
            peak=max(peak, in_use),
            limit=memory_limit(),
            kind="process" + self._peak_note,
        )

    def reset_peak(self) -> None:
        """Start a new peak; where the kernel refuses, `memory` says so in its kind."""
        self._peak_note = ""
        try:
            # Resets VmHWM to VmRSS (proc(5), since Linux 4.0).
            CLEAR_REFS.write_text("5")
        except OSError as error:
            self._peak_note = f", peak since its start ({CLEAR_REFS}: {error.strerror})"

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the host could not give more memory."""
        return isinstance(error, MemoryError) or super().is_out_of_memory(error)


def _set_affinity(cores: set[int]) -> None:
    """Bind every thread of this process: torch may have started some before."""
    os.sched_setaffinity(0, cores)
    for thread in Path("/proc/self/task").iterdir():
        # A thread that ended meanwhile needs no binding.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
