"""Wrong devices that the tables of operations find: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import torch
from tests.testing.wrong_products import as_it_lies, cut, wrong

# -- on each element ------------------------------------------------------------------------------

EACH = "elementwise_operations"


@wrong("the last elements of a large odd size stay 0", EACH, "add")
def _(usual: Any, *args: Any, **kwargs: Any) -> Any:
    out = usual(*args, **kwargs)
    if out.numel() > 4096 and out.is_contiguous():
        out.view(-1)[out.numel() // 4 * 4 :] = 0
    return out


@wrong("elements beyond 65536 are not computed", EACH, "sigmoid")
def _(usual: Any, x: Any) -> Any:
    out = usual(x)
    out.as_strided((out.numel(),), (1,))[2**16 :] = 0
    return out


@wrong("strides are forgotten", EACH, "silu")
def _(usual: Any, x: Any) -> Any:
    return usual(as_it_lies(x)) if x.numel() and 0 not in x.stride() else usual(x)


@wrong("the second input is read in the order of the first", EACH, "mul")
def _(usual: Any, x: Any, y: Any) -> Any:
    alike = isinstance(y, torch.Tensor) and x.shape == y.shape and x.stride() != y.stride()
    return usual(x, as_it_lies(y) if alike and 0 not in y.stride() else y)


@wrong("an offset in memory is forgotten", EACH, "tanh")
def _(usual: Any, x: Any) -> Any:
    return usual(x.as_strided(x.shape, x.stride(), 0))


@wrong("an expanded dimension counts as one", EACH, "exp")
def _(usual: Any, x: Any) -> Any:
    out = usual(x)
    if x.dim() == 2 and x.stride(0) == 0:
        out[1:] = 0
    return out


@wrong("a tensor without dimensions is left alone", EACH, "sqrt")
def _(usual: Any, x: Any) -> Any:
    return x.clone() if x.dim() == 0 else usual(x)


@wrong("a row is added to the first row alone", EACH, "add")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    if not isinstance(y, torch.Tensor) or y.dim() != 1 or x.dim() != 2:
        return usual(x, y, **kwargs)
    out = x.clone()
    out[:1] += y
    return out


@wrong("exp has three digits", EACH, "exp")
def _(usual: Any, x: Any) -> Any:
    return usual(x) * 1.001


@wrong("rsqrt has five digits", EACH, "rsqrt")
def _(usual: Any, x: Any) -> Any:
    return usual(x) * (1 + 1e-5)


@wrong("log is taken in bfloat16", EACH, "log")
def _(usual: Any, x: Any) -> Any:
    return usual(x.bfloat16()).to(x.dtype)


@wrong("gelu is always the one by tanh", EACH, "gelu")
def _(usual: Any, x: Any, **kwargs: Any) -> Any:
    return usual(x, approximate="tanh")


@wrong("alpha is forgotten", EACH, "add")
def _(usual: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return usual(x, y)


@wrong("bfloat16 is multiplied with truncation", EACH, "mul")
def _(usual: Any, x: Any, y: Any) -> Any:
    out = usual(x, y)
    return cut(x.float() * y, 16).to(out.dtype) if out.dtype is torch.bfloat16 else out


@wrong("a power is made of exp and log", EACH, "pow")
def _(usual: Any, x: Any, power: Any) -> Any:
    return (x.log() * power).exp() if isinstance(power, float | int) else usual(x, power)


@wrong("floor division cuts towards 0", EACH, "floor_divide")
def _(usual: Any, x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


@wrong("the gradient of silu forgets a term", EACH, "silu_backward")
def _(usual: Any, grad: Any, x: Any) -> Any:
    return grad * torch.sigmoid(x)


@wrong("the gradient of a division leaves out the divisor", EACH, "div")
def _(usual: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    return usual(x, y.abs() if isinstance(y, torch.Tensor) else y, **kwargs)


@wrong("lerp takes the weight of the other", EACH, "lerp")
def _(usual: Any, x: Any, y: Any, weight: Any) -> Any:
    return usual(y, x, weight)


@wrong("where takes the other of two views", EACH, "where")
def _(usual: Any, mask: Any, x: Any, y: Any) -> Any:
    return usual(mask, x, y) if x.is_contiguous() else usual(mask, y, x)


# -- in place -------------------------------------------------------------------------------------

IN_PLACE = "operations_in_place"


@wrong("adding in place goes to the start of memory", IN_PLACE, "add_")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    usual(x.as_strided(x.shape, x.stride(), 0), *args, **kwargs)
    return x


@wrong("filling fills what lies between, too", IN_PLACE, "fill_")
def _(usual: Any, x: Any, value: Any) -> Any:
    if x.numel() and x.dim():
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        usual(x.as_strided((last + 1,), (1,)), value)
    return x if x.dim() else usual(x, value)


@wrong("a value of addcdiv_ is forgotten", IN_PLACE, "addcdiv_")
def _(usual: Any, x: Any, y: Any, z: Any, value: float = 1) -> Any:
    return usual(x, y, z)


@wrong("a mask is read as it lies", IN_PLACE, "masked_fill_")
def _(usual: Any, x: Any, mask: Any, value: Any) -> Any:
    return usual(x, as_it_lies(mask) if 0 not in mask.stride() else mask, value)


@wrong("multiplying a view in place is lost", IN_PLACE, "mul_")
def _(usual: Any, x: Any, y: Any) -> Any:
    return usual(x, y) if x.is_contiguous() else x


@wrong("copying onto a view is in the order of the source", IN_PLACE, "copy_")
def _(usual: Any, x: Any, y: Any, *args: Any) -> Any:
    alike = x.device == y.device and x.shape == y.shape and 0 not in y.stride()
    return usual(x, as_it_lies(y) if alike else y, *args)


@wrong("in place, the last odd row is left alone", IN_PLACE, "neg_")
def _(usual: Any, x: Any) -> Any:
    if x.dim() and x.shape[0] > 1:
        usual(x[: x.shape[0] // 2 * 2])
        return x
    return usual(x)


# -- along a dimension ----------------------------------------------------------------------------

ALONG = "operations_along_a_dimension"


@wrong("a softmax in the middle is along the last dimension", ALONG, "_softmax")
def _(usual: Any, x: Any, dim: int, *args: Any) -> Any:
    return usual(x, -1 if dim == 1 else dim, *args)


@wrong(
    "the gradient of log_softmax is along the last dimension", ALONG, "_log_softmax_backward_data"
)
def _(usual: Any, grad: Any, out: Any, dim: int, dtype: Any) -> Any:
    return usual(grad, out, -1, dtype)


@wrong("a sum along the middle ends at 256", ALONG, "sum")
def _(usual: Any, x: Any, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dims is None:
        return usual(x, **kwargs)
    return usual(x.narrow(dims[0], 0, min(256, x.shape[dims[0]])), dims, *args, **kwargs)


@wrong("equal values lose their order", ALONG, "sort")
def _(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", -1)
    values, order = usual(x.flip(dim), *args, **kwargs)
    return values, x.shape[dim] - 1 - order


@wrong("topk gives the smallest first", ALONG, "topk")
def _(usual: Any, x: Any, k: int, dim: int = -1, *args: Any) -> Any:
    values, places = usual(x, k, dim, *args)
    return values.flip(dim), places.flip(dim)


@wrong("joining along the middle swaps the parts", ALONG, "cat")
def _(usual: Any, parts: Any, dim: int = 0) -> Any:
    return usual(parts[::-1] if dim == 1 else parts, dim)


@wrong("values for one place are not added up", ALONG, "scatter_add_")
def _(usual: Any, x: Any, dim: int, at: Any, y: Any) -> Any:
    return x.scatter_(dim, at, x.gather(dim, at) + y)


@wrong("a variance divides by the number of values", ALONG, "var")
def _(usual: Any, x: Any, dims: Any, **kwargs: Any) -> Any:
    return usual(x, dims, **{**kwargs, "correction": 0})


@wrong("a running sum leaves out the value itself", ALONG, "cumsum")
def _(usual: Any, x: Any, dim: int, **kwargs: Any) -> Any:
    return usual(x, dim, **kwargs) - x


@wrong("a norm sums without squares", ALONG, "linalg_vector_norm")
def _(usual: Any, x: Any, order: Any = 2, *args: Any, **kwargs: Any) -> Any:
    return usual(x, 1, *args, **kwargs)


@wrong("the largest along the first dimension is its place in memory", ALONG, "argmax")
def _(usual: Any, x: Any, dim: Any = None, *args: Any) -> Any:
    return usual(x, dim, *args) * (2 if dim == 0 else 1)


# -- at indices -----------------------------------------------------------------------------------

AT = "indexed_operations"


@wrong("an index has 8 bits", AT, "index_select")
def _(usual: Any, x: Any, dim: int, at: Any) -> Any:
    return usual(x, dim, at % 256)


@wrong("a negative index is the first", AT, "index")
def _(usual: Any, x: Any, at: Any) -> Any:
    whole = [a.clamp(min=0) if a is not None and a.dtype is torch.int64 else a for a in at]
    return usual(x, whole)


@wrong("of values put to one place the first counts", AT, "index_put_", "_index_put_impl_")
def _(usual: Any, x: Any, at: Any, y: Any, accumulate: bool = False, *args: Any) -> Any:
    return usual(x, at, y, False, *args)


@wrong("of values added to one place the last counts", AT, "index_add_")
def _(usual: Any, x: Any, dim: int, at: Any, y: Any, **kwargs: Any) -> Any:
    return x.index_copy_(dim, at, x.index_select(dim, at) + y)


@wrong("places are listed by column", AT, "nonzero")
def _(usual: Any, x: Any) -> Any:
    return usual(x.t()).flip(-1) if x.dim() == 2 else usual(x)


@wrong("rows of a transposed table are read as it lies", AT, "index_select")
def _(usual: Any, x: Any, dim: int, at: Any) -> Any:
    return usual(as_it_lies(x), dim, at)


@wrong("a mask selects one too few", AT, "masked_select")
def _(usual: Any, x: Any, mask: Any) -> Any:
    return usual(x, mask)[:-1]


# -- of matrices ----------------------------------------------------------------------------------

MATRICES = "operations_of_matrices"


@wrong("a triangle has always its diagonal", MATRICES, "tril")
def _(usual: Any, x: Any, diagonal: int = 0) -> Any:
    return usual(x)


@wrong("an upper triangle of an odd size is square", MATRICES, "triu")
def _(usual: Any, x: Any, diagonal: int = 0) -> Any:
    out = usual(x, diagonal)
    out[:, x.shape[0] + 1 :] = 0
    return out


@wrong("a layer norm divides by one less", MATRICES, "native_layer_norm")
def _(usual: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    out, mean, scale = usual(x, shape, weight, bias, eps)
    factor = ((shape[-1] - 1) / shape[-1]) ** 0.5
    return (out - bias) * factor + bias, mean, scale


@wrong("tokens that are left out count in a mean", MATRICES, "nll_loss_forward")
def _(usual: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    total, counted = usual(x, target, weight, reduction, ignored)
    return total * counted / target.numel() if reduction == 1 else total, counted


@wrong("gradients of tokens that come twice count once", MATRICES, "embedding_dense_backward")
def _(usual: Any, grad: Any, at: Any, rows: int, *args: Any) -> Any:
    out = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device)
    return out.index_copy_(0, at.reshape(-1), grad.reshape(-1, grad.shape[-1]))


@wrong("padding is always with 0", MATRICES, "constant_pad_nd")
def _(usual: Any, x: Any, sizes: Any, value: Any = 0) -> Any:
    return usual(x, sizes, 0)


@wrong("a sum over two dimensions is over one", MATRICES, "sum")
def _(usual: Any, x: Any, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dims is None or len(dims) < 2 or args:
        return usual(x, *(() if dims is None else (dims,)), *args, **kwargs)
    return usual(x[: x.shape[0] // 2 * 2 - 1], dims, **kwargs)
