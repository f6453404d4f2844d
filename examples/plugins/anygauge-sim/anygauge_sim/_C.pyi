"""The compiled part; sources are in ``csrc``. Cards are named by their index in this process."""

import datetime
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

def register_hooks() -> None: ...
def configure(cards: Sequence[int], capacity: int, locks: str, trace: str) -> None:
    """Once per process, before all else; a RuntimeError says that the trace cannot be written."""

def inject(
    allocations: Set[int],
    failing: Mapping[str, Set[int]],
    hanging: Mapping[str, Set[int]],
    slow: Mapping[int, float],
) -> None:
    """Faults on purpose, as `anygauge_sim.settings.Faults` describes them."""

def device_count() -> int:
    """Cards that this process sees; 0 until they are configured."""

def capacity() -> int:
    """Bytes of each card."""

def card_number(index: int) -> int:
    """The card's number on the machine."""

def claim(index: int) -> None:
    """Take the card; a RuntimeError says that another process holds it."""

def give_back(index: int) -> None:
    """Undo one `claim`. After the last, others may have the card once its memory is free."""

def current_device() -> int: ...
def set_device(index: int) -> None: ...
def memory(index: int) -> dict[str, int]:
    """Bytes ``in_use``, ``peak``, ``allocated``, ``freed``; requests ``out_of_memory``."""

def reset_peak(index: int) -> None: ...
def counters(index: int) -> dict[str, Any]:
    """``kernels``, ``allocations``, ``host_to_card_bytes``, ``card_to_host_bytes``,
    ``card_to_host_copies``, ``host_waits`` (copies that end when all before has been done),
    ``card_to_card_bytes``; by name ``operations``, ``collective_calls``, ``collective_bytes``."""

def reset_counters(index: int) -> None: ...
def default_generator(index: int) -> torch.Generator: ...

class SimCCL(dist.ProcessGroup):
    """The cards' collectives over a group of the host."""

    def __init__(self, host: Any, timeout: datetime.timedelta) -> None: ...
