"""The table of operations that write into a tensor which they are given, and its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anygauge.testing.bounds import exact, near, normwise
from anygauge.testing.check import TABLE_S, Opened, check
from anygauge.testing.dimensions import MATRIX_CASES
from anygauge.testing.operations import Operation, try_all


def _into(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda out, *inputs: function(*inputs, *arguments, out=out)


def _into_column(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Along the last dimension; the result fills one column of what is given."""
    return lambda out, x: function(x, *arguments, out=out[..., 1])


def _joined(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    return torch.cat((x[:half], y[half:]), out=out)


def _line(
    name: str, function: Callable[..., Any], inputs: str, bound: Any = None, **more: Any
) -> Operation:
    given = {} if bound is None else {"bound": bound}
    return Operation(f"{name} into a given tensor", function, inputs, writes=True, **given, **more)


GIVEN = (
    _line("add", _into(torch.add), "any any any", integers=True),
    _line("sub", _into(torch.sub), "any any any", integers=True),
    _line("mul", _into(torch.mul), "any any any", integers=True),
    _line("mul with a row", _into(torch.mul), "any any row"),
    _line("div", _into(torch.div), "any any nonzero", near),
    _line("pow", _into(torch.pow, 2), "any any", near),
    _line("exp", _into(torch.exp), "any any", near),
    _line("log", _into(torch.log), "any positive", normwise),
    _line("sqrt", _into(torch.sqrt), "any positive", near),
    _line("rsqrt", _into(torch.rsqrt), "any positive", near),
    _line("reciprocal", _into(torch.reciprocal), "any nonzero", near),
    _line("neg", _into(torch.neg), "any any", exact, integers=True),
    _line("tanh", _into(torch.tanh), "any any", normwise),
    _line("sigmoid", _into(torch.sigmoid), "any any", near),
    _line("maximum", _into(torch.maximum), "any any nonzero", exact, integers=True),
    _line("clamp", _into(torch.clamp, -1, 1), "any any", exact, integers=True),
    _line("addcmul", _into(torch.addcmul), "any any any any", normwise),
    _line("addcdiv", _into(torch.addcdiv), "any any any nonzero", normwise),
    _line("lerp", _into(torch.lerp, 0.3), "any any any", normwise),
    _line("where", _into(torch.where), "any mask any any", exact, integers=True),
    _line("softmax", _into(torch.softmax, -1), "any any", normwise),
    _line("log_softmax", _into(torch.log_softmax, 0), "any any", normwise),
    _line("cumsum", _into(torch.cumsum, 0), "any unit", normwise),
    _line("sum", _into_column(torch.sum, -1), "any any", normwise),
    _line("mean", _into_column(torch.mean, -1), "any any", normwise),
    _line("amax", _into_column(torch.amax, -1), "any any", exact, integers=True),
    _line("norm", _into_column(torch.linalg.vector_norm, 2, -1), "any any", normwise),
    _line("logsumexp", _into_column(torch.logsumexp, -1), "any any", normwise),
    _line("cat", _joined, "any any any", exact, integers=True),
    _line("gather", lambda out, x, at: torch.gather(x, 0, at, out=out), "any any index", exact),
    _line(
        "index_select",
        lambda out, x, at: torch.index_select(x, 0, at[:-2], out=out),
        "any any places",
        exact,
        integers=True,
    ),
    _line("tril", _into(torch.tril, -1), "any any", exact, integers=True),
    _line("triu", _into(torch.triu, 2), "any any", exact, integers=True),
)
GIVEN_CASES = (
    *MATRIX_CASES,
    ("contiguous with transposed", (12, 33)),
    ("contiguous", (32, 48)),
)


@check(
    "operations write all of a tensor that they are given, whatever its strides, and nothing else",
    part="device",
    limit_s=TABLE_S,
    means="optimizers and fused layers, which reuse their buffers, would read old values; look for "
    "kernels that take the output's address without its offset or strides, and for results that "
    "are copied into the output in the order of memory",
)
def operations_into_given_tensors(on: Opened) -> None:
    try_all(on, GIVEN, GIVEN_CASES)
