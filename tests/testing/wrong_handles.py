"""Wrong asynchronous work: see `tests.testing.wrong`.

The work is done when it is started, on copies; what is wrong is when its result gets to the tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from tests.testing.wrong import Wrong, mutant
from tests.testing.wrong_ranks import on_card


class Handle:
    """Of work that ends when it is waited for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def is_completed(self) -> bool:
        return True


def summed_apart(usual: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """The result of an asynchronous all_reduce, which `tensor` does not have yet."""
    result = tensor.clone()
    usual(result, *args, **{**kwargs, "async_op": False})
    return result


def is_asynchronous(tensor: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("async_op")) and on_card(tensor)


@mutant("a wait ends the work before it", part="ranks", check="asynchronous", base="sim")
def _(on: Wrong) -> None:
    started: list[Callable[[], None]] = []

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        result = summed_apart(usual, tensor, args, kwargs)
        number = len(started)
        started.append(lambda: tensor.copy_(result))
        return Handle(lambda: started[number - 1]() if number else None)


@mutant("large work has not ended after a wait", part="ranks", check="asynchronous", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        result = summed_apart(usual, tensor, args, kwargs).view(-1)
        return Handle(lambda: tensor.view(-1)[: 2**17].copy_(result[: 2**17]))


@mutant(
    "work ends in the order of its start", part="ranks", check="handles_in_any_order", base="sim"
)
def _(on: Wrong) -> None:
    started: list[Callable[[], None]] = []

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        result = summed_apart(usual, tensor, args, kwargs)
        started.append(lambda: tensor.copy_(result))
        return Handle(lambda: started.pop(0)())


@mutant("all kinds of work end in one order", part="ranks", check="handles_of_kinds", base="sim")
def _(on: Wrong) -> None:
    started: list[Callable[[], None]] = []

    @on.distributed("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    def move(usual: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(output, kwargs):
            return usual(output, given, *args, **kwargs)
        result = output.clone()
        usual(result, given, *args, **{**kwargs, "async_op": False})
        started.append(lambda: output.copy_(result))
        return Handle(lambda: started.pop(0)())


@mutant(
    "an asynchronous broadcast is from rank 0", part="ranks", check="handles_of_kinds", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("broadcast")
    def broadcast(usual: Any, tensor: Any, src: int = 0, *args: Any, **kwargs: Any) -> Any:
        return usual(tensor, 0 if kwargs.get("async_op") else src, *args, **kwargs)


@mutant(
    "results are written again at a synchronisation",
    part="ranks",
    check="handles_are_final",
    base="sim",
)
def _(on: Wrong) -> None:
    ended: list[Callable[[], None]] = []

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        result = summed_apart(usual, tensor, args, kwargs)
        ended.append(lambda: tensor.copy_(result))
        return Handle(ended[-1])

    @on.method("placement.synchronize")
    def synchronize(self: Any, usual: Any) -> None:
        for write in ended:
            write()
        usual()


@mutant("each wait divides a mean", part="ranks", check="handles_are_waited_for_twice", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if kwargs.get("op") != dist.ReduceOp.AVG or not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        usual(tensor, op=dist.ReduceOp.SUM)
        return Handle(lambda: tensor.div_(dist.get_world_size()))


@mutant(
    "a second wait writes what came in between",
    part="ranks",
    check="handles_are_waited_for_twice",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(output, kwargs):
            return usual(output, given, *args, **kwargs)
        usual(output, given, *args, **{**kwargs, "async_op": False})
        parts = output.clone()
        waits: list[None] = []

        def wait() -> None:
            waits.append(None)
            output.copy_(parts if len(waits) == 1 else parts.flip(0))

        return Handle(wait)


@mutant("a future is done when its work has begun", part="ranks", check="futures", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        result = summed_apart(usual, tensor, args, kwargs)
        work: Any = Handle(lambda: tensor.copy_(result))
        future: Any = torch.futures.Future()
        future.set_result([tensor])
        work.get_future = lambda: future
        return work


@mutant(
    "handles of backward's thread do not wait",
    part="ranks",
    check="started_in_backward",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return usual(tensor, *args, **kwargs)
        summed_apart(usual, tensor, args, kwargs)
        return Handle(lambda: None)


@mutant(
    "memory of a running input is given away", part="ranks", check="inputs_are_held", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("all_gather_into_tensor")
    def gather(usual: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asynchronous(output, kwargs):
            return usual(output, given, *args, **kwargs)
        source = weakref.ref(given)

        def wait() -> None:
            found = source()
            if found is None:
                output.fill_(-1)  # what the memory holds by now
            else:
                usual(output, found)

        return Handle(wait)


@mutant(
    "a collective overtakes the computation before it",
    part="ranks",
    check="in_order_with_work",
    base="sim",
)
def _(on: Wrong) -> None:
    late: list[Callable[[], Any]] = []

    @on.operation("sub_")
    def subtract(usual: Any, tensor: Any, number: Any) -> Any:
        late.append(lambda: tensor.add_(number, alpha=-1))
        return tensor

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_card(tensor):
            return usual(tensor, *args, **kwargs)
        usual(tensor, *args, **{**kwargs, "async_op": False})
        while late:
            late.pop()()
        return Handle(lambda: None)
