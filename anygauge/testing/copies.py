"""Checks of copies between the host and the device: values, order, and buffers that are reused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.bounds import WIDE, types
from anygauge.testing.check import Opened, check

MANY = 64
"""Copies that are queued at once."""
LARGE = 2**21 + 3
"""Elements: 8 MiB of float32, more than a staging buffer holds, and no multiple of anything."""

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda whole: whole,
    "with an offset": lambda whole: whole[5:-2],
    "every second": lambda whole: whole[1::2],
    "transposed": lambda whole: whole[: (whole.numel() // 7) * 7].view(-1, 7).t(),
    "a column": lambda whole: whole[: (whole.numel() // 7) * 7].view(-1, 7)[:, 3],
    "expanded": lambda whole: whole[:3].unsqueeze(1).expand(3, 50),
    "one element": lambda whole: whole[7:8].view(()),
    "empty": lambda whole: whole[3:3],
}


def _different(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of which each differs from its neighbours, exact in every type."""
    values = (torch.arange(size) * 37) % 251 - 100
    if dtype is torch.int64:
        values = values * WIDE
    return values > 0 if dtype is torch.bool else values.to(dtype)


def _is(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fail unless a tensor on the host is the other, to the last bit, in shape and type."""
    assert found.device.type == HOST_DEVICE, f"{what}: it is on {found.device}"
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=0, msg=lambda why: f"{what}: {' '.join(why.split())}"
    )


@check(
    "copies to the device and back keep values, from views and pinned memory, large or queued",
    part="device",
    means="batches and checkpoints would hold other numbers; look at copies of tensors that are "
    "not contiguous or begin within a buffer, at lengths that are no multiple of a block, at "
    "copies in pieces, and at to_device, for mappings within mappings and what is no tensor",
)
def copies_keep_values(on: Opened) -> None:
    whole_types = (torch.int64, torch.int32, torch.uint8, torch.bool)
    small = itertools.product((1009,), (*types(on), *whole_types), VIEWS, (True, False))
    large = itertools.product((LARGE,), (torch.int32,), VIEWS, (True,))
    for size, dtype, name, waits in (*small, *large):
        host = _different(size, dtype)
        if not waits and on.placement.pinned_memory:
            host = host.pin_memory()
        what = f"{name} of {size} x {dtype}{'' if waits else ', queued'}"
        view = VIEWS[name]
        wanted = view(host)
        there = wanted.to(on.device, copy=True, non_blocking=not waits)
        # A view of what is on the device goes back by another way.
        seen = view(host.to(on.device))
        into = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
        try:
            into.copy_(seen, non_blocking=not waits)
        except RuntimeError:  # some refuse to write into the host's tensor, for all to see
            into.copy_(wanted)
        given = {"host": wanted, "within": {"device": seen}, "name": "kept as it is"}
        batch = on.placement.to_device(given)
        found = {
            "to the device and back": there.to(HOST_DEVICE, copy=True, non_blocking=not waits),
            "back from a view on the device": seen.to(HOST_DEVICE, non_blocking=not waits),
            "cloned on the device": seen.clone(),
            "into a tensor of the host": into,
            "to_device of a tensor on the host": batch["host"],
            "to_device of a tensor on the device": batch["within"]["device"],
        }
        if name != "expanded":
            target, usual = (torch.zeros(size, dtype=dtype, device=d) for d in (on.device, None))
            view(target).copy_(wanted, non_blocking=not waits)
            view(usual).copy_(wanted)
        on.placement.synchronize()
        assert batch["name"] == given["name"], f"to_device changes a text: {batch['name']!r}"
        for how, each in found.items():
            if how.startswith("to_device"):
                assert each.device.type == on.device.type, f"{how} left it there"
            _is(each.to(HOST_DEVICE), wanted, f"{how}, {what}")
        if name != "expanded":
            _is(target.to(HOST_DEVICE), usual, f"into a view on the device, {what}")


@check(
    "many queued copies of different values all arrive: no buffer is used again too early",
    part="device",
    means="a batch would hold parts of the next one, now and then; look for staging buffers that "
    "are given back before the copy from them has ended",
)
def queued_copies_stay_apart(on: Opened) -> None:
    sizes = [1, 1000, 70_001, 2**18 + 1]
    hosts = [torch.full((sizes[n % 4],), n, dtype=torch.int32) for n in range(MANY)]
    for pinned in (False, True) if on.placement.pinned_memory else (False,):
        sources = [host.pin_memory() if pinned else host for host in hosts]
        there = [source.to(on.device, non_blocking=True) for source in sources]
        back = [each.to(HOST_DEVICE, non_blocking=True, copy=True) for each in there]
        on.placement.synchronize()
        for number, (found, wanted) in enumerate(zip(back, hosts, strict=True)):
            _is(found, wanted, f"queued copy {number} of {MANY}{', pinned' if pinned else ''}")
    batches = [on.placement.to_device({"ids": host, "more": {"mask": host > 7}}) for host in hosts]
    on.placement.synchronize()
    for number, (batch, wanted) in enumerate(zip(batches, hosts, strict=True)):
        _is(batch["ids"].to(HOST_DEVICE), wanted, f"batch {number} of {MANY}")
        mask = batch["more"]["mask"]
        assert mask.device.type == on.device.type, f"a mapping within one stays on {mask.device}"
        _is(mask.to(HOST_DEVICE), wanted > 7, f"mask {number} of {MANY}")


@check(
    "a copy has its place among other work: it reads what stood there when it was asked for",
    part="device",
    means="steps would read values that are too old or too new; look for copies on a stream of "
    "their own that do not wait, or that are not waited for",
)
def copies_are_ordered(on: Opened) -> None:
    size = 2**18 + 5
    value = torch.zeros(size, device=on.device)
    seen = []
    for number in range(16):
        value.fill_(number)
        seen.append((value.clone(), value.to(HOST_DEVICE, non_blocking=True, copy=True)))
        value.add_(100)
    on.placement.synchronize()
    for number, (there, here) in enumerate(seen):
        wanted = torch.full((size,), float(number))
        _is(there.to(HOST_DEVICE), wanted, f"clone {number}, overwritten afterwards")
        _is(here, wanted, f"queued copy to the host {number}, overwritten afterwards")
    host = torch.zeros(size)
    results = []
    for number in range(16):
        host.fill_(number)
        there = host.to(on.device, copy=True)  # one that waits: the host may write at once
        host.fill_(-1)
        results.append(there * 2)
    for number, result in enumerate(results):
        wanted = torch.full((size,), 2.0 * number)
        _is(result.to(HOST_DEVICE), wanted, f"work {number} after a copy that waits")
