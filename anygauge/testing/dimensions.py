"""The tables of operations along dimensions, at indices and of whole matrices, and their checks."""

from __future__ import annotations

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import exact, normwise
from anygauge.testing.check import TABLE_S, Opened, check
from anygauge.testing.operations import DIMENSION_CASES, Operation, try_all


def _turned_add(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """Each value to one place: nothing is summed, so lower types must be right, too."""
    sizes = [1] * x.dim()
    sizes[dim] = x.shape[dim]
    at = torch.arange(x.shape[dim] - 1, -1, -1, device=x.device).view(sizes).expand(x.shape)
    return x.scatter_add_(dim, at, y)


ALONG = (
    Operation("sum", torch.sum, "any", None, gradient=True, dims=True, integers=True),
    Operation("sum, dimension kept", lambda x, dim: x.sum(dim, True), "any", None, dims=True),
    Operation("mean", torch.mean, "any", None, gradient=True, dims=True),
    Operation("cumsum", torch.cumsum, "any", None, gradient=True, dims=True, integers=True),
    Operation("amax", torch.amax, "any", exact, dims=True, integers=True),
    Operation("amin", torch.amin, "any", exact, dims=True, integers=True),
    Operation("max and where", torch.max, "nonzero", exact, dims=True, lower=False),
    Operation("min and where", torch.min, "nonzero", exact, dims=True, lower=False),
    Operation("argmax", torch.argmax, "any", exact, dims=True, lower=False),
    Operation("sort", lambda x, dim: x.sort(dim)[0], "any", exact, dims=True, integers=True),
    Operation(
        "stable sort", lambda x, dim: x.sort(stable=True, dim=dim), "index", exact, dims=True
    ),
    Operation("topk", lambda x, dim: x.topk(2, dim)[0], "any", exact, dims=True, integers=True),
    Operation(
        "topk and where", lambda x, dim: x.topk(2, dim), "any", exact, dims=True, lower=False
    ),
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
        "scatter_add_, each place once",
        _turned_add,
        "any any",
        dims=True,
        writes=True,
        integers=True,
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


def _each_loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.nll_loss(x.flatten(0, -2), target.flatten(), reduction="none")


def _mean_loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.nll_loss(x.flatten(0, -2), target.flatten())


def _each_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.cross_entropy(x.flatten(0, -2), target.flatten(), reduction="none")


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
    Operation("cross entropy, each", _each_entropy, "any classes", normwise, gradient=True),
    Operation("nll loss, each", _each_loss, "any classes", exact, gradient=True),
    Operation("nll loss, mean", _mean_loss, "any classes", normwise, gradient=True, lower=False),
    Operation("argmax of rows", lambda x: x.argmax(-1), "peaks", exact),
    Operation("argmax of columns", lambda x: x.t().contiguous().argmax(0), "peaks", exact),
    Operation("argmax over all", torch.argmax, "peaks", exact),
    Operation("max of rows and where", lambda x: x.max(-1), "peaks", exact, integers=True),
    Operation("topk of rows and where", lambda x: x.topk(1), "peaks", exact),
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
    ("sliced", (256, 144)),
)


@check(
    "sums, softmax, sorting, joining and the like agree with float64 along each dimension",
    part="device",
    limit_s=TABLE_S,
    means="attention, norms and the loss would be wrong for some shapes; look at reductions along "
    "a dimension that is not the last, and along more elements than a block has threads",
)
def operations_along_a_dimension(on: Opened) -> None:
    try_all(on, ALONG, DIMENSION_CASES)


@check(
    "reading and writing at indices agrees with the host, with indices that come twice",
    part="device",
    limit_s=TABLE_S,
    means="embeddings, masks and losses would take other rows, and gradients of tokens that come "
    "twice would get lost; look for adding that is not atomic and for indices that are cut to "
    "fewer bits",
)
def indexed_operations(on: Opened) -> None:
    try_all(on, INDEXED, MATRIX_CASES)


@check(
    "norms, losses, triangles, embeddings and sums over all agree with float64",
    part="device",
    limit_s=TABLE_S,
    means="the layers of a model or its loss would be wrong; look in the fused kernel that the "
    "device has for the operation named",
)
def operations_of_matrices(on: Opened) -> None:
    try_all(on, OF_MATRICES, MATRIX_CASES)
