"""Checks on one opened device, in a process of their own.

What is expected comes from the host in float64, never from the device itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
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
from anygauge.registry import Registry
from anygauge.testing import (  # noqa: F401  (their checks are of this part, too)
    arithmetic,
    blocks,
    chance,
    copies,
    fp8,
    graphs,
    memory,
    real_sizes,
)
from anygauge.testing.check import TOLERANCE, NotAsked, Opened, check

MIB, LARGEST_MEMORY, MOST_OF_THE_HOST = 2**20, 2**50, 2**30
"""Bytes: a unit; what no device of today has; what is exhausted though it is the host's."""
PIECES = 64
"""Allocations by which memory is exhausted, and as many again of a 64th of their size."""
FASTEST = 1e17
"""Operations per second that no device reaches yet."""
TIMES = 3
"""How often the same is computed where it must have the same bits."""
SEEN = """
import json, os, sys
from anygauge.registry import Registry
name, options, answer = json.load(sys.stdin)
backend = Registry.load(os.environ).create_backend(name, options)
backend.open(0)
found = backend.placement.device_count()
backend.close()
with open(answer, "w") as file:
    json.dump(found, file)
"""
ALLOCATOR = "allocator"
PROCESS = "process"
"""`MemoryStats.kind` of a device with an allocator of its own, and of one without."""
UNITS = {
    "percent": (0.0, 100.0),
    "w": (0.0, 5000.0),
    "c": (-50.0, 150.0),
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
    "exhausted memory, and nothing else, counts as out of memory; the device works after it",
    part="device",
    means="the batch size that fits would not be found, or a run would end in an unknown error; "
    "look at the driver's errors of small and huge requests, and at what a failed one leaves",
)
def out_of_memory(on: Opened) -> None:
    for other in (ValueError("shape"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        assert not on.placement.is_out_of_memory(other), f"{other!r} counts as out of memory"
    stats = on.placement.memory()
    if stats.kind.split(",")[0] != ALLOCATOR:
        raise NotAsked("it shares the host's memory, and exhausting that would harm others")
    if stats.limit is None:
        raise NotAsked("memory().limit is unknown, so exhaustion cannot be tried")
    before = stats.in_use
    for size in (2 * stats.limit, 16 * stats.limit, 2**60):
        assert _refused(on, size) is None, (
            f"{size} bytes were given, of {stats.limit}: memory().limit is None where a device "
            "moves to the host what it has no room for"
        )
        _works(on, f"after {size} bytes were refused")
    piece = max(stats.limit // PIECES, MIB)
    if stats.limit > MOST_OF_THE_HOST and _grows(on, piece):
        return  # it lives in the host's memory, and exhausting that would harm others
    held: list[torch.Tensor] = []
    for size in (piece, max(piece // PIECES, MIB)):
        for _ in range(2 * PIECES):
            found = _refused(on, size)
            if found is None:
                break
            held.append(found)
        else:
            held.clear()
            raise AssertionError(
                f"{2 * PIECES * size} bytes in pieces of {size} were given, of {stats.limit}"
            )
    given, taken = sum(each.numel() for each in held), on.placement.memory().in_use - before
    assert given <= taken <= stats.limit, (
        f"{len(held)} pieces hold {given} bytes of {stats.limit}, but memory in use grew by {taken}"
    )
    held.clear()
    del found
    left = _memory(on).in_use - before
    assert left <= MIB, f"{left} bytes stay in use after memory was exhausted and freed"
    _works(on, "after memory was exhausted and freed")
    assert _refused(on, piece) is not None, f"{piece} bytes are refused after all was freed"


def _refused(on: Opened, size: int) -> torch.Tensor | None:
    """Memory of `size` bytes, or None where it was refused in the right way."""
    try:
        held = torch.empty(size, dtype=torch.uint8, device=on.device)
        held[-1:].fill_(1)
        on.placement.synchronize()  # some report only now
        return held
    except Exception as error:
        assert on.placement.is_out_of_memory(error), (
            f"{size} bytes: {type(error).__name__}: {str(error).splitlines()[0]} does not count as "
            "out of memory"
        )
        return None


def _grows(on: Opened, size: int) -> bool:
    """Whether the device's memory is the process's own."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])

    before = resident()
    held = torch.empty(size, dtype=torch.uint8, device=on.device).fill_(1)
    on.placement.synchronize()
    grown = (resident() - before) * resource.getpagesize()
    del held
    return grown > size // 2


def _works(on: Opened, when: str) -> None:
    found = torch.ones(64, 64, device=on.device) @ torch.ones(64, 64, device=on.device)
    assert bool(found.to(HOST_DEVICE).eq(64).all()), f"{when} a product of ones is wrong"


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
    "memory is counted in whole bytes, in order, of a known kind, and its limit stays the same",
    part="device",
    means="reports contradict themselves; the vendor's tool gives mebibytes, a share, -1 for "
    "unknown, or numbers of several devices",
)
def memory_is_counted(on: Opened) -> None:
    stats = _memory(on)
    assert stats.kind.split(",")[0] in (ALLOCATOR, PROCESS), f"kind is {stats.kind!r}"
    for name in ("in_use", "peak", "reserved", "limit"):
        value = getattr(stats, name)
        if value is not None or name in ("in_use", "peak"):
            whole = type(value) is int and 0 <= value < LARGEST_MEMORY
            assert whole, f"{name} is {value!r}, not a number of bytes that a device has"
    assert stats.in_use <= stats.peak
    assert stats.reserved is None or stats.reserved >= stats.in_use
    assert stats.limit is None or stats.limit >= max(stats.in_use, MIB), (
        f"limit is {stats.limit} bytes; it is not counted in larger units, and None where unknown"
    )
    held = torch.ones(MIB, device=on.device)
    again = _memory(on)
    del held
    assert again.limit == stats.limit, f"the limit was {stats.limit}, then {again.limit}"
    assert again.kind == stats.kind, f"kind was {stats.kind!r}, then {again.kind!r}"


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
    "peak rates have a source, are those of a device, stay the same, and are higher in lower types",
    part="device",
    means="the share of the peak that a run reports would be nonsense; look for rates in TFLOPS "
    "instead of operations per second, with sparsity counted, or of another card",
)
def peak_rates(on: Opened) -> None:
    found = {name: on.placement.peak_flops(name) for name in TOLERANCE}
    known = {name: peak.value for name, peak in found.items() if peak is not None}
    if not known:
        raise NotAsked("peak_flops gives None: no rate is known of the opened device")
    for name, value in known.items():
        plausible = math.isfinite(value) and 1e9 < value < FASTEST
        assert plausible, f"{value} operations per second in {name} is not a device's rate"
        again = on.placement.peak_flops(name)
        assert found[name] == again, f"peak_flops({name!r}) was {found[name]}, then {again}"
        assert found[name].source.strip(), f"{name}: no source"
        least = known.get("float32", 0.0)
        assert value >= least, (
            f"{value:.3g} operations per second in {name}, {least:.3g} in float32"
        )
    for unknown in ("no type", "", "int3"):
        rate = on.placement.peak_flops(unknown)
        assert rate is None, f"a rate of the type {unknown!r}, which does not exist: {rate}"


@check(
    "how busy the device is comes as plausible numbers with their unit in the name",
    part="device",
    means="dashboards would show nonsense; look for what a driver gives where it has no counter, "
    "and for units: milliwatts, kelvin, fractions instead of percent",
)
def utilisation_is_sound(on: Opened) -> None:
    for name, value in on.placement.utilisation().items():
        unit = name.rsplit("_", 1)[-1]
        assert unit in UNITS, f"{name}: the name does not end in a unit"
        least, most = UNITS[unit]
        # A comparison with what is not a number is false, too.
        sound = isinstance(value, float) and least <= value <= most
        assert sound, f"{name}: {value!r}, not a number from {least:g} to {most:g}"


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
    answer = Path(f"{variable}.json").absolute()
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        input=json.dumps(
            [on.backend.name, on.backend.options.model_dump(exclude_unset=True), str(answer)]
        ),
        env={**os.environ, variable: named},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    said = done.stderr.strip().splitlines()
    assert done.returncode == 0, f"with {variable}={named}: {said[-1] if said else ''}"
    found = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    assert found == 1, f"with {variable}={named} a process sees {found} devices"


@check(
    "the same operations on the same values give the same bits, unless `sums_vary` says otherwise",
    part="device",
    means="a resumed run has other losses than an undisturbed one, and nobody is warned; sums "
    "whose order threads decide",
)
def same_bits_again(on: Opened) -> None:
    reason = on.backend.sums_vary
    assert isinstance(reason, str), f"sums_vary is {reason!r}; it gives the reason in words"
    if reason:
        raise NotAsked(f"sums vary: {reason}")
    host = torch.Generator().manual_seed(11)
    a, b = torch.randn(256, 512, generator=host), torch.randn(512, 128, generator=host)
    rows = torch.randint(0, 16, (512,), generator=host)

    def computed() -> list[torch.Tensor]:
        left, right, index = (each.to(on.device, copy=True) for each in (a, b, rows))
        left.requires_grad_()
        table = torch.zeros(16, 256, device=on.device).index_add(0, index, left.t())
        loss = torch.softmax(left @ right, dim=-1).square().mean() + table.square().mean()
        loss.backward()
        assert left.grad is not None
        return [each.detach().to(HOST_DEVICE) for each in (table, loss, left.grad)]

    first = computed()
    for _ in range(TIMES):
        for what, one, other in zip(
            ("a sum of rows", "a loss", "a gradient"), first, computed(), strict=True
        ):
            assert torch.equal(one, other), (
                f"{what} differs from the same before by {float((one - other).abs().max()):.1e}; "
                "if that is how the device adds, say why in Backend.sums_vary"
            )


# -- the end --------------------------------------------------------------------------------------


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
