"""Checks on one opened device, in a process of their own.

What is expected comes from the host in float64, never from the device itself.
"""

from __future__ import annotations

import gc
import os

import torch

from anygauge.interface import CAPABILITIES, HOST_DEVICE, Level, MemoryStats, NotAvailableError
from anygauge.registry import Registry
from anygauge.testing.check import NotAsked, Opened, check, of_type
from anygauge.testing.watch import answer_of

MIB, LARGEST_MEMORY = 2**20, 2**50
"""Bytes: a unit, and what no device of today has."""
SEEN = """
import json, os, sys
from anygauge.registry import Registry
from anygauge.testing.watch import answer
backend = Registry.load(os.environ).create_backend(*json.load(sys.stdin))
backend.open(0)
answer(backend.placement.device_count())
backend.close()
"""
ALLOCATOR, PROCESS = "allocator", "process"
"""`MemoryStats.kind` of a device with an allocator of its own, and of one without."""


@check(
    "opening gives a device of the backend's type and settles its capabilities; a rank without a "
    "device is refused",
    part="device",
    means="nothing would run on the device, or two ranks share a card without a word; look at "
    "open(), which must return this rank's device, and compare the rank with their number",
)
def opens(on: Opened) -> None:
    assert on.device.type == on.backend.device_type, f"open() gave {on.device}"
    assert on.placement.device == on.device
    for name in CAPABILITIES:
        support = on.backend.support(name)
        assert support.level is not Level.DEPENDS, f"{name}: {support}, and one is open"
    made = torch.ones(3, device=on.device)
    assert made.device.type == on.device.type
    assert made.to(HOST_DEVICE).tolist() == [1, 1, 1]
    try:
        on.fresh().placement.open(on.visible + 1000)
    except NotAvailableError as error:
        named = any(str(each) in str(error) for each in (on.visible, on.visible + 1000))
        assert named, f"the refusal of local rank {on.visible + 1000} names no number: {error}"
    else:  # where it bears no number, any number of ranks share it
        assert on.device.index is None, f"local rank {on.visible + 1000} was opened"


@check(
    "memory is counted in whole bytes: in use follows what is taken and freed, its peak stays "
    "until it is reset, its limit stays the same",
    part="device",
    means="plans of memory, and the peak that a run reports, would be wrong; look at memory(), "
    "which must count what the allocator has given out, and at reset_peak(); the vendor's tool "
    "gives mebibytes, a share, -1 for unknown, or numbers of several devices",
)
def memory_moves(on: Opened) -> None:
    size = _block_bytes(on)
    on.placement.reset_peak()
    before = _memory(on)
    held = torch.empty(size, dtype=torch.uint8, device=on.device).fill_(1)
    during = _memory(on)
    del held
    after = _memory(on)
    assert during.in_use - before.in_use >= size, (
        f"{size} bytes were taken, and memory in use grew by {during.in_use - before.in_use}"
    )
    assert during.in_use - after.in_use >= size, "memory that was freed still counts as in use"
    # The kernel counts a process's pages in batches for each thread.
    slack = 0 if after.kind == ALLOCATOR else size // 64
    assert after.peak >= before.in_use + size - slack, (
        f"the peak is {after.peak}, but {before.in_use + size} bytes were in use"
    )
    for name in ("limit", "kind"):
        was, now = getattr(before, name), getattr(during, name)
        assert was == now, f"the {name} of memory was {was!r}, then {now!r}"
    on.placement.reset_peak()
    fresh = _memory(on)
    assert fresh.peak < after.peak, "resetting the peak leaves it where it was"


@check(
    "as many devices are probed as can be opened, and the visibility variable hides the others",
    part="device",
    means="`--devices auto` starts too few ranks or too many, or jobs that share a machine take "
    "each other's devices; the probe counts files, or the variable has another name or form",
    limit_s=120,
)
def devices_are_counted(on: Opened) -> None:
    if on.device.index is None:
        raise NotAsked("its device bears no number, and any number of ranks share it")
    variable = on.backend.launch.visibility_variable
    probed = Registry.load(os.environ).probe(on.backend.name).device_count
    if probed is not None:
        # The probe looks at the machine, also where this process may see some of its devices alone.
        fits = probed >= on.visible if (variable or "") in os.environ else probed == on.visible
        assert fits, f"the probe counts {probed}, the placement {on.visible}"
    if variable is None or on.visible < 2:
        return
    named = os.environ.get(variable, ",".join(map(str, range(on.visible)))).split(",")[-1]
    options = on.backend.options.model_dump(exclude_unset=True)
    environment = {**os.environ, variable: named}
    what = f"the devices with {variable}={named}"
    found = answer_of(("-c", SEEN), [on.backend.name, options], environment, what, 110)
    assert found == 1, f"with {variable}={named} a process sees {found} devices"


@check(
    "nothing is open after closing, and closing twice is not an error",
    part="device",
    means="the next run would find the device taken; look at close(), which must give back "
    "what open() took",
)
def closes(on: Opened) -> None:
    other = on.fresh()
    other.open(0)
    other.close()
    assert not other.placement.is_open, "the device is still open"
    other.close()


@check(
    "the process had the backend's environment, closed the device and ended with status 0",
    part="device",
    of_the_end=True,
    means="a run that was right would end with an error; look for threads and drivers that "
    "outlive the interpreter",
)
def ends_on_device(trouble: str) -> None:
    # One that gives every answer and then aborts would end its users' runs in the same way.
    assert not trouble, trouble


def _block_bytes(on: Opened) -> int:
    # A process's allocator keeps up to 64 MiB that were freed, and may give them again.
    return 64 * MIB if on.placement.memory().kind == ALLOCATOR else 256 * MIB


def _memory(on: Opened) -> MemoryStats:
    gc.collect()
    on.placement.synchronize()
    stats = on.placement.memory()
    of_type("memory()", stats, MemoryStats)
    assert stats.kind.split(",")[0] in (ALLOCATOR, PROCESS), f"kind is {stats.kind!r}"
    for name in ("in_use", "peak", "reserved", "limit"):
        value = getattr(stats, name) or 0
        assert 0 <= value < LARGEST_MEMORY, f"{name} is {value!r}, which no device has in bytes"
    assert stats.in_use <= stats.peak, f"{stats.in_use} bytes in use, {stats.peak} at the peak"
    assert stats.reserved is None or stats.reserved >= stats.in_use
    assert stats.limit is None or stats.limit >= max(stats.in_use, MIB), (
        f"limit is {stats.limit} bytes; it is not counted in larger units, and None where unknown"
    )
    return stats
