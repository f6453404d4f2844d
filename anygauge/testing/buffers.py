"""Checks of the gathers and reduce-scatters of one buffer that engines which shard live on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.testing.check import NotAsked
from anygauge.testing.together import LARGE, Together, check_on_ranks, total

PARTS = (1, 5, 257, 1003)
"""Elements of a rank's part."""


def whole_of(on: Together, size: int, dtype: torch.dtype, rank: int) -> Tensor:
    """What a rank gives to a reduce-scatter: a part of `size` for each."""
    return on.exact((size * on.world_size,), dtype, rank, salt=size)


def part_of(whole: Tensor, size: int, rank: int) -> Tensor:
    """A rank's part."""
    return whole[size * rank : size * (rank + 1)]


@check_on_ranks(
    "what engines that shard ask of the library: gather and reduce-scatter of one buffer",
    means="ZeRO and FSDP compute with weights or gradients of other ranks; the vendor's library "
    "orders parts otherwise, or lacks these forms and something takes their place.",
)
def buffers(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        sizes = (*PARTS, LARGE // 4) if dtype is torch.float32 else PARTS
        for size in sizes:
            parts = [on.exact((size,), dtype, rank) for rank in on.ranks]
            whole = on.empty((size * on.world_size,), dtype)
            dist.all_gather_into_tensor(whole, on.put(parts[on.rank], dtype))
            on.same(whole, torch.cat(parts), "all_gather_into_tensor")
            given = [whole_of(on, size, dtype, rank) for rank in on.ranks]
            part = on.empty((size,), dtype)
            dist.reduce_scatter_tensor(part, on.put(given[on.rank], dtype))
            on.same(part, part_of(total(given), size, on.rank), "reduce_scatter_tensor")
    # Parts of more than one dimension lie behind each other in the first.
    rows = [on.exact((3, 5), torch.float32, rank) for rank in on.ranks]
    stacked = on.empty((3 * on.world_size, 5), torch.float32)
    dist.all_gather_into_tensor(stacked, on.put(rows[on.rank], torch.float32))
    on.same(stacked, torch.cat(rows), "all_gather_into_tensor of rows")


@check_on_ranks(
    "a buffer of which the own part is a slice is gathered, and reduced, in place",
    means="The own shard is lost where an engine keeps it within the whole buffer, as ZeRO and "
    "FSDP do; the library clears its output before it reads the input.",
)
def buffers_in_place(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        for size in PARTS:
            parts = [on.exact((size,), dtype, rank) for rank in on.ranks]
            whole = on.empty((size * on.world_size,), dtype)
            mine = part_of(whole, size, on.rank)
            mine.copy_(on.put(parts[on.rank], dtype))
            dist.all_gather_into_tensor(whole, mine)
            on.same(whole, torch.cat(parts), "all_gather_into_tensor in place")
            given = [whole_of(on, size, dtype, rank) for rank in on.ranks]
            whole = on.put(given[on.rank], dtype)
            mine = part_of(whole, size, on.rank)
            dist.reduce_scatter_tensor(mine, whole)
            on.same(mine, part_of(total(given), size, on.rank), "reduce_scatter_tensor in place")


@check_on_ranks(
    "inputs of buffers stay as they were, and so does what lies around outputs",
    means="Weights that are gathered for one layer change those beside them; the library uses "
    "inputs as working memory, or rounds sizes up.",
)
def buffers_touch_nothing_else(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        for size in (1, 7, 1003):
            parts = [on.exact((size,), dtype, rank) for rank in on.ranks]
            mine = on.put(parts[on.rank], dtype)
            memory, whole = on.guarded((size * on.world_size,), dtype)
            dist.all_gather_into_tensor(whole, mine)
            on.same(whole, torch.cat(parts), "all_gather_into_tensor, into a view")
            on.same(mine, parts[on.rank], "input of all_gather_into_tensor, afterwards")
            on.unharmed(memory, f"all_gather_into_tensor of {size} x {dtype}")
            given = [whole_of(on, size, dtype, rank) for rank in on.ranks]
            around, whole = on.guarded((size * on.world_size,), dtype)
            whole.copy_(on.put(given[on.rank], dtype))
            memory, part = on.guarded((size,), dtype)
            dist.reduce_scatter_tensor(part, whole)
            on.same(part, part_of(total(given), size, on.rank), "reduce_scatter_tensor, of views")
            on.same(whole, given[on.rank], "input of reduce_scatter_tensor, afterwards")
            on.unharmed(memory, f"reduce_scatter_tensor of {size} x {dtype}")
            on.unharmed(around, f"reduce_scatter_tensor of {size} x {dtype}, its input")


@check_on_ranks(
    "buffers with gaps are gathered and scattered right, or refused",
    means="A transposed weight is gathered in the order of its memory, without an error; the "
    "library does not look at strides.",
)
def buffers_with_gaps(on: Together) -> None:
    on.asked_by_engines()
    dtype = torch.float32
    parts = [on.exact((14,), dtype, rank)[::2] for rank in on.ranks]
    gathered = on.empty((7 * on.world_size,), dtype)
    source = on.put(on.exact((14,), dtype, on.rank), dtype)[::2]
    if not on.attempt(lambda: dist.all_gather_into_tensor(gathered, source), "a gather with gaps"):
        on.same(gathered, torch.cat(parts), "all_gather_into_tensor with gaps")
    given = [on.exact((14 * on.world_size,), dtype, rank) for rank in on.ranks]
    part, scattered = on.empty((7,), dtype), on.put(given[on.rank], dtype)[::2]
    what = "a reduce-scatter with gaps"
    if not on.attempt(lambda: dist.reduce_scatter_tensor(part, scattered), what):
        on.same(part, part_of(total(given)[::2], 7, on.rank), "reduce_scatter_tensor with gaps")
    received = on.empty((2 * on.world_size,), dtype)
    sent = [on.exact((4 * on.world_size,), dtype, rank) for rank in on.ranks]
    mine = on.put(sent[on.rank], dtype)[::2]
    if not on.attempt(lambda: dist.all_to_all_single(received, mine), "all_to_all with gaps"):
        wanted = torch.cat([part_of(each[::2], 2, on.rank) for each in sent])
        on.same(received, wanted, "all_to_all_single with gaps")


@check_on_ranks(
    "buffers of integers and bytes are gathered and summed exactly, or refused",
    means="Quantised shards or indices are changed on their way; vendors move integers as floats, "
    "or bytes in words.",
)
def buffers_of_integers(on: Together) -> None:
    on.asked_by_engines()
    for dtype in (torch.int64, torch.int32, torch.uint8):
        for size in (1, 1003):
            parts = [on.whole((size,), dtype, rank) for rank in on.ranks]
            given = [on.whole((size * on.world_size,), dtype, rank) for rank in on.ranks]

            def gathers(dtype: Any = dtype, size: int = size, parts: Any = parts) -> None:
                whole = on.empty((size * on.world_size,), dtype)
                dist.all_gather_into_tensor(whole, on.put(parts[on.rank], dtype))
                on.same(whole, torch.cat(parts), "all_gather_into_tensor")

            def scatters(dtype: Any = dtype, size: int = size, given: Any = given) -> None:
                part = on.empty((size,), dtype)
                dist.reduce_scatter_tensor(part, on.put(given[on.rank], dtype))
                on.same(part, part_of(total(given), size, on.rank), "reduce_scatter_tensor")

            on.attempt(gathers, f"a gather of {dtype}")
            on.attempt(scatters, f"a reduce-scatter of {dtype}")


@check_on_ranks(
    "gathers and reduce-scatters work within backward",
    means="Tensor parallelism and FSDP get wrong gradients; backward runs in a thread of its own, "
    "in which vendors' libraries have no current device or stream.",
)
def backward_scatters(on: Together) -> None:
    on.asked_by_engines()
    size = 33
    values = [on.exact((size * on.world_size,), torch.float32, rank) for rank in on.ranks]
    part = on.put(on.exact((size,), torch.float32, on.rank, salt=9), torch.float32)
    part.requires_grad_()
    (_Gathered.apply(part) * on.put(values[on.rank], torch.float32)).sum().backward()
    assert part.grad is not None
    wanted = part_of(total(values), size, on.rank)
    on.same(part.grad, wanted, "reduce_scatter_tensor within backward")


class _Gathered(torch.autograd.Function):
    """Parts of all ranks -> the whole; the gradient is summed, and each rank has its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.new_empty(part.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, part)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (whole,) = gradients
        part = whole.new_empty(whole.numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(part, whole.contiguous())
        return part


@check_on_ranks(
    "several gathers that are started as one have all their results",
    means="FSDP's layers hold weights of each other; the library runs only the last of the calls "
    "that it was to put together.",
)
def together_as_one(on: Together) -> None:
    on.asked_by_engines()
    parts = [
        [on.exact((n,), torch.float32, rank, salt=n) for rank in on.ranks] for n in (3, 8, 101)
    ]
    whole = [on.empty((n * on.world_size,), torch.float32) for n in (3, 8, 101)]
    mine = [on.put(each[on.rank], torch.float32) for each in parts]
    group: Any = dist.group.WORLD
    library = group._get_backend(on.device)
    if not getattr(library, "supports_coalescing", False):
        # Not even tried: torch would take all later calls for part of what it was to put together.
        raise NotAsked(f"{library.name()} does not put calls together")

    def gathers() -> None:
        with dist._coalescing_manager(device=on.device, async_ops=True) as work:
            for output, each in zip(whole, mine, strict=True):
                dist.all_gather_into_tensor(output, each)
        work.wait()

    on.required_or_not_asked(gathers, "calls that are put together")
    for output, each in zip(whole, parts, strict=True):
        on.same(output, torch.cat(each), "one of three gathers that are put together")


@check_on_ranks(
    "gathered and scattered buffers stay as they are while later calls run",
    means="The weights of one layer turn into those of the next while it computes; the library "
    "copies results out of a staging buffer after it has given that to the next call.",
)
def buffers_kept(on: Together) -> None:
    on.asked_by_engines()
    kept, size = [], 1031
    for turn in range(4):
        parts = [on.exact((size,), torch.float32, rank, salt=turn) for rank in on.ranks]
        whole = on.empty((size * on.world_size,), torch.float32)
        dist.all_gather_into_tensor(whole, on.put(parts[on.rank], torch.float32))
        kept.append((whole, torch.cat(parts)))
        given = [whole_of(on, size + turn, torch.float32, rank) for rank in on.ranks]
        part = on.empty((size + turn,), torch.float32)
        dist.reduce_scatter_tensor(part, on.put(given[on.rank], torch.float32))
        kept.append((part, part_of(total(given), size + turn, on.rank)))
    for n, (result, wanted) in enumerate(kept):
        on.same(result, wanted, f"the buffer of call {n + 1} of {len(kept)}, after the others")
