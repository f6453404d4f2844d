"""Checks of what engines that shard call in `torch.distributed`, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.testing.check import NotAsked
from anygauge.testing.together import LARGE, Together, bound, check_on_ranks, total

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
    "the library's own mean is one, wherever it has it",
    means="FSDP's gradients are sums, or means over the wrong number of ranks; vendors map the "
    "mean of torch to the sum that they have.",
)
def library_means(on: Together) -> None:
    on.asked_by_engines()
    average = dist.ReduceOp.AVG
    for dtype in on.dtypes():
        values = [on.fractions((1003,), dtype, rank) for rank in on.ranks]
        given = [on.fractions((7 * on.world_size,), dtype, rank) for rank in on.ranks]
        mean, means = torch.stack(values).mean(0), torch.stack(given).mean(0)

        def reduces(values: Any = values, dtype: Any = dtype, mean: Tensor = mean) -> None:
            tensor = on.put(values[on.rank], dtype)
            dist.all_reduce(tensor, op=average)
            within = bound(values, dtype, on.world_size + 1) / on.world_size
            on.same(tensor, mean, "all_reduce with ReduceOp.AVG", within=within)

        def scatters(given: Any = given, dtype: Any = dtype, means: Tensor = means) -> None:
            part = on.empty((7,), dtype)
            dist.reduce_scatter_tensor(part, on.put(given[on.rank], dtype), op=average)
            within = bound(given, dtype, on.world_size + 1) / on.world_size
            on.same(
                part,
                part_of(means, 7, on.rank),
                "reduce_scatter_tensor with ReduceOp.AVG",
                within=part_of(within, 7, on.rank),
            )

        on.required_or_not_asked(reduces, f"a mean of {dtype}")
        on.required_or_not_asked(scatters, f"a reduce-scatter of means of {dtype}")


@check_on_ranks(
    "minimum, maximum and product are those, wherever the library has them",
    means="Engines that agree on a flag by a minimum disagree; vendors map an operation that they "
    "lack to one that they have.",
)
def other_reductions(on: Together) -> None:
    on.asked_by_engines()
    for dtype in [*on.dtypes(), torch.int64]:
        make = on.exact if dtype.is_floating_point else on.whole
        for op in ("MIN", "MAX", "PRODUCT"):
            values = [make((1003,), dtype, rank) for rank in on.ranks]
            if op == "PRODUCT":
                values = [each.sign() * (rank % 2 + 1) for rank, each in enumerate(values)]
            stacked = torch.stack(values)
            wanted = {"MIN": stacked.amin(0), "MAX": stacked.amax(0), "PRODUCT": stacked.prod(0)}

            def reduces(
                op: str = op, dtype: Any = dtype, values: Any = values, right: Tensor = wanted[op]
            ) -> None:
                tensor = on.put(values[on.rank], dtype)
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                on.same(tensor, right, f"all_reduce with ReduceOp.{op}")

            on.attempt(reduces, f"{op} of {dtype}")


@check_on_ranks(
    "all_to_all_single hands each rank its part",
    means="Context parallelism attends to the heads of other ranks; the library orders what it "
    "receives by arrival or topology.",
)
def all_to_all(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        sizes = (*PARTS, LARGE // 4) if dtype is torch.float32 else PARTS
        for size in sizes:
            sent = [whole_of(on, size, dtype, rank) for rank in on.ranks]
            mine = on.put(sent[on.rank], dtype)
            received = on.empty((size * on.world_size,), dtype)
            dist.all_to_all_single(received, mine)
            wanted = torch.cat([part_of(each, size, on.rank) for each in sent])
            on.same(received, wanted, "all_to_all_single")
            on.same(mine, sent[on.rank], "input of all_to_all_single, afterwards")


@check_on_ranks(
    "all_to_all_single takes parts of unequal size, and none",
    means="Tokens reach the wrong expert, or are lost; the library takes the first size for all, "
    "or confuses what is sent with what is received.",
)
def all_to_all_unequal(on: Together) -> None:
    on.asked_by_engines()

    def count(source: int, target: int) -> int:
        # Nothing on the diagonal of even ranks; from and to differ.
        return 0 if source == target and source % 2 == 0 else 3 * source + 5 * target + 1

    for columns in (None, 3):
        rows = [sum(count(rank, other) for other in on.ranks) for rank in on.ranks]
        shapes = [(n,) if columns is None else (n, columns) for n in rows]
        sent = [on.exact(shapes[rank], torch.float32, rank) for rank in on.ranks]
        splits = [[count(rank, other) for other in on.ranks] for rank in on.ranks]
        arriving = [count(other, on.rank) for other in on.ranks]
        shape = (sum(arriving), *shapes[0][1:])
        received = on.empty(shape, torch.float32)
        mine = on.put(sent[on.rank], torch.float32)
        dist.all_to_all_single(received, mine, arriving, splits[on.rank])
        wanted = torch.cat([each.split(splits[rank])[on.rank] for rank, each in enumerate(sent)])
        on.same(received, wanted, "all_to_all_single of unequal parts")


@check_on_ranks(
    "lists are gathered and scattered into the tensors that are given, views among them",
    means="Logits of other ranks stand in the wrong place; the library gathers into a buffer of "
    "its own and copies it back in another order.",
)
def lists(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        for size in PARTS:
            values = [on.exact((size,), dtype, rank) for rank in on.ranks]
            mine = on.put(values[on.rank], dtype)
            whole = on.empty((size * on.world_size,), dtype)
            # In the reverse order of memory, so that the order of the list counts.
            views = list(whole.chunk(on.world_size))[::-1]
            dist.all_gather(views, mine)
            on.same(whole, torch.cat(values[::-1]), "all_gather into views of one buffer")
            on.same(mine, values[on.rank], "input of all_gather, afterwards")
            given = [whole_of(on, size, dtype, rank) for rank in on.ranks]
            each = [on.put(part_of(given[on.rank], size, rank), dtype) for rank in on.ranks]
            part = on.empty((size,), dtype)
            wanted = part_of(total(given), size, on.rank)

            def scatters(part: Tensor = part, each: Any = each, wanted: Tensor = wanted) -> None:
                dist.reduce_scatter(part, each)
                on.same(part, wanted, "reduce_scatter of a list")

            on.attempt(scatters, "a reduce-scatter of lists")


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
