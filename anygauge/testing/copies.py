"""Checks of copies between the host and the device: values, order, and buffers that are reused."""

from __future__ import annotations

import itertools
import math

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import LAYOUTS, compare, dtypes, on_host
from anygauge.testing.check import Device, check

WIDE_FACTOR = 2**40 + 1
"""Times a small integer it is one that neither 32 bits nor a float32 hold."""
SMALL = ((7, 144), (1, 1), (0, 3))
LARGE = (3, 700_001)
"""Sizes: 8 MiB of int32, more than a staging buffer holds, and no multiple of anything."""
QUEUE_LENGTH = 64
"""Copies that are queued at once."""


def _distinct(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of which each differs from its neighbours, exact in every type."""
    values = ((torch.arange(math.prod(sizes)) * 37) % 251 - 100).reshape(sizes)
    if dtype is torch.int64:
        values = values * WIDE_FACTOR
    return values > 0 if dtype is torch.bool else values.to(dtype)


def _assert_same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fail unless a tensor, copied to the host, is the other to the last bit, in shape and type."""
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, not {wanted.dtype}"
    exact = wanted.double() if wanted.dtype.is_floating_point else wanted
    compare(on_host(found), exact, torch.zeros(()), what)


@check(
    "copies to the device and back keep values, from views and pinned memory, large or queued",
    part="device",
    means="batches and checkpoints would hold other numbers; look at copies of tensors that are "
    "not contiguous or begin within a buffer, at lengths that are no multiple of a block, at "
    "copies in pieces, and at to_device, for mappings within mappings and what is no tensor",
)
def copies_keep_values(on: Device) -> None:
    whole_types = (torch.int64, torch.int32, torch.uint8, torch.bool)
    small = itertools.product(SMALL, (*dtypes(on), *whole_types), LAYOUTS, (True, False))
    large = itertools.product((LARGE,), (torch.int32,), LAYOUTS, (True,))
    for size, dtype, name, waits in (*small, *large):
        host, view = LAYOUTS[name](_distinct(size, dtype))
        if not waits and on.placement.pinned_memory:
            host = host.pin_memory()
        what = f"{name} of {dtype}, sizes {list(size)}{'' if waits else ', queued'}"
        wanted = view(host)
        there = wanted.to(on.device, copy=True, non_blocking=not waits)
        # A view of what is on the device goes back by another way.
        seen = view(host.to(on.device))
        given = {"host": wanted, "within": {"device": seen}, "name": "kept as it is"}
        batch = on.placement.to_device(given)
        back = seen.to(HOST_DEVICE, non_blocking=not waits)
        target, usual = (torch.zeros(host.shape, dtype=dtype, device=d) for d in (on.device, None))
        view(target).copy_(wanted, non_blocking=not waits)
        view(usual).copy_(wanted)
        on.placement.synchronize()
        assert batch["name"] == given["name"], f"to_device changes a text: {batch['name']!r}"
        for each in (batch["host"], batch["within"]["device"]):
            assert each.device.type == on.device.type, f"to_device left {what} on {each.device}"
            _assert_same(each, wanted, f"to_device, {what}")
        _assert_same(there, wanted, f"to the device and back, {what}")
        _assert_same(back, wanted, f"back from a view on the device, {what}")
        _assert_same(seen.clone(), wanted, f"cloned on the device, {what}")
        _assert_same(target, usual, f"into a view on the device, {what}")


@check(
    "queued copies have their place among other work, and no buffer is used again too early",
    part="device",
    means="steps would read values that are too old or too new, or a batch parts of the next one, "
    "now and then; look for copies on a stream of their own that do not wait, or that are not "
    "waited for, and for staging buffers that are given back before their copy has ended",
)
def copies_are_ordered(on: Device) -> None:
    sizes = [1, 1000, 70_001, 2**18 + 1]
    hosts = [torch.full((sizes[n % 4],), n, dtype=torch.int32) for n in range(QUEUE_LENGTH)]
    for pinned in (False, True) if on.placement.pinned_memory else (False,):
        sources = [host.pin_memory() if pinned else host for host in hosts]
        there = [source.to(on.device, non_blocking=True) for source in sources]
        back = [each.to(HOST_DEVICE, non_blocking=True, copy=True) for each in there]
        batches = [on.placement.to_device({"more": {"ids": each}}) for each in sources]
        on.placement.synchronize()
        for number, wanted in enumerate(hosts):
            what = f"{number} of {QUEUE_LENGTH}{', pinned' if pinned else ''}"
            _assert_same(back[number], wanted, f"queued copy {what}")
            ids = batches[number]["more"]["ids"]
            assert ids.device.type == on.device.type, f"a mapping within one stays on {ids.device}"
            _assert_same(ids, wanted, f"batch {what}")
    value, seen = torch.zeros(sizes[-1], device=on.device), []
    for number in range(16):
        value.fill_(number)
        seen.append((value.clone(), value.to(HOST_DEVICE, non_blocking=True, copy=True)))
        value.add_(100)
    host, results = torch.zeros(sizes[-1]), []
    for number in range(16):
        host.fill_(number)
        copied = host.to(on.device, copy=True)  # one that waits: the host may write at once
        host.fill_(-1)
        results.append(copied * 2)
    on.placement.synchronize()
    for number, (clone, copy) in enumerate(seen):
        wanted = torch.full_like(host, number)
        _assert_same(clone, wanted, f"clone {number}, overwritten afterwards")
        _assert_same(copy, wanted, f"queued copy to the host {number}, overwritten afterwards")
        _assert_same(results[number], 2 * wanted, f"work {number} after a copy that waits")
