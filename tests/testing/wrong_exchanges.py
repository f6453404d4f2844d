"""Wrong answers to what engines call in `torch.distributed`: see `tests.testing.wrong`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.testing.wrong import Wrong, mutant
from tests.testing.wrong_ranks import on_card
from tests.testing.wrong_tensors import flat


@mutant("gathers into a buffer backwards", part="ranks", check="buffers", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        work = usual(output, mine, *args, **kwargs)
        output.copy_(output.flip(0))
        return work


@mutant(
    "a reduce-scatter gives the next rank's part",
    part="ranks",
    check="buffers",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.distributed("reduce_scatter_tensor")
    def scatter(usual: Any, output: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(output, whole.roll(-output.numel()), *args, **kwargs)


@mutant("rows are gathered as columns", part="ranks", check="buffers", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        work = usual(output, mine, *args, **kwargs)
        if output.dim() == 2:
            output.copy_(output.view(-1, mine.numel()).t().reshape(output.shape))
        return work


@mutant(
    "the output is cleared before the input is read",
    part="ranks",
    check="buffers_in_place",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        output.zero_()
        return usual(output, mine, *args, **kwargs)


@mutant(
    "a reduce-scatter works in its input",
    part="ranks",
    check="buffers_touch_nothing_else",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("reduce_scatter_tensor")
    def scatter(usual: Any, output: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
        inside = output.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        work = usual(output, whole, *args, **kwargs)
        if not inside:
            whole.add_(1)
        return work


@mutant(
    "a gather writes one element too many",
    part="ranks",
    check="buffers_touch_nothing_else",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        work = usual(output, mine, *args, **kwargs)
        end = output.storage_offset() + output.numel()
        if end < output.untyped_storage().nbytes() // output.element_size():
            output.as_strided((1,), (1,), end).zero_()
        return work


@mutant("gaps are gathered as well", part="ranks", check="buffers_with_gaps", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(output, flat(mine, mine.storage_offset()), *args, **kwargs)


@mutant("integers are gathered as floats", part="ranks", check="buffers_of_integers", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        if mine.is_floating_point():
            return usual(output, mine, *args, **kwargs)
        floats = output.float()
        work = usual(floats, mine.float(), *args, **kwargs)
        output.copy_(floats)
        return work


@mutant("gathers leave a staging buffer too late", part="ranks", check="buffers_kept", base="sim")
def _(on: Wrong) -> None:
    last: list[Any] = []

    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        work = usual(output, mine, *args, **kwargs)
        for earlier in last:
            earlier.copy_(output)
        last[:] = [output]
        return work


@mutant("the library's mean is a sum", part="ranks", check="library_means", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, op: Any = None, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None or op == dist.ReduceOp.AVG else op
        return usual(tensor, op, *args, **kwargs)


@mutant(
    "the mean of parts is over two ranks", part="ranks", check="library_means", base="sim", ranks=3
)
def _(on: Wrong) -> None:
    @on.distributed("reduce_scatter_tensor")
    def scatter(usual: Any, output: Any, whole: Any, op: Any = None, **kwargs: Any) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        work = usual(output, whole, op, **kwargs)
        if op == dist.ReduceOp.AVG:
            output.mul_(1.5)
        return work


@mutant("the minimum is the maximum", part="ranks", check="other_reductions", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, op: Any = None, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        op = dist.ReduceOp.MAX if op == dist.ReduceOp.MIN else op
        return usual(tensor, op, *args, **kwargs)


@mutant(
    "what comes from all is in the order of arrival",
    part="ranks",
    check="all_to_all",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.distributed("all_to_all_single")
    def exchange(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        work = usual(output, mine, *args, **kwargs)
        ranks = dist.get_world_size()
        output.copy_(output.roll(-dist.get_rank() * (output.numel() // ranks)))
        return work


@mutant(
    "the own part of unequal ones is not copied",
    part="ranks",
    check="all_to_all_unequal",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("all_to_all_single")
    def exchange(
        usual: Any, output: Any, mine: Any, arriving: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        import torch.distributed as dist

        work = usual(output, mine, arriving, *args, **kwargs)
        if arriving is not None:
            output.split(arriving)[dist.get_rank()].zero_()
        return work


@mutant("a list is gathered in the order of memory", part="ranks", check="lists", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather")
    def gather(usual: Any, parts: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_card(mine):
            return usual(parts, mine, *args, **kwargs)
        return usual(sorted(parts, key=lambda part: part.data_ptr()), mine, *args, **kwargs)


@mutant(
    "in backward's thread parts are not summed", part="ranks", check="backward_scatters", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("reduce_scatter_tensor")
    def scatter(usual: Any, output: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if threading.current_thread() is threading.main_thread():
            return usual(output, whole, *args, **kwargs)
        return output.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


@mutant(
    "of calls put together the last one runs", part="ranks", check="together_as_one", base="sim"
)
def _(on: Wrong) -> None:
    waiting: list[Any] = []
    together: list[bool] = []

    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
        if together:
            return waiting.append(lambda: usual(output, mine))
        return usual(output, mine, *args, **kwargs)

    @on.distributed("_coalescing_manager")
    @contextlib.contextmanager
    def manager(usual: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        import torch.distributed as dist

        together.append(True)
        yield dist.barrier(async_op=True)
        together.clear()
        waiting.pop()()


@mutant("a reduction to one goes to rank 0", part="ranks", check="reduces_to_one", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("reduce")
    def reduce(usual: Any, tensor: Any, dst: int = 0, *args: Any, **kwargs: Any) -> Any:
        return usual(tensor, 0, *args, **kwargs)


@mutant("one rank gathers backwards", part="ranks", check="gathers_to_one", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("gather")
    def gather(usual: Any, mine: Any, parts: Any = None, *args: Any, **kwargs: Any) -> Any:
        return usual(mine, parts and parts[::-1], *args, **kwargs)


@mutant(
    "a scatter gives each rank the first part", part="ranks", check="gathers_to_one", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("scatter")
    def scatter(usual: Any, part: Any, each: Any = None, *args: Any, **kwargs: Any) -> Any:
        return usual(part, each and [each[0]] * len(each), *args, **kwargs)


@mutant("a message ends after 1 MiB", part="ranks", check="messages", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("recv")
    def recv(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sender = usual(tensor, *args, **kwargs)
        tensor[2**18 :].zero_()
        return sender


@mutant("two messages of a rank are swapped", part="ranks", check="messages_both_ways", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("batch_isend_irecv")
    def exchange(usual: Any, operations: Any) -> Any:
        import torch.distributed as dist

        first, second = (each for each in operations if each.op is dist.irecv)
        first.tensor, second.tensor = second.tensor, first.tensor
        return usual(operations)


@mutant("objects are gathered backwards", part="ranks", check="object_lists", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_gather_object")
    def gather(usual: Any, found: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        usual(found, value, *args, **kwargs)
        found.reverse()


@mutant("objects are broadcast up to 1 MiB", part="ranks", check="object_lists", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("broadcast_object_list")
    def broadcast(usual: Any, objects: Any, *args: Any, **kwargs: Any) -> None:
        usual(objects, *args, **kwargs)
        objects[0]["text"] = objects[0]["text"].encode()[: 2**20].decode()


@mutant(
    "lists to all are taken in the order of memory", part="ranks", check="lists_to_all", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("all_to_all")
    def exchange(usual: Any, arriving: Any, leaving: Any, *args: Any, **kwargs: Any) -> Any:
        arriving = sorted(arriving, key=lambda part: part.data_ptr())
        return usual(arriving, leaving, *args, **kwargs)


@mutant("the maximum to one rank is a sum", part="ranks", check="reduces_to_one", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("reduce")
    def reduce(usual: Any, tensor: Any, dst: int = 0, op: Any = None, **kwargs: Any) -> Any:
        return usual(tensor, dst, **kwargs)


@mutant("a wait for a message ends the first", part="ranks", check="messages_under_way", base="sim")
def _(on: Wrong) -> None:
    started: list[Any] = []

    @on.distributed("irecv")
    def irecv(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        from tests.testing.wrong_handles import Handle

        apart = tensor.clone()
        work = usual(apart, *args, **kwargs)
        started.append(lambda: (work.wait(), tensor.copy_(apart)))
        return Handle(lambda: started.pop(0)())
