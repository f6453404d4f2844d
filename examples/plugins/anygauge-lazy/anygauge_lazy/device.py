"""The device module ``torch.lazy``, which torch itself does not have.

Torch and others ask such a module for what differs between devices; here one device without an
index, whose random numbers are the host's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch._lazy.ts_backend

from anygauge_lazy.cuts import DEVICE, end_graph
from anygauge_lazy.operations import register

_module: ModuleType | None = None


def load() -> ModuleType:
    """Start torch's TorchScript backend of lazy tensors (once per process); returns its module."""
    global _module
    if _module is None:
        torch._lazy.ts_backend.init()
        register()
        _module = ModuleType(f"torch.{DEVICE}")
        vars(_module).update(_functions())
        torch._register_device_module(DEVICE, _module)
    return _module


def _functions() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: end_graph(),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
