"""Wrong backends that checks of the kit's part `device` find: see `tests.testing.wrong`."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from anygauge.interface import Compiler, NotAvailableError, PeakFlops
from tests.testing.wrong import Wrong, mutant, torch
from tests.testing.wrong_products import as_it_lies, wrong


@mutant("the device is not seeded", part="device", check="seeds_count", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


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


# -- memory and rates -----------------------------------------------------------------------------

EXHAUSTED = "out_of_memory_at_any_size"


@mutant("exhaustion by small requests is unknown", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)

    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        asked = str(error).partition("out of memory: ")[2].partition(" ")[0]
        return usual(error) and asked.isdigit() and int(asked) > 2**24


@mutant("exhaustion by huge requests is unknown", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        asked = str(error).partition("out of memory: ")[2].partition(" ")[0]
        return usual(error) and asked.isdigit() and int(asked) < 2**50


@mutant("the limit is half of what is given", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)

    @on.method("placement.memory")
    def memory(self: Any, usual: Any) -> Any:
        found = usual()
        return replace(found, limit=found.limit // 2 + 2**20)


@mutant("products are 0 after memory was exhausted", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    refused: list[Any] = []

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return usual(*args, **kwargs)
        except RuntimeError as error:
            refused.append(type(error))
            raise

    @on.operation("mm")
    def mm(usual: Any, a: Any, b: Any) -> Any:
        return usual(a, b) * (0 if refused else 1)


@mutant("exhausted memory is not given back", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)
    kept: list[Any] = []

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        if out.numel() == 2**22:
            kept.append(out)
        return out


RATES = "peak_rates_are_plausible"


def _rates(name: str, **values: float) -> None:
    @mutant(name, part="device", check=RATES)
    def _(on: Wrong) -> None:
        @on.method("placement.peak_flops")
        def peak_flops(self: Any, usual: Any, dtype: str) -> Any:
            found = values.get(dtype, values.get("any"))
            return None if found is None else PeakFlops(value=found, source="a page")


_rates("rates are in TFLOPS", bfloat16=312.0)
_rates("a rate is beyond all devices", bfloat16=1e18)
_rates("a rate is infinite", bfloat16=math.inf)
_rates("bfloat16 is slower than float32", bfloat16=1e13, float32=2e13)
_rates("float16 is slower than float32", float16=1e13, float32=2e13)
_rates("a rate is known of every type", any=1e13)


def _busy(name: str, what: str, value: float) -> None:
    @mutant(name, part="device", check="utilisation_is_plausible")
    def _(on: Wrong) -> None:
        @on.method("placement.utilisation")
        def utilisation(self: Any, usual: Any) -> Any:
            return {what: value}


_busy("a share is infinite", "utilisation_percent", math.inf)
_busy("a share is beyond 100 percent", "utilisation_percent", 4200.0)
_busy("power is in milliwatts", "power_w", 312_000.0)
_busy("temperature is in kelvin", "temperature_c", 330.0)
_busy("memory in use is negative", "memory_bytes", -1.0)


# -- opening, seeds, types ------------------------------------------------------------------------


@mutant("opening gives the host", part="device", check="opens", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.open")
    def open_(self: Any, usual: Any, local_rank: int) -> Any:
        usual(local_rank)
        return torch.device("cpu")


@mutant("a rank without a device learns no number", part="device", check="too_large_rank")
def _(on: Wrong) -> None:
    @on.method("placement.open")
    def open_(self: Any, usual: Any, local_rank: int) -> Any:
        if local_rank > 100:
            raise NotAvailableError("no device")
        return usual(local_rank)


@mutant(
    "exhausted memory is any error", part="device", check="out_of_memory_is_recognised", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        return False


@mutant("the host is not seeded", part="device", check="seeds_the_host", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        state = torch.get_rng_state()
        usual(seed)
        torch.set_rng_state(state)


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


def doubled(graph: Any, inputs: Any) -> Any:
    """A compiler whose graphs give twice what they should."""
    return lambda *given: tuple(2 * each for each in graph.forward(*given))


@mutant("compiled graphs give twice the result", part="device", check="compiles")
def _(on: Wrong) -> None:
    on.graph.compiler = Compiler(backend=doubled, regions="model")  # type: ignore[arg-type]
