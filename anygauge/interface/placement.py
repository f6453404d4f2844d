"""Where tensors live.

The defaults of `Placement` serve every device that PyTorch knows as a device module
(``torch.get_device_module``); a backend overrides what its device does otherwise. Nothing here
touches a device before `open`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface.profiler import profile_with_torch, record_memory_history
from anygauge.util.errors import NotAvailableError

if TYPE_CHECKING:
    import torch

__all__ = ["HOST_DEVICE", "MemoryStats", "PeakFlops", "Placement"]

HOST_DEVICE = "cpu"
"""Torch's name for the memory of the host: not a backend, but where files are read into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStats:
    """Bytes as the device's own allocator counts them (process memory where there is none).

    Attributes:
        in_use: held by live tensors now.
        peak: the most since the last `Placement.reset_peak`.
        reserved: taken from the device, live or cached; None where not counted.
        limit: what the process may take in all; None where unknown, or where there is no such
            limit, as the device moves to the host what it has no room for.
        kind: what was counted, in words: ``allocator`` or ``process``.
    """

    in_use: int
    peak: int
    reserved: int | None = None
    limit: int | None = None
    kind: str = "allocator"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFlops:
    """A published peak rate: dense multiply-adds counted as two operations, per second."""

    value: float
    source: str


class Placement:
    """Opens one device for one process, and answers everything about it."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._device: torch.device | None = None
        self._limit: int | None = None

    # -- opening ---------------------------------------------------------------------------

    def open(self, local_rank: int) -> torch.device:
        """Take the device of this local rank for this process, and return it.

        Raises:
            NotAvailableError: there is no such device, or it cannot be opened.
        """
        import torch

        count = self.device_count()
        if local_rank >= count:
            raise NotAvailableError(
                f"local rank {local_rank} has no device: {count} of type {self.device_type!r} are "
                f"visible to this process; ask for at most --devices {count}"
            )
        self._module().set_device(local_rank)
        self._device = torch.device(self.device_type, local_rank)
        return self._device

    def close(self) -> None:
        """Give the device back. Called once, also after a failure."""
        self._device = None

    @property
    def is_open(self) -> bool:
        """Whether a device is open: some answers are known only then."""
        return self._device is not None

    @property
    def device(self) -> torch.device:
        """The opened device.

        Raises:
            RuntimeError: `open` was not called.
        """
        if self._device is None:
            raise RuntimeError(f"the {self.device_type!r} device is not open: call open() first")
        return self._device

    def device_count(self) -> int:
        """Devices visible to this process (imports torch)."""
        return int(self._module().device_count())

    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device_type)

    # -- moving data -----------------------------------------------------------------------

    pinned_memory = True
    """Whether host tensors are pinned before they are copied to the device."""

    def to_device(self, batch: Any) -> Any:
        """Copy a tensor, or each tensor in a mapping, to the opened device."""
        import torch

        if isinstance(batch, torch.Tensor):
            if self.pinned_memory and batch.device.type == HOST_DEVICE:
                # Torch does not pin what is expanded: several elements of it are one place.
                batch = batch.contiguous().pin_memory()
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: self.to_device(value) for key, value in batch.items()}
        return batch

    def pin(self, batch: Any) -> Any:
        """Put a host tensor, or each tensor in a mapping, where `to_device` copies from without
        waiting. Any thread may call it: batches are prepared in one of their own."""
        import torch

        if isinstance(batch, Mapping):
            return {key: self.pin(value) for key, value in batch.items()}
        if not (isinstance(batch, torch.Tensor) and self.pinned_memory):
            return batch
        # Each thread begins with the first device of the machine, which may be another rank's.
        self._module().set_device(self.device)
        return batch.pin_memory()

    def synchronize(self) -> None:
        """Wait until the device has done all work given to it."""
        self._module().synchronize()

    @property
    def works_ahead(self) -> bool:
        """Whether the host can give the device the next step before this one is done, and wait for
        this one's numbers alone. The loop then reads them while the next step runs; otherwise at
        once. Takes events, and pinned memory: a copy into other memory waits for all work."""
        return self.pinned_memory and hasattr(self._module(), "Event")

    def event(self) -> Any:
        """Where `works_ahead`: a new event that measures time, as ``torch.cuda.Event`` does, with
        `record`, `synchronize` and `elapsed_time`. A wait for it should block, not spin: the
        supervisor takes a busy processor for progress."""
        return self._module().Event(enable_timing=True)

    # -- memory ----------------------------------------------------------------------------

    def memory(self) -> MemoryStats:
        """What this process holds on the device, in bytes."""
        module = self._module()
        if self._limit is None and hasattr(module, "mem_get_info"):
            self._limit = module.mem_get_info()[1]  # a call of the driver's, whose answer stays
        # Torch's three functions make all of these statistics anew, each to give one.
        stats = module.memory_stats() if hasattr(module, "memory_stats") else {}
        if "allocated_bytes.all.peak" in stats:
            in_use, peak = (stats[f"allocated_bytes.all.{when}"] for when in ("current", "peak"))
            reserved = stats["reserved_bytes.all.current"]
        else:
            in_use, peak = module.memory_allocated(), module.max_memory_allocated()
            reserved = module.memory_reserved() if hasattr(module, "memory_reserved") else None
        return MemoryStats(in_use=in_use, peak=peak, reserved=reserved, limit=self._limit)

    def reset_peak(self) -> None:
        """Start a new peak from what is in use now."""
        self._module().reset_peak_memory_stats()

    def utilization(self) -> Mapping[str, float]:
        """How busy the opened device is, where it can tell; called every few seconds.

        Names end in their unit: ``utilization_percent``, ``power_w``, ``temperature_c``.
        """
        return {}

    out_of_memory_texts: tuple[str, ...] = ()
    """What a `RuntimeError` says where the device's memory is exhausted, and no allocator of
    torch's raised `torch.OutOfMemoryError`."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that the device's memory is exhausted."""
        import torch

        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError)
            and any(text in str(error) for text in self.out_of_memory_texts)
        )

    # -- looking inside --------------------------------------------------------------------

    @contextlib.contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        """Record what the device and the host do within, and write it into a folder: a timeline,
        and what memory held. By torch's profiler, and the device's allocator where it can.

        A vendor that has its own profiler starts that; its files may have other names.

        Args:
            folder: exists, and is this rank's alone.
        """
        with record_memory_history(self._module(), folder), profile_with_torch(self, folder):
            yield

    # -- randomness ------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed the host's and the device's generators."""
        import torch

        torch.manual_seed(seed)
        if self.device_type != HOST_DEVICE:  # its generator is the host's
            self._module().manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """States of the host's and the device's generators, as byte tensors on the host."""
        import torch

        states = {"host": torch.get_rng_state()}
        if self.device_type != HOST_DEVICE:
            states["device"] = self._module().get_rng_state()
        return states

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        import torch

        torch.set_rng_state(state["host"])
        if self.device_type != HOST_DEVICE:
            self._module().set_rng_state(state["device"])

    # -- arithmetic ------------------------------------------------------------------------

    float32_product_bits = 24
    """Significant bits that a product of float32 matrices keeps of its factors. A device that
    shortens them says so here: 11 for TF32, 8 for bfloat16. Sums are float32 in any case."""

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """Torch's autocast for this device; does nothing for float32.

        For a loop of one's own: a run computes in the type that its weights have.

        Raises:
            UnsupportedError: by a device that has no autocast to this type; says why.
        """
        import torch

        if dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=dtype)

    def peak_flops(self, dtype: str) -> PeakFlops | None:
        """Published dense peak of the opened device for a type, or None where unknown."""
        return None
