"""Gives torch the simulated device: its name, its module, its collective library.

`load` is called once a card is opened. Until then nothing here is imported and torch does not know
the device.
"""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from anygauge_sim import _C, settings, streams

DEFAULT_NAME = "sim"
COLLECTIVES = "simccl"

_loaded: str | None = None


def load(name: str = DEFAULT_NAME) -> ModuleType:
    """Make the device known to torch as ``name`` (once per process); returns its module.

    Reads the settings from the environment; later changes of it have no effect.

    Raises:
        ValueError: a setting is wrong.
        RuntimeError: the device is known by another name already, or the trace cannot be written.
    """
    global _loaded
    if _loaded is not None:
        if _loaded != name:
            raise RuntimeError(f"the simulated device is {_loaded!r} already, not {name!r}")
        return torch.get_device_module(name)
    wanted = settings.read(os.environ)
    wanted.make_lock_folder()
    torch.utils.rename_privateuse1_backend(name)
    _C.configure(
        cards=wanted.cards, capacity=wanted.capacity, locks=wanted.locks, trace=wanted.trace
    )
    faults = wanted.faults
    _C.inject(
        allocations=faults.allocations,
        failing=faults.failing,
        hanging=faults.hanging,
        slow=faults.slow,
    )
    _C.register_hooks()
    module = device_module(name)
    torch._register_device_module(name, module)
    if name == DEFAULT_NAME:
        # Torch has methods for names of its own already, such as tensor.is_hpu.
        torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False)
    if COLLECTIVES not in dist.Backend.backend_list:
        dist.Backend.register_backend(COLLECTIVES, _collectives, devices=[name])
    atexit.register(_let_threads_end)
    _loaded = name
    return module


def device_module(name: str) -> ModuleType:
    """What ``torch.<name>`` holds: the functions that torch and others ask a device module for."""
    module = ModuleType(f"torch.{name}")
    functions: dict[str, Any] = {
        "is_available": lambda: _C.device_count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": _C.device_count,
        "current_device": _C.current_device,
        "set_device": lambda device: _C.set_device(_index(device)),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: f"simulated card {_C.card_number(_index(device))}",
        "memory_allocated": lambda device=None: _C.memory(_index(device))["in_use"],
        "max_memory_allocated": lambda device=None: _C.memory(_index(device))["peak"],
        "memory_reserved": lambda device=None: _C.memory(_index(device))["in_use"],
        "max_memory_reserved": lambda device=None: _C.memory(_index(device))["peak"],
        "reset_peak_memory_stats": lambda device=None: _C.reset_peak(_index(device)),
        "mem_get_info": _memory_info,
        "manual_seed": lambda seed: _generator(None).manual_seed(seed),
        "manual_seed_all": _seed_all,
        "initial_seed": lambda: _generator(None).initial_seed(),
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "counters": lambda device=None: _C.counters(_index(device)),
        "reset_counters": lambda device=None: _C.reset_counters(_index(device)),
    }
    vars(module).update(functions)
    vars(module).update(streams.functions(name))
    return module


def _index(device: Any = None) -> int:
    if device is None:
        return int(_C.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_C.current_device()) if index is None else index


def _generator(device: Any) -> torch.Generator:
    return _C.default_generator(_index(device))


def _seed_all(seed: int) -> None:
    for index in range(_C.device_count()):
        _C.default_generator(index).manual_seed(seed)


def _memory_info(device: Any = None) -> tuple[int, int]:
    total = _C.capacity()
    return total - _C.memory(_index(device))["in_use"], total


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A group of simccl: it moves bytes with a gloo group of its own."""
    return _C.SimCCL(dist.ProcessGroupGloo(store, rank, size, timeout), timeout)


def _let_threads_end() -> None:
    """Autograd's thread of this device drops its last graph a moment after backward returns; if the
    interpreter has gone by then, the process aborts. Each sleep lets the thread have it."""
    threads = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if any(name.startswith("pt_autograd") for name in threads):
        for _ in range(5):
            time.sleep(0.1)
