"""Operations that the device lacks and would hand to the host, written with those that it has.

Handing one over ends the graph in its middle. AdamW uses `lerp` and clipping a norm, once for each
parameter: every step would be cut into as many graphs as there are parameters, which costs seconds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_library: Any = None


def register() -> None:
    """Tell torch, once per process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("lerp.Scalar", _lerp, "Lazy")
    _library.impl("lerp_.Scalar", _lerp_, "Lazy")
    _library.impl("linalg_vector_norm", _vector_norm, "Lazy")


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start + (end - start) * weight


def _lerp_(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.add_((end - start).mul_(weight))


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    axes = tuple(range(x.dim())) if dim is None else dim
    if math.isinf(ord):
        norm = wide.abs().amax(axes, keepdim) if ord > 0 else wide.abs().amin(axes, keepdim)
    elif ord == 2:
        norm = (wide * wide).sum(axes, keepdim).sqrt()
    else:
        norm = wide.abs().pow(ord).sum(axes, keepdim).pow(1 / ord)
    return norm.to(dtype or x.dtype)
