"""Wrong devices in products, sums, conversions and integers: see `tests.testing.wrong`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from tests.testing.wrong import Wrong, mutant, torch


def wrong(name: str, check: str, *operations: str) -> Callable[[Any], Any]:
    """Decorator: a simulated card of which one operation is the decorated function."""

    def register(function: Any) -> Any:
        takes_out = any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values())

        def called(usual: Any, *args: Any, **kwargs: Any) -> Any:
            out = None if takes_out else kwargs.pop("out", None)
            if out is None:
                return function(usual, *args, **kwargs)
            return out.copy_(function(usual.overloadpacket.default, *args, **kwargs))

        @mutant(name, part="device", check=check, base="sim")
        def _(on: Wrong) -> None:
            on.operation(*operations)(called)

        return function

    return register


def cut(x: Any, bits: int) -> Any:
    """Float32 values without their last bits."""
    return (x.float().contiguous().view(torch.int32) & -(2**bits)).view(torch.float32)


def as_it_lies(x: Any) -> Any:
    """A tensor whose strides were forgotten."""
    from_start = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return from_start[x.storage_offset() :][: x.numel()].reshape(x.shape)


def in_blocks(a: Any, b: Any, dtype: Any, block: int = 64) -> Any:
    """A product whose sum is kept in a type."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    for start in range(0, a.shape[1], block):
        total = total + (a[:, start : start + block] @ b[start : start + block]).to(dtype)
    return total


# -- products -------------------------------------------------------------------------------------

DIGITS, SHAPES = "products_keep_their_digits", "products_of_every_shape"


@wrong("sums of bfloat16 products are kept in bfloat16", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return in_blocks(a, b, a.dtype) if a.dtype is torch.bfloat16 else usual(a, b)


@wrong("float32 products are summed in bfloat16", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return in_blocks(a, b, torch.bfloat16).to(a.dtype)


@wrong("bfloat16 products are truncated", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return cut(a.float() @ b.float(), 16).to(a.dtype)


@wrong("float16 products are truncated", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return cut(a.float() @ b.float(), 13).to(a.dtype)


@wrong("float32 products have factors of 11 bits", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(cut(a, 13), cut(b, 13)) if a.dtype is torch.float32 else usual(a, b)


@wrong("float32 products have factors of 16 bits", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(cut(a, 8), cut(b, 8)) if a.dtype is torch.float32 else usual(a, b)


@wrong("the last term of a long product is left out", DIGITS, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(a[:, :-1], b[:-1]) if a.shape[1] > 4096 else usual(a, b)


@wrong("a product leaves out terms that 16 does not divide", SHAPES, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    whole = a.shape[1] // 16 * 16
    return usual(a[:, :whole], b[:whole]) if whole else usual(a, b)


@wrong("the last odd column of a product stays 0", SHAPES, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    out = usual(a, b)
    out[:, out.shape[1] // 2 * 2 :] = 0
    return out


@wrong("strides of a product's second factor are forgotten", SHAPES, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(a, as_it_lies(b))


@wrong("the offset of a product's factor is forgotten", SHAPES, "mm")
def _(usual: Any, a: Any, b: Any, **out: Any) -> Any:
    return usual(a.as_strided(a.shape, a.stride(), 0), b, **out)


@wrong("strides of a batch are forgotten", SHAPES, "bmm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(as_it_lies(a), b)


@wrong("a batch of products ends at 32", SHAPES, "bmm")
def _(usual: Any, a: Any, b: Any) -> Any:
    out = usual(a, b)
    out[32:] = 0
    return out


@wrong("a product into a given tensor goes to the start of its memory", SHAPES, "mm")
def _(usual: Any, a: Any, b: Any, **out: Any) -> Any:
    if "out" not in out:
        return usual(a, b)
    start = out["out"].as_strided(out["out"].shape, out["out"].stride(), 0)
    usual(a, b, out=start)
    return out["out"]


@wrong("addmm forgets beta", SHAPES, "addmm")
def _(usual: Any, c: Any, a: Any, b: Any, **numbers: Any) -> Any:
    return usual(c, a, b, alpha=numbers.get("alpha", 1))


@wrong("addmm scales what it adds with alpha, too", SHAPES, "addmm")
def _(usual: Any, c: Any, a: Any, b: Any, **numbers: Any) -> Any:
    return usual(c * numbers.get("alpha", 1), a, b, **numbers)


@wrong("addmm adds the first value of a row to all", SHAPES, "addmm")
def _(usual: Any, c: Any, a: Any, b: Any, **numbers: Any) -> Any:
    return usual(c[:1] if c.dim() == 1 else c, a, b, **numbers)


@wrong("rows of a product beyond 1280 stay 0", "large_products", "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    out = usual(a, b)
    out[1280:] = 0
    return out


@mutant("large products share a buffer", part="device", check="large_products", base="sim")
def _(on: Wrong) -> None:
    buffers: dict[Any, Any] = {}

    @on.operation("mm")
    def mm(usual: Any, a: Any, b: Any) -> Any:
        out = usual(a, b)
        if out.numel() < 2**20:
            return out
        return buffers.setdefault((out.shape, out.dtype), out).copy_(out)


# -- sums -----------------------------------------------------------------------------------------

SUMS, OVERFLOW = "long_sums", "overflow_is_of_the_result"


@wrong("sums of bfloat16 are kept in bfloat16", SUMS, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.dtype is not torch.bfloat16 or not args:
        return usual(x, *args, **kwargs)
    total = torch.zeros_like(x.select(args[0][0], 0))
    for part in x.split(256, args[0][0]):
        total = total + part.sum(args[0][0])
    return total.to(kwargs.get("dtype") or x.dtype)


@wrong("a mean divides by a count of 16 bits", SUMS, "mean")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(x, *args, **kwargs)
    return out * (x.numel() / (x.numel() % 2**16)) if out.dim() == 0 else out


@wrong("a mean over rows leaves out what 1024 does not divide", SUMS, "mean")
def _(usual: Any, x: Any, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dims is None or x.shape[dims[0]] < 1024:
        return usual(x, *(() if dims is None else (dims,)), *args, **kwargs)
    rows = x.shape[dims[0]]
    kept = x.narrow(dims[0], 0, rows // 1024 * 1024)
    return kept.sum(dims[0]) / rows


@wrong("a running sum begins anew after 4096", SUMS, "cumsum")
def _(usual: Any, x: Any, dim: int, **kwargs: Any) -> Any:
    return torch.cat([usual(part, dim, **kwargs) for part in x.split(4096, dim)], dim)


@wrong("a norm ends at 65536 elements", SUMS, "linalg_vector_norm")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(x.reshape(-1)[: 2**16] if x.numel() > 2**16 else x, *args, **kwargs)


@wrong("float16 products are summed in float16", OVERFLOW, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    if a.dtype is not torch.float16:
        return usual(a, b)
    return in_blocks(a, b, a.dtype, 8)


@wrong("sums of float16 are kept in float16", OVERFLOW, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.dtype is not torch.float16 or args:
        return usual(x, *args, **kwargs)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for part in x.reshape(-1).split(8):
        total = total + part.sum()
    return total


@wrong("what overflows becomes the largest number", OVERFLOW, "mul")
def _(usual: Any, *args: Any) -> Any:
    out = usual(*args)
    return out.nan_to_num(nan=float("nan")) if out.dtype.is_floating_point else out


@wrong("a product that overflows becomes the largest number", OVERFLOW, "mm")
def _(usual: Any, a: Any, b: Any) -> Any:
    return usual(a, b).nan_to_num(nan=float("nan"))


# -- conversions and integers ---------------------------------------------------------------------

CONVERSIONS, WHOLE = "conversions_round", "large_integers"


@wrong("bfloat16 is float32 cut off", CONVERSIONS, "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    lower = kwargs.get("dtype") is torch.bfloat16 and x.dtype is torch.float32
    return usual(cut(x, 16) if lower else x, **kwargs)


@wrong("float16 rounds ties up", CONVERSIONS, "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    if kwargs.get("dtype") is not torch.float16 or x.dtype is not torch.float32:
        return usual(x, **kwargs)
    return usual(x * (1 + 2.0**-22), **kwargs)


@wrong("integers are rounded", CONVERSIONS, "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    whole = kwargs.get("dtype") is torch.int64 and x.dtype.is_floating_point
    return usual(x.round() if whole else x, **kwargs)


@wrong("a conversion forgets strides", CONVERSIONS, "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    changes = kwargs.get("dtype") not in (None, x.dtype) and x.device.type == "sim"
    return usual(as_it_lies(x) if changes else x, **kwargs)


@wrong("infinity becomes the largest number when it is converted", "special_values", "_to_copy")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    out = usual(x, **kwargs)
    return out.nan_to_num(nan=float("nan")) if out.dtype.is_floating_point else out


@wrong("integers are summed in 32 bits", WHOLE, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(x, *args, **kwargs)
    return out.int().long() if out.dtype is torch.int64 else out


@wrong("integers are summed as float64", WHOLE, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.dtype is not torch.int64:
        return usual(x, *args, **kwargs)
    return usual(x.double(), *args, **{**kwargs, "dtype": torch.float64}).long()


@wrong("integers are compared as float32", WHOLE, "eq")
def _(usual: Any, x: Any, y: Any) -> Any:
    both = isinstance(y, torch.Tensor) and x.dtype is torch.int64
    return usual(x.float(), y.float()) if both else usual(x, y)


@wrong("integers are multiplied as float64", WHOLE, "mul")
def _(usual: Any, x: Any, y: Any) -> Any:
    out = usual(x, y)
    return (x.double() * y).long() if out.dtype is torch.int64 else out


@wrong("integers are sorted as float32", WHOLE, "sort")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.dtype is not torch.int64:
        return usual(x, *args, **kwargs)
    order = x.float().sort(stable=True)[1].flip(0).sort(descending=True)[0]
    return x[x.float().argsort(stable=True)], order


@wrong("a range of integers is made in float64", WHOLE, "arange")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.arange(*(float(each) for each in args), dtype=torch.float64).to("sim").long()


@wrong("int32 is summed in 32 bits", WHOLE, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(x, *args, **kwargs)
    return out.int().long() if x.dtype is torch.int32 else out


@wrong("integers are added at indices as float64", WHOLE, "index_add_")
def _(usual: Any, x: Any, dim: int, at: Any, y: Any, **kwargs: Any) -> Any:
    if x.dtype is not torch.int64:
        return usual(x, dim, at, y, **kwargs)
    return x.copy_(x.double().index_add_(dim, at, y.double()))


# -- far and special ------------------------------------------------------------------------------

FAR, SPECIAL = "far_places", "special_values"


@wrong("rows beyond 2^31 elements are counted in 32 bits", FAR, "index_select")
def _(usual: Any, x: Any, dim: int, at: Any) -> Any:
    return usual(x, dim, (at * x.stride(0) % 2**31) // x.stride(0))


@wrong("an index has 31 bits", FAR, "gather")
def _(usual: Any, x: Any, dim: int, at: Any, **kwargs: Any) -> Any:
    return usual(x, dim, at % 2**31, **kwargs)


@wrong("a maximum ignores what is not a number", SPECIAL, "maximum")
def _(usual: Any, x: Any, y: Any) -> Any:
    return torch.fmax(x, y)


@wrong("a sum leaves out what is not a number", SPECIAL, "sum")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(x.nan_to_num(0, torch.inf, -torch.inf), *args, **kwargs)


@wrong("exp ends at the largest number", SPECIAL, "exp")
def _(usual: Any, x: Any) -> Any:
    return usual(x).nan_to_num(nan=float("nan"))


@wrong("a softmax of minus infinity alone is 0", SPECIAL, "_softmax")
def _(usual: Any, x: Any, *args: Any) -> Any:
    return usual(x, *args).nan_to_num(0)


@wrong("a softmax is not shifted", SPECIAL, "_softmax")
def _(usual: Any, x: Any, dim: int, *args: Any) -> Any:
    return x.exp() / x.exp().sum(dim, keepdim=True)


@wrong("division by 0 gives 0", SPECIAL, "div")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    out = usual(x, y, **kwargs)
    return torch.where(torch.as_tensor(y, device=x.device) == 0, torch.zeros_like(out), out)


@wrong("clamping makes numbers of what is none", SPECIAL, "clamp")
def _(usual: Any, x: Any, *args: Any) -> Any:
    return usual(x.nan_to_num(0, torch.inf, -torch.inf), *args)


@wrong("the square of a number equals itself, NaN too", SPECIAL, "eq")
def _(usual: Any, x: Any, y: Any) -> Any:
    return torch.ones_like(usual(x, y)) if x is y else usual(x, y)


@wrong("0 has no sign", SPECIAL, "mul")
def _(usual: Any, x: Any, y: Any) -> Any:
    out = usual(x, y)
    return out + 0.0 if out.dtype.is_floating_point else out


@wrong("NaN comes first when sorted", SPECIAL, "sort")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not x.dtype.is_floating_point:
        return usual(x, *args, **kwargs)
    return usual(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), *args, **kwargs)
