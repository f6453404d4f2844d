"""Checks on one opened device, in a process of their own.

What is expected comes from the host in float64, never from the device itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anygauge.interface import (
    CAPABILITIES,
    HOST_DEVICE,
    AnygaugeError,
    Level,
    MemoryStats,
    NotAvailableError,
)
from anygauge.testing import (  # noqa: F401  (their checks are of this part, too)
    arithmetic,
    blocks,
    chance,
    copies,
    fp8,
    graphs,
    memory,
    real_sizes,
    resources,
)
from anygauge.testing.check import TOLERANCE, NotAsked, Opened, check

MIB = 2**20
ALLOCATOR = "allocator"
PROCESS = "process"
"""`MemoryStats.kind` of a device with an allocator of its own, and of one without."""
UNITS = {
    "percent": (0.0, 100.0),
    "w": (0.0, 20_000.0),
    "c": (-50.0, 200.0),
    "bytes": (0.0, 2.0**50),
    "mhz": (0.0, 20_000.0),
}
"""Ends of the names of `Placement.utilisation`, with the least and most that is plausible."""


# -- placement ------------------------------------------------------------------------------------


@check(
    "the opened device has the backend's type, and tensors can be made on it",
    part="device",
    means="nothing would run on the device; look at open(), which must return the device of "
    "this rank",
)
def opens(on: Opened) -> None:
    assert on.device.type == on.backend.device_type, f"open() gave {on.device}"
    assert on.placement.device == on.device
    made = torch.ones(3, device=on.device)
    assert made.device.type == on.device.type
    assert made.to(HOST_DEVICE).tolist() == [1, 1, 1]


@check(
    "a local rank without a device is refused in words",
    part="device",
    means="two ranks would share a card without a word; look at open(), which must compare the "
    "rank with the number of devices",
)
def too_large_rank(on: Opened) -> None:
    other = on.fresh()
    with _raises(NotAvailableError) as raised:
        other.placement.open(on.visible + 1000)
        if on.device.index is None:
            raise NotAsked("its device bears no number, and any number of ranks share it")
    text = str(raised[0])
    assert str(on.visible) in text or str(on.visible + 1000) in text, f"names no number: {text}"


@check(
    "tensors and mappings of tensors arrive on the device, values and types unchanged",
    part="device",
    means="a model would get wrong batches; look at to_device, for mappings within mappings "
    "and for values that are no tensors",
)
def moves_data(on: Opened) -> None:
    batch = {
        "ids": torch.arange(12).reshape(3, 4),
        "weights": torch.linspace(-1, 1, 5, dtype=torch.float32),
        "nested": {"flag": torch.tensor([True, False])},
        "name": "kept as it is",
    }
    moved = on.placement.to_device(batch)
    on.placement.synchronize()
    for path, host, there in _pairs(batch, moved):
        if not isinstance(host, torch.Tensor):
            assert there == host, f"{path} changed"
            continue
        assert there.device.type == on.device.type, f"{path} is on {there.device}"
        assert there.dtype == host.dtype, f"{path} became {there.dtype}"
        assert torch.equal(there.to(HOST_DEVICE), host), f"{path} has other values"


@check(
    "a copy to the host that was only queued has arrived when synchronize returns",
    part="device",
    means="times and results would be read before they are there; look at synchronize(), which "
    "must wait for every stream",
)
def synchronizes(on: Opened) -> None:
    value = torch.ones(512, 512, device=on.device)
    for _ in range(20):
        value = value @ torch.eye(512, device=on.device)
    landed = value.to(HOST_DEVICE, non_blocking=True)
    on.placement.synchronize()
    assert float(landed.sum()) == 512 * 512


@check(
    "only an exhausted memory counts as out of memory",
    part="device",
    means="each error would be reported as missing memory; look at is_out_of_memory, which "
    "must know the driver's words alone",
)
def out_of_memory_is_told_apart(on: Opened) -> None:
    for error in (ValueError("shape"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        assert not on.placement.is_out_of_memory(error), f"{error!r} counts as out of memory"


@check(
    "more memory than the device has is refused, and counts as out of memory",
    part="device",
    means="a run that needs a smaller batch would end in an unknown error; look at "
    "is_out_of_memory and at the errors of the driver",
)
def out_of_memory_is_recognised(on: Opened) -> None:
    if on.placement.memory().kind != ALLOCATOR:
        raise NotAsked("it shares the host's memory, and exhausting that would harm others")
    limit = on.placement.memory().limit
    if limit is None:
        raise NotAsked("memory().limit is unknown, so exhaustion cannot be tried")
    try:
        torch.empty(limit * 2, dtype=torch.uint8, device=on.device)
        on.placement.synchronize()  # which some devices have errors wait for
    except Exception as error:
        assert on.placement.is_out_of_memory(error), (
            f"{type(error).__name__}: {error} does not count as out of memory"
        )
    else:
        raise AssertionError(
            f"{limit * 2} bytes were given, of {limit}: memory().limit is None where a device "
            "moves to the host what it has no room for"
        )
    assert float(torch.ones(2, device=on.device).sum()) == 2, "nothing works after it"


# -- memory ---------------------------------------------------------------------------------------


@check(
    "memory in use follows what is allocated and freed",
    part="device",
    means="plans of memory would be wrong; look at memory(), which must count what the "
    "allocator has given out",
)
def memory_moves(on: Opened) -> None:
    size = _block_bytes(on)
    before = _memory(on)
    held = torch.empty(size, dtype=torch.uint8, device=on.device).fill_(1)
    on.placement.synchronize()
    during = _memory(on)
    del held
    after = _memory(on)
    assert during.in_use - before.in_use >= size, (
        f"{size} bytes were taken, and memory in use grew by {during.in_use - before.in_use}"
    )
    assert during.in_use - after.in_use >= size, "memory that was freed still counts as in use"


@check(
    "the peak keeps what was in use, until it is reset",
    part="device",
    means="the peak that a run reports would be wrong; look at reset_peak and at counters that "
    "are of the whole process",
)
def peak_is_kept_and_reset(on: Opened) -> None:
    size = _block_bytes(on)
    on.placement.reset_peak()
    before = _memory(on)
    held = torch.empty(size, dtype=torch.uint8, device=on.device).fill_(1)
    on.placement.synchronize()
    del held
    kept = _memory(on)
    # The kernel counts a process's pages in batches for each thread.
    slack = 0 if kept.kind == ALLOCATOR else size // 64
    assert kept.peak >= before.in_use + size - slack, (
        f"the peak is {kept.peak}, but {before.in_use + size} bytes were in use"
    )
    on.placement.reset_peak()
    fresh = _memory(on)
    assert fresh.peak < kept.peak, "resetting the peak leaves it where it was"
    assert fresh.peak >= fresh.in_use


@check(
    "the numbers of memory are in order, and say what was counted",
    part="device",
    means="reports would contradict themselves; look at memory(), for numbers of several "
    "devices or of another unit",
)
def memory_numbers_are_sound(on: Opened) -> None:
    stats = _memory(on)
    assert stats.kind.split(",")[0] in (ALLOCATOR, PROCESS), f"kind is {stats.kind!r}"
    assert 0 <= stats.in_use <= stats.peak
    assert stats.reserved is None or stats.reserved >= stats.in_use
    assert stats.limit is None or stats.limit >= stats.in_use


# -- randomness -----------------------------------------------------------------------------------


@check(
    "the same seed gives the same numbers, another seed others",
    part="device",
    means="runs could not be repeated; look at seed(), which must seed the device's generators "
    "and the host's",
)
def seeds_count(on: Opened) -> None:
    def drawn(seed: int) -> torch.Tensor:
        on.placement.seed(seed)
        return torch.rand(64, device=on.device).to(HOST_DEVICE)

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert torch.equal(first, again), "the same seed gave other numbers on the device"
    assert not torch.equal(first, other), "another seed gave the same numbers on the device"


@check(
    "the host is seeded too",
    part="device",
    means="the order of data would differ from run to run; look at seed(), which must seed the "
    "host, too",
)
def seeds_the_host(on: Opened) -> None:
    on.placement.seed(7)
    first = torch.rand(8)
    on.placement.seed(7)
    assert torch.equal(first, torch.rand(8)), "seed() leaves the host's generator alone"


@check(
    "a state of the generators that is put back gives the same numbers again",
    part="device",
    means="a resumed run would draw other numbers; look at set_rng_state, and at states that "
    "stay on the device",
)
def rng_state_round_trip(on: Opened) -> None:
    on.placement.seed(3)
    torch.rand(5, device=on.device)
    state = {name: value.clone() for name, value in on.placement.rng_state().items()}
    for name, value in state.items():
        assert value.device.type == HOST_DEVICE and value.dtype == torch.uint8, (
            f"{name}: a state is bytes on the host, not {value.dtype} on {value.device}"
        )
    wanted = torch.rand(16, device=on.device).to(HOST_DEVICE), torch.rand(16)
    on.placement.set_rng_state(state)
    found = torch.rand(16, device=on.device).to(HOST_DEVICE), torch.rand(16)
    assert torch.equal(wanted[0], found[0]), "the device draws other numbers"
    assert torch.equal(wanted[1], found[1]), "the host draws other numbers"


# -- what it says of itself ------------------------------------------------------------------------


@check(
    "opening settled what depends on the device",
    part="device",
    means="users would be told a different thing before and after a run; look at open(), which "
    "must settle what depends on the device",
)
def capabilities_are_settled(on: Opened) -> None:
    for name in CAPABILITIES:
        support = on.backend.support(name)
        assert support.level is not Level.DEPENDS, f"{name}: {support}, and one is open"


@check(
    "a peak rate comes with its source",
    part="device",
    means="the share of the peak would be nonsense; look at peak_flops, for TFLOPS instead of "
    "operations per second",
)
def peak_rate(on: Opened) -> None:
    found = [on.placement.peak_flops(name) for name in TOLERANCE]
    if not any(found):
        raise NotAsked("peak_flops gives None: no rate is known of the opened device")
    for peak in filter(None, found):
        plausible = 1e9 < peak.value < 1e18
        assert plausible, f"{peak.value} operations per second is not a device's rate"
        assert peak.source.strip(), "no source"


# -- the end --------------------------------------------------------------------------------------


@check(
    "how busy the device is comes as finite numbers with their unit in the name",
    part="device",
    means="dashboards would mix units; look at utilisation(), whose names must end in one",
)
def utilisation_is_sound(on: Opened) -> None:
    for name, value in on.placement.utilisation().items():
        assert name.rsplit("_", 1)[-1] in UNITS, f"{name}: the name does not end in a unit"
        unit = name.rsplit("_", 1)[-1]
        least, most = UNITS[unit]
        # A comparison with what is not a number is false, too.
        assert isinstance(value, float) and least <= value <= most, (
            f"{name}: {value!r}, of {least:g} to {most:g}"
        )


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
    found = on.placement.memory()
    assert isinstance(found, MemoryStats), f"memory() gave {type(found).__name__}"
    return found


def _pairs(host: Any, there: Any, path: str = "batch") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(host, Mapping):
        assert isinstance(there, Mapping) and there.keys() == host.keys(), f"{path} lost its keys"
        for key in host:
            yield from _pairs(host[key], there[key], f"{path}[{key!r}]")
    else:
        yield path, host, there


@contextlib.contextmanager
def _raises(kind: type[BaseException]) -> Iterator[list[BaseException]]:
    raised: list[BaseException] = []
    try:
        yield raised
    except kind as error:
        raised.append(error)
    except AnygaugeError as error:
        raise AssertionError(f"{type(error).__name__} was raised, not {kind.__name__}") from error
    if not raised:
        raise AssertionError(f"{kind.__name__} was not raised")
