"""The tables of operations that a device is asked for, and the checks that go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import exact, near, normwise
from anygauge.testing.check import Opened, check
from anygauge.testing.operations import CASES, DIMENSION_CASES, Operation, try_all


def _in_place(name: str, *arguments: Any) -> Callable[..., Any]:
    return lambda x, *others: getattr(x, name)(*others, *arguments)


ELEMENTWISE = (
    Operation("add", torch.add, "any any", gradient=True, integers=True),
    Operation("add a row", torch.add, "any row", gradient=True, integers=True),
    Operation("add of a number", lambda x: x + 2, "any", integers=True),
    Operation("add with alpha", lambda x, y: torch.add(x, y, alpha=3), "any any", normwise),
    Operation("sub", torch.sub, "any any", gradient=True, integers=True),
    Operation("a number minus", lambda x: 1 - x, "any", integers=True),
    Operation("mul", torch.mul, "any any", gradient=True, integers=True),
    Operation("mul with a row", torch.mul, "any row", gradient=True),
    Operation("div", torch.div, "any nonzero", near, gradient=True),
    Operation("div by a number", lambda x: x / 3, "any", near),
    Operation("floor division", lambda x, y: x // y, "any nonzero", exact, integers=True),
    Operation("remainder", lambda x: x % 3, "positive", normwise, integers=True),
    Operation("neg", torch.neg, "any", exact, gradient=True, integers=True),
    Operation("abs", torch.abs, "nonzero", exact, gradient=True, integers=True),
    Operation("sign", torch.sign, "any", exact, integers=True),
    Operation("reciprocal", torch.reciprocal, "nonzero", near, gradient=True),
    Operation("pow 2", lambda x: x.pow(2), "any", near, gradient=True),
    Operation("pow 3", lambda x: x.pow(3), "any", near, gradient=True),
    Operation("pow 0.7", lambda x: x.pow(0.7), "positive", near, gradient=True),
    Operation("a number to the power", lambda x: 10.0**-x, "unit", near, gradient=True),
    Operation("exp", torch.exp, "any", near, gradient=True),
    Operation("log", torch.log, "positive", normwise, gradient=True),
    Operation("log1p", torch.log1p, "positive", near, gradient=True),
    Operation("sqrt", torch.sqrt, "positive", near, gradient=True),
    Operation("rsqrt", torch.rsqrt, "positive", near, gradient=True),
    Operation("sin", torch.sin, "any", normwise, gradient=True),
    Operation("cos", torch.cos, "any", normwise, gradient=True),
    Operation("tanh", torch.tanh, "any", normwise, gradient=True),
    Operation("sigmoid", torch.sigmoid, "any", near, gradient=True),
    Operation("silu", nn.silu, "any", normwise, gradient=True),
    Operation("gelu", nn.gelu, "any", normwise, gradient=True),
    Operation("gelu by tanh", lambda x: nn.gelu(x, approximate="tanh"), "any", normwise),
    Operation("relu", nn.relu, "nonzero", exact, gradient=True),
    Operation("maximum", torch.maximum, "any nonzero", exact, gradient=True, integers=True),
    Operation("minimum", torch.minimum, "any any", exact, integers=True),
    Operation("clamp", lambda x: x.clamp(-1, 1), "any", exact, gradient=True, integers=True),
    Operation("clamp min", lambda x: x.clamp(min=0), "any", exact, integers=True),
    Operation("where", torch.where, "mask any any", exact, gradient=True, integers=True),
    Operation("addcmul", torch.addcmul, "any any any", normwise, gradient=True),
    Operation("addcdiv", torch.addcdiv, "any any nonzero", normwise, gradient=True),
    Operation("lerp", lambda x, y: x.lerp(y, 0.3), "any any", normwise, gradient=True),
    Operation("equal", torch.eq, "any any", exact, integers=True),
    Operation("less", torch.lt, "any any", exact, integers=True),
    Operation("not", torch.logical_not, "mask", exact),
    Operation("and", torch.bitwise_and, "mask mask", exact),
    Operation("any", torch.any, "mask", exact),
    Operation("all", torch.all, "mask", exact),
    Operation("count of truths", torch.sum, "mask", exact),
    Operation("clone", torch.clone, "any", exact, gradient=True, integers=True),
    Operation("contiguous", lambda x: x.contiguous(), "any", exact, integers=True),
    Operation("zeros_like", torch.zeros_like, "any", exact, integers=True),
    Operation("full_like", lambda x: torch.full_like(x, 3), "any", exact, integers=True),
    Operation("flip", lambda x: x.flip(-1) if x.dim() else x, "any", exact, integers=True),
    Operation("roll", lambda x: x.roll(2), "any", exact, integers=True),
    Operation("cat", lambda x, y: torch.cat((x.reshape(-1), y.reshape(-1))), "any any", exact),
)
IN_PLACE = (
    Operation("add_", _in_place("add_"), "any any", writes=True, integers=True),
    Operation("sub_", _in_place("sub_"), "any any", writes=True, integers=True),
    Operation("mul_", _in_place("mul_"), "any any", writes=True, integers=True),
    Operation("mul_ by a number", _in_place("mul_", 3), "any", writes=True, integers=True),
    Operation("div_", _in_place("div_"), "any nonzero", near, writes=True),
    Operation("pow_", _in_place("pow_", 2), "any", near, writes=True),
    Operation("exp_", _in_place("exp_"), "any", near, writes=True),
    Operation("log_", _in_place("log_"), "positive", normwise, writes=True),
    Operation("sqrt_", _in_place("sqrt_"), "positive", near, writes=True),
    Operation("rsqrt_", _in_place("rsqrt_"), "positive", near, writes=True),
    Operation("reciprocal_", _in_place("reciprocal_"), "nonzero", near, writes=True),
    Operation("neg_", _in_place("neg_"), "any", exact, writes=True, integers=True),
    Operation("tanh_", _in_place("tanh_"), "any", normwise, writes=True),
    Operation("sigmoid_", _in_place("sigmoid_"), "any", near, writes=True),
    Operation("clamp_", _in_place("clamp_", -1, 1), "any", exact, writes=True, integers=True),
    Operation("addcmul_", _in_place("addcmul_"), "any any any", normwise, writes=True),
    Operation(
        "addcdiv_ with value",
        lambda x, y, z: x.addcdiv_(y, z, value=-0.5),
        "any any nonzero",
        normwise,
        writes=True,
    ),
    Operation("lerp_", _in_place("lerp_", 0.3), "any any", normwise, writes=True),
    Operation("zero_", _in_place("zero_"), "any", exact, writes=True, integers=True),
    Operation("fill_", _in_place("fill_", 3), "any", exact, writes=True, integers=True),
    Operation("copy_", _in_place("copy_"), "any any", exact, writes=True, integers=True),
    Operation("copy_ of a row", _in_place("copy_"), "any row", exact, writes=True, integers=True),
    Operation(
        "masked_fill_", _in_place("masked_fill_", 5), "any mask", exact, writes=True, integers=True
    ),
)
ALONG = (
    Operation("sum", torch.sum, "any", None, gradient=True, dims=True, integers=True),
    Operation("sum, dimension kept", lambda x, dim: x.sum(dim, True), "any", None, dims=True),
    Operation("mean", torch.mean, "any", None, gradient=True, dims=True),
    Operation("cumsum", torch.cumsum, "any", None, gradient=True, dims=True, integers=True),
    Operation("amax", torch.amax, "any", exact, dims=True, integers=True),
    Operation("amin", torch.amin, "any", exact, dims=True, integers=True),
    Operation("max and where", torch.max, "nonzero", exact, dims=True, lower=False),
    Operation("argmax", torch.argmax, "any", exact, dims=True, lower=False),
    Operation("sort", lambda x, dim: x.sort(dim)[0], "any", exact, dims=True, integers=True),
    Operation(
        "stable sort", lambda x, dim: x.sort(stable=True, dim=dim), "index", exact, dims=True
    ),
    Operation("topk", lambda x, dim: x.topk(2, dim)[0], "any", exact, dims=True, integers=True),
    Operation("vector norm", torch.linalg.vector_norm, "any", normwise, gradient=True, dims=True),
    Operation("softmax", torch.softmax, "any", normwise, gradient=True, dims=True),
    Operation("log_softmax", torch.log_softmax, "any", normwise, gradient=True, dims=True),
    Operation("logsumexp", torch.logsumexp, "any", normwise, gradient=True, dims=True),
    Operation("var", torch.var, "any", normwise, gradient=True, dims=True),
    Operation("cat", lambda x, y, dim: torch.cat((x, y), dim), "any any", exact, dims=True),
    Operation("stack", lambda x, y, dim: torch.stack((x, y), dim), "any any", exact, dims=True),
    Operation("split", lambda x, dim: x.split(2, dim), "any", exact, dims=True, integers=True),
    Operation("flip", lambda x, dim: x.flip(dim), "any", exact, dims=True, integers=True),
    Operation("roll", lambda x, dim: x.roll(1, dim), "any", exact, dims=True, integers=True),
    Operation(
        "repeat_interleave",
        lambda x, dim: x.repeat_interleave(2, dim),
        "any",
        exact,
        dims=True,
        gradient=True,
    ),
    Operation("narrow", lambda x, dim: x.narrow(dim, 1, 2) * 1, "any", exact, dims=True),
    Operation("select", lambda x, dim: x.select(dim, -1) * 1, "any", exact, dims=True),
    Operation("gather", lambda x, i, dim: x.gather(dim, i), "any index", exact, dims=True),
    Operation(
        "gather with its gradient",
        lambda x, i, dim: x.gather(dim, i[..., :3]),
        "any index",
        exact,
        dims=True,
        gradient=True,
        lower=False,
    ),
    Operation(
        "scatter_add_",
        lambda x, i, y, dim: x.scatter_add_(dim, i, y),
        "positive index positive",
        normwise,
        dims=True,
        writes=True,
        integers=True,
        lower=False,
    ),
    Operation(
        "scatter_ of a number",
        lambda x, i, dim: x.scatter_(dim, i, 9),
        "any index",
        exact,
        dims=True,
        writes=True,
    ),
)


def _index_select(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, at)


def _index_add(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.index_add_(0, at, x.detach().clone()[at] + 1)


def _put(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x[at] = 7
    return x


def _put_adding(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.index_put_((at,), x.detach().clone()[at] + 1, accumulate=True)


def _layer_norm(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return nn.layer_norm(x, x.shape[-1:], row, row)


def _rms_norm(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return nn.rms_norm(x, x.shape[-1:], row, 1e-5)


def _loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    target = (torch.arange(rows.shape[0], device=x.device) * 5) % rows.shape[1]
    target = torch.where(target % 4 == 1, -100, target)
    return nn.cross_entropy(rows, target, reduction=reduction)


def _padded(x: torch.Tensor) -> torch.Tensor:
    return nn.pad(x, (1, 2), value=4)


def _embedding(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return nn.embedding(at, x)


INDEXED = (
    Operation("index_select", _index_select, "any places", exact, integers=True),
    Operation("index", lambda x, at: x[at], "any places", exact, integers=True),
    Operation("index by a mask", lambda x, m: x[m], "any mask", exact, integers=True),
    Operation("negative index", lambda x, at: x[-1 - at], "any places", exact, integers=True),
    Operation("index of the last", lambda x, at: x[..., at % 3], "any places", exact),
    Operation("index by two", lambda x, at: x[at, (at * 2) % x.shape[1]], "any places", exact),
    Operation("index with its gradient", lambda x, at: x[at], "any places", exact, gradient=True),
    Operation("index_select with its gradient", _index_select, "any places", exact, gradient=True),
    Operation("index_put_", _put, "any places", exact, writes=True, integers=True),
    Operation(
        "index_put_, accumulating",
        _put_adding,
        "positive places",
        normwise,
        writes=True,
        integers=True,
    ),
    Operation("index_add_", _index_add, "positive places", normwise, writes=True, integers=True),
    Operation("masked_select", lambda x, m: x.masked_select(m), "any mask", exact, integers=True),
    Operation("nonzero", torch.nonzero, "mask", exact),
    Operation("bincount", lambda at: torch.bincount(at, minlength=5), "places", exact),
)
OF_MATRICES = (
    Operation("tril", lambda x: x.tril(-1), "any", exact, gradient=True, integers=True),
    Operation("triu", lambda x: x.triu(2), "any", exact, gradient=True, integers=True),
    Operation("triu of truths", lambda x: x.triu(1), "mask", exact),
    Operation("embedding", _embedding, "any places", exact, gradient=True),
    Operation("layer norm", _layer_norm, "any row", normwise),
    Operation("rms norm", _rms_norm, "any row", normwise),
    # Torch's own kernels for the host sum the gradient of a weight in bfloat16.
    Operation("layer norm, back", _layer_norm, "any row", normwise, gradient=True, lower=False),
    Operation("rms norm, back", _rms_norm, "any row", normwise, gradient=True, lower=False),
    Operation("pad", _padded, "any", exact, gradient=True, integers=True),
    Operation("cross entropy, mean", lambda x: _loss(x, "mean"), "any", normwise, gradient=True),
    Operation("cross entropy, sum", lambda x: _loss(x, "sum"), "any", normwise, gradient=True),
    Operation("sum over all", torch.sum, "any", None, gradient=True, integers=True),
    Operation("mean over all", torch.mean, "any", None, gradient=True),
    Operation("max over all", torch.max, "any", exact, integers=True),
    Operation("norm over all", torch.linalg.vector_norm, "any", normwise, gradient=True),
    Operation("sum over two", lambda x: x.sum((0, -1)), "any", None, gradient=True),
    Operation("one_hot", lambda at: nn.one_hot(at % 3, 3), "places", exact),
    Operation("reshape", lambda x: x.reshape(-1, 3), "any", exact, gradient=True, integers=True),
)
MATRIX_CASES = (
    *((layout, (12, 33)) for layout in ("contiguous", "transposed", "sliced", "every second")),
    ("contiguous", (300, 270)),
    ("transposed", (270, 300)),
)


@check(
    "operations on each element agree with float64, over strides, offsets, sizes and types",
    part="device",
    means="values of a model would be wrong where a tensor is a view, has an odd size or another "
    "type; look in the kernel of the operation named, at how it walks strides and offsets and at "
    "its last, incomplete block",
)
def elementwise_operations(on: Opened) -> None:
    try_all(on, ELEMENTWISE, CASES)


@check(
    "operations in place write their view, all of it and nothing around it",
    part="device",
    means="an optimizer or a mask would write beside its tensor or not at all; look at how kernels "
    "that write in place take the storage offset and the strides of what they write",
)
def operations_in_place(on: Opened) -> None:
    try_all(on, IN_PLACE, CASES)


@check(
    "sums, softmax, sorting, joining and the like agree with float64 along each dimension",
    part="device",
    means="attention, norms and the loss would be wrong for some shapes; look at reductions along "
    "a dimension that is not the last, and along more elements than a block has threads",
)
def operations_along_a_dimension(on: Opened) -> None:
    try_all(on, ALONG, DIMENSION_CASES)


@check(
    "reading and writing at indices agrees with the host, with indices that come twice",
    part="device",
    means="embeddings, masks and losses would take other rows, and gradients of tokens that come "
    "twice would get lost; look for adding that is not atomic and for indices that are cut to "
    "fewer bits",
)
def indexed_operations(on: Opened) -> None:
    try_all(on, INDEXED, MATRIX_CASES)


@check(
    "norms, losses, triangles, embeddings and sums over all agree with float64",
    part="device",
    means="the layers of a model or its loss would be wrong; look in the fused kernel that the "
    "device has for the operation named",
)
def operations_of_matrices(on: Opened) -> None:
    try_all(on, OF_MATRICES, MATRIX_CASES)
