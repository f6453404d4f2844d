"""The compiled part; sources are in ``csrc``. Cards are named by their index in this process."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

def register_hooks() -> None: ...
def device_count() -> int: ...
def capacity() -> int:
    """Bytes of each card."""

def card_number(index: int) -> int:
    """The card's number on the machine."""

def claim(index: int) -> None:
    """Take the card; a RuntimeError says that another process holds it."""

def current_device() -> int: ...
def set_device(index: int) -> None: ...
def memory(index: int) -> dict[str, int]:
    """Bytes ``in_use``, ``peak``, ``allocated``, ``freed``; requests ``out_of_memory``."""

def reset_peak(index: int) -> None: ...
def counters(index: int) -> dict[str, Any]:
    """``kernels``, ``allocations``, ``host_to_card_bytes``, ``card_to_host_bytes``,
    ``card_to_card_bytes``; by name ``operations``, ``collective_calls``, ``collective_bytes``."""

def reset_counters(index: int) -> None: ...
def default_generator(index: int) -> torch.Generator: ...

class SimCCL(dist.ProcessGroup):
    """The cards' collectives over a group of the host."""

    def __init__(self, host: Any, timeout: datetime.timedelta) -> None: ...
