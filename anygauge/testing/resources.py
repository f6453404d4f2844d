"""Checks of what a device has: memory until it is exhausted, and peak rates."""

from __future__ import annotations

import gc
import math
import resource
from pathlib import Path

import torch

from anygauge.testing.bounds import on_host
from anygauge.testing.check import TOLERANCE, NotAsked, Opened, check

PIECES = 64
"""Allocations by which memory is exhausted, and as many again of a 64th of their size."""
MOST_OF_THE_HOST = 2**30
"""Bytes that are exhausted though they are the host's."""
FASTEST = 1e17
"""Operations per second that no device reaches yet."""


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
    found = on_host(torch.ones(64, 64, device=on.device) @ torch.ones(64, 64, device=on.device))
    assert found.eq(64).all(), f"{when}: a product of ones is {found[0, 0].item()}, expected 64"


@check(
    "out of memory is recognised at any size, takes nothing, and the device works after it",
    part="device",
    means="the batch size that fits would not be found, or a run that could be told what to do "
    "would end in an unknown error; look at errors of small requests and of the driver, and at "
    "what a failed request leaves behind",
)
def out_of_memory_at_any_size(on: Opened) -> None:
    stats = on.placement.memory()
    if stats.kind.split(",")[0] != "allocator":
        raise NotAsked("it shares the host's memory, and exhausting that would harm others")
    if stats.limit is None:
        raise NotAsked("memory().limit is unknown, so exhaustion cannot be tried")
    before = stats.in_use
    for size in (2 * stats.limit, 16 * stats.limit, 2**60):
        if _refused(on, size) is not None:
            raise NotAsked(f"memory is oversubscribed: {size} bytes were given of {stats.limit}")
        _works(on, f"after {size} bytes were refused")
    piece = max(stats.limit // PIECES, 2**20)
    if stats.limit > MOST_OF_THE_HOST and _grows(on, piece):
        return  # it lives in the host's memory, and exhausting that would harm others
    held: list[torch.Tensor] = []
    for size in (piece, max(piece // PIECES, 2**20)):
        for _ in range(2 * PIECES):
            found = _refused(on, size)
            if found is None:
                break
            held.append(found)
        else:
            del held
            raise AssertionError(
                f"{2 * PIECES * size} bytes in pieces of {size} were given, of {stats.limit}"
            )
    taken = on.placement.memory().in_use - before
    assert taken <= stats.limit, f"{taken} bytes are in use, of {stats.limit}"
    assert taken >= sum(each.numel() for each in held), (
        f"{len(held)} pieces hold {sum(each.numel() for each in held)} bytes, but memory in use "
        f"grew by {taken}"
    )
    del held, found
    gc.collect()
    on.placement.synchronize()
    left = on.placement.memory().in_use - before
    assert left <= 2**20, f"{left} bytes stay in use after memory was exhausted and freed"
    _works(on, "after memory was exhausted and freed")
    assert _refused(on, piece) is not None, f"{piece} bytes are refused after all was freed"


@check(
    "peak rates are finite, of a device's order, and lower types are not slower than float32",
    part="device",
    means="the share of the peak that a run reports would be nonsense; look for rates in TFLOPS "
    "instead of operations per second, with sparsity counted, or of another card",
)
def peak_rates_are_plausible(on: Opened) -> None:
    peaks = {name: on.placement.peak_flops(name) for name in TOLERANCE}
    known = {name: peak.value for name, peak in peaks.items() if peak is not None}
    if not known:
        raise NotAsked("peak_flops gives None: no rate is known of the opened device")
    for name, value in known.items():
        assert math.isfinite(value) and 1e9 < value < FASTEST, (
            f"{value} operations per second in {name} is not a device's rate"
        )
    for name in known.keys() - {"float32"}:
        if "float32" in known:
            assert known[name] >= known["float32"], (
                f"{known[name]:.3g} operations per second in {name}, and more, "
                f"{known['float32']:.3g}, in float32"
            )
    for unknown in ("no type", "", "int3"):
        found = on.placement.peak_flops(unknown)
        assert found is None, f"a rate of the type {unknown!r}, which does not exist: {found}"


@check(
    "how busy it is comes as numbers that can be",
    part="device",
    means=(
        "dashboards would show nonsense; look for what a driver gives where it has no counter, and "
        "for units: milliwatts, kelvin, fractions instead of percent"
    ),
)
def utilisation_is_plausible(on: Opened) -> None:
    for _ in range(2):
        for name, value in on.placement.utilisation().items():
            assert math.isfinite(value), f"{name} is {value}"
            unit = name.rsplit("_", 1)[-1]
            low, high = BOUNDS.get(unit, (0.0, math.inf))
            assert low <= value <= high, f"{name} is {value}, not from {low} to {high}"


BOUNDS = {"percent": (0.0, 100.0), "w": (0.0, 5000.0), "c": (-50.0, 150.0), "mhz": (0.0, 1e5)}
"""Lowest and highest value of a unit."""
