"""The tables of operations on each element, in place too, and the checks that go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as nn

from anygauge.testing.bounds import exact, near, normwise
from anygauge.testing.check import TABLE_S, Opened, check
from anygauge.testing.operations import CASES, Operation, try_all


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
    Operation(
        "gelu by tanh", lambda x: nn.gelu(x, approximate="tanh"), "any", normwise, gradient=True
    ),
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


@check(
    "operations on each element agree with float64, over strides, offsets, sizes and types",
    part="device",
    limit_s=TABLE_S,
    means="values of a model would be wrong where a tensor is a view, has an odd size or another "
    "type; look in the kernel of the operation named, at how it walks strides and offsets and at "
    "its last, incomplete block",
)
def elementwise_operations(on: Opened) -> None:
    try_all(on, ELEMENTWISE, CASES)


@check(
    "operations in place write their view, all of it and nothing around it",
    part="device",
    limit_s=TABLE_S,
    means="an optimizer or a mask would write beside its tensor or not at all; look at how kernels "
    "that write in place take the storage offset and the strides of what they write",
)
def operations_in_place(on: Opened) -> None:
    try_all(on, IN_PLACE, CASES)
