"""Wrong for some views, sizes or types alone: see `tests.testing.wrong`.

Each is right wherever else it is called, so one line of a table of the kit finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_ranks import on_card
from tests.testing.wrong_tensors import flat

LARGE = 2**15
"""Elements from which a tensor counts as large."""


def exchange(name: str, check: str, *functions: str) -> Callable[[Any], Any]:
    """Decorator: simulated cards of whose library one function is the decorated one."""

    def register(function: Any) -> Any:
        @mutant(name, part="ranks", check=check, base="sim")
        def _(on: Wrong) -> None:
            on.distributed(*functions)(function)

        return function

    return register


class Spoilt:
    """A handle, and what is done once it was waited for."""

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        self._work, self._then = work, then

    def wait(self, *args: Any) -> Any:
        found = self._work.wait(*args)
        self._then()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def afterwards(work: Any, then: Callable[[], Any]) -> Any:
    """Do it now, or after the wait where there is a handle."""
    if work is not None:
        return Spoilt(work, then)
    then()
    return None


# -- reductions -----------------------------------------------------------------------------------

REDUCTIONS = "reductions_of_views"


@exchange("a view is reduced to one rank from where its memory begins", REDUCTIONS, "reduce")
def _(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    return usual(flat(tensor, 0) if tensor.numel() < room else tensor, *args, **kwargs)


@exchange("large two-byte parts are summed one place further", REDUCTIONS, "reduce_scatter_tensor")
def _(usual: Any, part: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(part, whole, *args, **kwargs)
    if part.numel() < LARGE or part.dtype.itemsize != 2:
        return work
    return afterwards(work, lambda: part.copy_(part.roll(1)))


@exchange("of views in a list the last element is not summed", REDUCTIONS, "reduce_scatter")
def _(usual: Any, part: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(part, parts, *args, **kwargs)
    if part.storage_offset() == 0:
        return work
    return afterwards(work, lambda: part.view(-1)[-1:].zero_())


@exchange("the maximum of large integers goes through 32 bits", REDUCTIONS, "all_reduce")
def _(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(tensor, *args, **kwargs)
    if tensor.dtype is not torch.int64 or tensor.numel() < LARGE or not on_card(tensor):
        return work
    return afterwards(work, lambda: tensor.copy_(tensor.int()))


# -- gathers, scatters and broadcasts -------------------------------------------------------------

COPIES = "copies_of_views"


@exchange("large tensors are gathered to one rank through bfloat16", COPIES, "gather")
def _(usual: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
    shorter = mine.is_floating_point() and mine.numel() >= LARGE
    return usual(mine.bfloat16().to(mine.dtype) if shorter else mine, *args, **kwargs)


@exchange("a scatter into a view leaves out what fills no block of 16", COPIES, "scatter")
def _(usual: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(part, *args, **kwargs)
    rest = part.numel() % 16
    if not rest or part.storage_offset() == 0:
        return work
    return afterwards(work, lambda: part.view(-1)[-rest:].zero_())


@exchange("rows of a buffer are broadcast with the first and last exchanged", COPIES, "broadcast")
def _(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(tensor, *args, **kwargs)
    if tensor.dim() != 2 or tensor.storage_offset() == 0 or not on_card(tensor):
        return work
    return afterwards(work, lambda: tensor.copy_(tensor.flip(0)))


@exchange("a large two-byte tensor in a list is half gathered", COPIES, "all_gather")
def _(usual: Any, parts: Any, mine: Any, *args: Any, **kwargs: Any) -> Any:
    work = usual(parts, mine, *args, **kwargs)
    if mine.dtype.itemsize != 2 or mine.numel() < LARGE or not on_card(mine):
        return work
    return afterwards(work, lambda: parts[-1].view(-1)[mine.numel() // 2 :].zero_())


# -- exchanges ------------------------------------------------------------------------------------

EXCHANGES = "exchanges_of_views"


@exchange("parts of a view for all begin where its memory does", EXCHANGES, "all_to_all_single")
def _(usual: Any, received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
    inside = sent.storage_offset() > 0 and not args
    return usual(received, flat(sent, 0).view(sent.shape) if inside else sent, *args, **kwargs)


@exchange("lists of large two-byte tensors lose four bits", EXCHANGES, "all_to_all")
def _(usual: Any, arriving: Any, leaving: Any, *args: Any, **kwargs: Any) -> Any:
    if leaving[0].dtype.itemsize == 2 and leaving[0].numel() >= LARGE:
        leaving = [(each.view(torch.int16) & -16).view(each.dtype) for each in leaving]
    return usual(arriving, leaving, *args, **kwargs)


@exchange("a message into a view stands one place further", EXCHANGES, "recv")
def _(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    sender = usual(tensor, *args, **kwargs)
    if tensor.storage_offset() > 0:
        tensor.copy_(tensor.view(-1).roll(1).view(tensor.shape))
    return sender
