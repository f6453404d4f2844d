"""Wrong for some views, sizes or types alone: see `tests.testing.wrong`.

Each is right wherever else it is called, so one line of a table of the kit finds it.
"""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_products import as_it_lies, wrong

LARGE = 2**15
"""Elements from which a tensor counts as large."""


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
