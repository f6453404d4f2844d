"""A recording of what a device does, by torch's own profiler and allocator.

What `Placement.profile` does where a vendor has nothing of its own, and its parts for one that has.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

__all__ = ["MEMORY_HISTORY", "MEMORY_TABLE", "TRACE", "profile_with_torch", "record_memory_history"]

TRACE = "trace.json.gz"
MEMORY_TABLE = "memory.json"
MEMORY_HISTORY = "memory.pickle"

MAX_ENTRIES = 100_000
"""Allocations of a history, the latest: as many as torchtitan keeps."""
MAX_OPERATIONS = 40
"""Of the table of memory: those that take most."""


@contextlib.contextmanager
def profile_with_torch(
    placement: Any,
    folder: Path,
    *,
    activities: Sequence[ProfilerActivity] | None = None,
    allocations: bool = True,
) -> Iterator[None]:
    """Record what is done within by ``torch.profiler``, and write it when it ends.

    Writes `TRACE`, a timeline for ui.perfetto.dev or chrome://tracing, and `MEMORY_TABLE`: bytes of
    the device before, after and at most (`MemoryStats`), and with `allocations` the operations that
    took most of the host's and of the device's memory.

    Args:
        placement: a `Placement` that is open.
        folder: exists.
        activities: what is recorded; None: all that this torch supports.
        allocations: the device's allocator reports to torch's profiler.
    """
    from torch.profiler import profile

    placement.synchronize()  # what was begun before is not part of it
    before = asdict(placement.memory())
    with profile(activities=activities, record_shapes=True, profile_memory=allocations) as recorded:
        yield
        placement.synchronize()
    after = asdict(placement.memory())
    recorded.export_chrome_trace(str(folder / TRACE))
    table: dict[str, Any] = {"unit": "bytes", "before": before, "after": after}
    if allocations:
        found = recorded.key_averages()
        for where in ("host", "device"):
            member = "self_cpu_memory_usage" if where == "host" else "self_device_memory_usage"
            most = sorted(found, key=attrgetter(member), reverse=True)
            table[f"{where}_operations"] = [
                {"operation": each.key, "calls": each.count, "bytes": getattr(each, member)}
                for each in most[:MAX_OPERATIONS]
                if getattr(each, member) > 0
            ]
    (folder / MEMORY_TABLE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def record_memory_history(module: Any, folder: Path) -> Iterator[None]:
    """Have the allocator of a device module record what is taken and freed within, and from where.

    Writes `MEMORY_HISTORY`, which docs.pytorch.org/memory_viz shows; nothing for a device whose
    module has no such recorder (``_record_memory_history``, as documented for ``torch.cuda``).
    """
    memory: Any = getattr(module, "memory", None)
    if not hasattr(memory, "_record_memory_history"):
        yield
        return
    memory._record_memory_history(max_entries=MAX_ENTRIES)
    try:
        yield
    finally:  # also where memory ran out: then it is of most use
        memory._dump_snapshot(str(folder / MEMORY_HISTORY))
        memory._record_memory_history(enabled=None)
