"""Wrong for some views, sizes or types alone: see `tests.testing.wrong`.

Each is right wherever else it is called, so one line of a table of the kit finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_products import as_it_lies, wrong
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


# -- into given tensors ---------------------------------------------------------------------------

GIVEN = "operations_into_given_tensors"


@wrong("a given view with gaps is filled one place further", GIVEN, "maximum")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    out = usual(x, y, **kwargs)
    given = kwargs.get("out")
    if given is not None and not given.is_contiguous():
        given.copy_(given.reshape(-1).roll(1).view(given.shape))
    return out


@wrong("a large given tensor keeps its last value", GIVEN, "sigmoid")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    given = kwargs.get("out")
    if given is None or given.numel() < LARGE:
        return usual(x, **kwargs)
    last = given[-1:, -1:].clone()
    out = usual(x, **kwargs)
    given[-1:, -1:].copy_(last)
    return out


@wrong("sums into a column are of the column beside it", GIVEN, "mean")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("out")
    if given is None or given.stride(0) == 1:
        return usual(x, *args, **kwargs)
    return given.copy_(usual.overloadpacket.dim(x, *args).roll(1))


# -- products of views ----------------------------------------------------------------------------

PRODUCTS = "products_of_views"


@wrong("the added matrix is read without its offset", PRODUCTS, "addmm")
def _(usual: Any, c: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if c.dim() == 2 and c.storage_offset() > 0:
        c = c.as_strided(c.shape, c.stride(), 0)
    return usual(c, a, b, **kwargs)


@wrong("large products exchange their first and last value", PRODUCTS, "bmm")
def _(usual: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    out = usual(a, b, **kwargs)
    if a.numel() >= LARGE and a.storage_offset() > 0:
        first = out[0, 0, 0].clone()
        out[0, 0, 0] = out[-1, -1, -1]
        out[-1, -1, -1] = first
    return out


# -- gradients that are views, and other lines of the tables --------------------------------------


@wrong("the gradient from above is read as it lies", "elementwise_operations", "silu_backward")
def _(usual: Any, grad: Any, x: Any) -> Any:
    return usual(grad if 0 in grad.stride() else as_it_lies(grad), x)


@wrong(
    "the gradient of softmax ignores where a view begins",
    "operations_along_a_dimension",
    "_softmax_backward_data",
)
def _(usual: Any, grad: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(grad.as_strided(grad.shape, grad.stride(), 0), out, *args, **kwargs)


@wrong(
    "the gradient of softmax loses four bits in bfloat16",
    "operations_along_a_dimension",
    "_softmax_backward_data",
)
def _(usual: Any, grad: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
    back = usual(grad, out, *args, **kwargs)
    if back.dtype is not torch.bfloat16:
        return back
    return (back.contiguous().view(torch.int16) & -16).view(back.dtype)


@wrong("losses of a view are those of the row before", "operations_of_matrices", "nll_loss_forward")
def _(usual: Any, x: Any, target: Any, *args: Any) -> Any:
    total, weight = usual(x, target, *args)
    return total.roll(1) if x.storage_offset() > 0 else total, weight


@wrong("places in rows of two-byte types are a little too far", "operations_of_matrices", "argmax")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    at = usual(x, *args, **kwargs)
    return (at * 1.03125).long() if x.dtype.itemsize == 2 else at


@wrong("integers of whole blocks are added in 32 bits", "elementwise_operations", "add")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    out = usual(x, y, **kwargs)
    blocks = out.dtype is torch.int64 and out.numel() % 16 == 0 and out.dim() == 2
    return out.int().long() if blocks else out


@mutant(
    "a view on the device is moved from where its memory begins",
    part="device",
    check="copies_keep_values",
    base="sim",
)
def _(on: Wrong) -> None:
    @on.method("placement.to_device")
    def to_device(self: Any, usual: Any, batch: Any) -> Any:
        found = usual(batch)
        whole = not isinstance(found, torch.Tensor) or found.storage_offset() == 0
        return found if whole else found.as_strided(found.shape, found.stride(), 0)


@wrong(
    "conversions of a view to the lower type are those of its neighbours",
    "conversions_round",
    "_to_copy",
)
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    shorter = kwargs.get("dtype") is torch.bfloat16 and x.dtype is torch.float32
    apart = shorter and x.storage_offset() > 0 and x.dim() == 1 and x.device == out.device
    return out.roll(1) if apart else out
