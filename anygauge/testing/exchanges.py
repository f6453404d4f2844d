"""Checks of what else engines call in `torch.distributed` where all ranks take part alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.testing.buffers import PARTS, part_of, whole_of
from anygauge.testing.together import LARGE, Together, bound, check_on_ranks, total


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
    "lists are exchanged between all ranks, wherever the library has it",
    means="Tokens reach the wrong expert; the library builds this form from messages between two "
    "ranks, and takes them in the order of memory or arrival.",
)
def lists_to_all(on: Together) -> None:
    on.asked_by_engines()
    for size in PARTS:
        sent = [whole_of(on, size, torch.float32, rank) for rank in on.ranks]
        leaving = [on.put(part_of(sent[on.rank], size, rank), torch.float32) for rank in on.ranks]
        whole = on.empty((size * on.world_size,), torch.float32)
        # In the reverse order of memory, so that the order of the list counts.
        arriving = list(whole.chunk(on.world_size))[::-1]

        def exchanges(arriving: Any = arriving, leaving: Any = leaving) -> None:
            dist.all_to_all(arriving, leaving)

        on.required_or_not_asked(exchanges, "all_to_all of lists")
        wanted = torch.cat([part_of(each, size, on.rank) for each in sent[::-1]])
        on.same(whole, wanted, "all_to_all of lists")
