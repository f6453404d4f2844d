"""DeepSpeed's view of a device that it does not know: made of our `Backend`.

DeepSpeed asks one object for everything about a device, some eighty questions. Whoever brings a
backend has answered them already, in `Placement`, `Collectives` and the capabilities; what is left
(operators that DeepSpeed compiles for some devices) is answered as for the host.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from anygauge.interface import Backend


def accelerator_of(backend: Backend) -> Any:
    """A ``DeepSpeedAccelerator`` for the opened device of a backend. Imports DeepSpeed."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    placement = backend.placement
    kind = backend.device_type
    module: Any = torch.get_device_module(kind)
    accelerator = torch.accelerator.current_accelerator()
    has_streams = accelerator is not None and accelerator.type == kind

    class BackendAccelerator(CPU_Accelerator):
        """Operators are the host's, all else the backend's."""

        def __init__(self) -> None:
            super().__init__()
            self._name = kind
            self._communication_backend_name = backend.collectives.backend_name(placement.device)

        # -- order of work -------------------------------------------------------------------------

        def use_host_timers(self) -> bool:
            return True

        def synchronize(self, device_index: Any = None) -> None:
            placement.synchronize()

        # -- devices --------------------------------------------------------------------------

        def device_name(self, device_index: int | None = None) -> str:
            numbered = device_index is not None and placement.device.index is not None
            return f"{kind}:{device_index}" if numbered else kind

        def device(self, device_index: int | None = None) -> Any:
            return torch.device(self.device_name(device_index))

        def set_device(self, device_index: Any) -> None:
            whole = isinstance(device_index, int)
            wanted = self.device(device_index) if whole else torch.device(device_index)
            if wanted != placement.device:
                raise RuntimeError(
                    f"DeepSpeed wants to use {wanted}, but this rank has opened "
                    f"{placement.device}; does LOCAL_RANK have the value that the run gave it?"
                )

        def current_device(self) -> int:
            return placement.device.index or 0

        def current_device_name(self) -> str:
            return str(placement.device)

        def device_count(self) -> int:
            return placement.device_count()

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == kind

        def visible_devices_envs(self) -> list[str]:
            variable = backend.launch.visibility_variable
            return [] if variable is None else [variable]

        def communication_backend_name(self) -> str:
            return str(self._communication_backend_name)

        # -- random numbers ---------------------------------------------------------------------

        def manual_seed(self, seed: int) -> None:
            placement.seed(seed)

        manual_seed_all = manual_seed

        # A device without numbers of its own has the host's alone.

        def get_rng_state(self, device_index: Any = None) -> torch.Tensor:
            states = placement.rng_state()
            return states.get("device", states["host"])

        def set_rng_state(self, new_state: torch.Tensor, device_index: Any = None) -> None:
            states = dict(placement.rng_state())
            states["device" if "device" in states else "host"] = new_state
            placement.set_rng_state(states)

        # -- streams: a device without them ends each operation in its call, as the host does ------

        if has_streams:

            def is_synchronized_device(self) -> bool:
                return False

            @property
            def Stream(self) -> Any:
                return functools.partial(torch.Stream, device=placement.device)

            @property
            def Event(self) -> Any:
                return functools.partial(torch.Event, device=placement.device)

            def stream(self, stream: Any) -> Any:
                return contextlib.nullcontext() if stream is None else stream

            def current_stream(self, device_index: Any = None) -> Any:
                return torch.accelerator.current_stream(placement.device)

            default_stream = current_stream

        # -- memory -----------------------------------------------------------------------------

        def empty_cache(self) -> None:
            if hasattr(module, "empty_cache"):
                module.empty_cache()

        def memory_allocated(self, device_index: Any = None) -> int:
            return placement.memory().in_use

        def max_memory_allocated(self, device_index: Any = None) -> int:
            return placement.memory().peak

        def reset_max_memory_allocated(self, device_index: Any = None) -> None:
            placement.reset_peak()

        def memory_reserved(self, device_index: Any = None) -> int:
            stats = placement.memory()
            return stats.in_use if stats.reserved is None else stats.reserved

        max_memory_reserved = max_memory_allocated
        memory_cached = memory_reserved
        max_memory_cached = max_memory_reserved
        reset_max_memory_cached = reset_max_memory_allocated
        reset_peak_memory_stats = reset_max_memory_allocated

        def memory_stats(self, device_index: Any = None) -> dict[str, int]:
            stats = placement.memory()
            return {
                "allocated_bytes.all.current": stats.in_use,
                "allocated_bytes.all.peak": stats.peak,
            }

        def total_memory(self, device_index: Any = None) -> int:
            limit = placement.memory().limit
            return super().total_memory() if limit is None else limit

        def available_memory(self, device_index: Any = None) -> int:
            return self.total_memory() - placement.memory().in_use

        # -- types ------------------------------------------------------------------------------

        def is_bf16_supported(self) -> bool:
            return bool(backend.support("bfloat16"))

        def is_fp16_supported(self) -> bool:
            return bool(backend.support("float16"))

        def supported_dtypes(self) -> list[torch.dtype]:
            found = [torch.float32]
            if self.is_bf16_supported():
                found.append(torch.bfloat16)
            if self.is_fp16_supported():
                found.append(torch.float16)
            return found

        # -- pinned memory ----------------------------------------------------------------------

        _torch_pins_host_memory = placement.pinned_memory

        if getattr(DeepSpeedAccelerator.pin_memory, "__isabstractmethod__", False):
            # Releases before its own pinned memory.
            def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
                return self._torch_pin_memory(tensor)

        else:
            pin_memory = DeepSpeedAccelerator.pin_memory

        def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory() if placement.pinned_memory else tensor

        def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
            return tensor.new_empty(shape, pin_memory=placement.pinned_memory)

    for name, dtype in {
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }.items():
        setattr(BackendAccelerator, name, _constructor(dtype, placement.device))
    return BackendAccelerator()


def _constructor(dtype: torch.dtype, device: torch.device) -> property:
    return property(lambda _: functools.partial(torch.tensor, dtype=dtype, device=device))
