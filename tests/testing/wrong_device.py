"""Wrong backends that checks of the kit's part `device` find: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_products import as_it_lies, wrong


@mutant("softmax over the wrong dimension", part="device", check="float32_arithmetic", base="sim")
def _(on: Wrong) -> None:
    @on.operation("_softmax")
    def softmax(usual: Any, x: Any, dim: int, half_to_float: bool) -> Any:
        return usual(x, 0, half_to_float)


# -- gradients and views --------------------------------------------------------------------------

LAYER, ACCUMULATE, VIEWS = "gradients_of_a_layer", "gradients_accumulate", "views_share_memory"


@wrong("the gradient of a softmax forgets a term", LAYER, "_softmax_backward_data")
def _(usual: Any, grad: Any, out: Any, *args: Any) -> Any:
    return grad * out


@wrong("a batch of transposed products reads it as it lies", LAYER, "bmm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(a, as_it_lies(b) if 0 not in b.stride() else b)


@wrong("a gradient takes the place of the former", ACCUMULATE, "add_", "add")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    if isinstance(y, torch.Tensor) and x.dim() == 2 and x.shape == y.shape:
        return x.copy_(y) if usual._schema.name.endswith("add_") else y.clone()
    return usual(x, y, **kwargs)


@mutant("a gradient's memory is used again", part="device", check=ACCUMULATE, base="sim")
def _(on: Wrong) -> None:
    buffers: dict[Any, Any] = {}

    @on.operation("mm")
    def mm(usual: Any, a: Any, b: Any) -> Any:
        out = usual(a, b)
        if out.shape[0] > out.shape[1]:  # as of weights, in this layer
            out = buffers.setdefault((out.shape, out.dtype), out).copy_(out)
        return out


@wrong("a slice is a copy", VIEWS, "slice")
def _(usual: Any, x: Any, *args: Any) -> Any:
    return usual(x, *args).clone()


@wrong("a transposed tensor is a copy", VIEWS, "t")
def _(usual: Any, x: Any) -> Any:
    return usual(x).clone()


@wrong("a selected row is a copy", VIEWS, "select")
def _(usual: Any, x: Any, *args: Any) -> Any:
    return usual(x, *args).clone()


@mutant("saved values are overwritten", part="device", check="saved_values_stay", base="sim")
def _(on: Wrong) -> None:
    buffers: list[Any] = []

    @on.operation("exp")
    def exp(usual: Any, x: Any) -> Any:
        buffers.append(usual(x))
        if len(buffers) < 3:
            return buffers[-1]
        reused, fresh = buffers.pop(0), buffers[-1]
        if reused.shape != fresh.shape:
            return fresh
        buffers[-1] = reused
        return reused.detach().as_strided(fresh.shape, fresh.stride()).copy_(fresh)


# -- copies ---------------------------------------------------------------------------------------


def _leaves(x: Any, kwargs: Any) -> bool:
    """Whether a conversion is a copy from the device to the host."""
    return x.device.type == "sim" and torch.device(kwargs.get("device") or "sim").type == "cpu"


def _comes(x: Any, kwargs: Any) -> bool:
    return x.device.type == "cpu" and torch.device(kwargs.get("device") or "cpu").type == "sim"


@wrong("copies to the host begin where memory does", "copies_keep_values", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    if not _leaves(x, kwargs) or not x.numel():
        return usual(x, **kwargs)
    return usual(x.as_strided(x.shape, x.stride(), 0), **kwargs)


@wrong("copies to the host forget strides", "copies_keep_values", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    strided = _leaves(x, kwargs) and x.numel() and 0 not in x.stride()
    return usual(as_it_lies(x) if strided else x, **kwargs)


@wrong("copies onto the device forget strides", "copies_keep_values", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    strided = _comes(x, kwargs) and x.numel() and 0 not in x.stride()
    return usual(as_it_lies(x) if strided else x, **kwargs)


@wrong("the last bytes of a queued copy are lost", "copies_keep_values", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    if _comes(x, kwargs) and kwargs.get("non_blocking") and out.is_contiguous():
        out.view(-1)[out.numel() // 8 * 8 :] = 0
    return out


@wrong("copies end at 4 MiB", "large_copies", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    if _comes(x, kwargs) and out.is_contiguous():
        out.view(-1)[2**22 // out.element_size() :] = 0
    return out


@wrong("the second MiB of a copy to the host is the first again", "large_copies", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    piece = 2**20 // out.element_size()
    if _leaves(x, kwargs) and out.is_contiguous() and out.numel() > 2 * piece:
        out.view(-1)[piece : 2 * piece] = out.view(-1)[:piece].clone()
    return out


@wrong("clones end at 4 MiB", "large_copies", "clone")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    if out.is_contiguous():
        out.view(-1)[2**22 // out.element_size() :] = 0
    return out


@mutant(
    "four staging buffers are used again too early",
    part="device",
    check="queued_copies_stay_apart",
    base="sim",
)
def _(on: Wrong) -> None:
    queued: list[Any] = []

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if _comes(x, kwargs) and kwargs.get("non_blocking"):
            queued.append(out)
            if len(queued) > 4 and queued[-5].dtype == out.dtype:
                early = queued[-5].view(-1)
                count = min(early.numel(), out.numel())
                early[:count] = out.reshape(-1)[:count]
        return out


@mutant(
    "queued copies to the host share a buffer",
    part="device",
    check="queued_copies_stay_apart",
    base="sim",
)
def _(on: Wrong) -> None:
    buffers: dict[Any, Any] = {}

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if not _leaves(x, kwargs) or not kwargs.get("non_blocking"):
            return out
        return buffers.setdefault((out.shape, out.dtype), out).copy_(out)


@mutant(
    "queued copies to the host are made at the end",
    part="device",
    check="copies_are_ordered",
    base="sim",
)
def _(on: Wrong) -> None:
    queued: list[Any] = []

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if _leaves(x, kwargs) and kwargs.get("non_blocking"):
            queued.append((out, x))
        return out

    @on.method("placement.synchronize")
    def synchronize(self: Any, usual: Any) -> None:
        for out, x in queued:
            out.copy_(x)
        queued.clear()
        usual()


@mutant(
    "a copy that waits reads the host later", part="device", check="copies_are_ordered", base="sim"
)
def _(on: Wrong) -> None:
    queued: list[Any] = []

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if _comes(x, kwargs):
            queued.append((out, x))
        return out

    @on.operation("mul")
    def mul(usual: Any, *args: Any) -> Any:
        for out, x in queued:
            out.copy_(x)
        queued.clear()
        return usual(*args)


@wrong("a clone is the tensor itself", "copies_are_ordered", "clone")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    return x.as_strided(x.shape, x.stride(), x.storage_offset())


@mutant(
    "memory is given out in steps that are too small",
    part="device",
    check="memory_is_not_given_twice",
    base="sim",
)
def _(on: Wrong) -> None:
    arenas: dict[Any, list[Any]] = {}

    @on.operation("full")
    def full(usual: Any, sizes: Any, value: Any, **kwargs: Any) -> Any:
        count = torch.Size(sizes).numel()
        arena = arenas.setdefault(kwargs.get("dtype"), [usual([2**23], 0, **kwargs), 0])
        start, arena[1] = arena[1], arena[1] + count // 16 * 16
        return arena[0][start : start + count].view(sizes).fill_(value)


@mutant("silu of bfloat16 is a ramp", part="device", check="bfloat16_arithmetic", base="sim")
def _(on: Wrong) -> None:
    @on.operation("silu")
    def silu(usual: Any, x: Any) -> Any:
        return x.relu() if x.dtype is torch.bfloat16 else usual(x)


@mutant("autocast lowers float32, too", part="device", check="autocast_to_float32", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.autocast")
    def autocast(self: Any, usual: Any, dtype: Any) -> Any:
        return usual(torch.bfloat16)
