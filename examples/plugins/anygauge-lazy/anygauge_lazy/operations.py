"""Operations that the device lacks and would hand to the host, written with those that it has.

Handing one over ends the graph in its middle. AdamW uses `lerp` once for each parameter, which cost
seconds a step. The norm of each gradient is still handed over: written with sums and roots, it made
torch's backend give wrong updates where clipping and a copy of the weights share a graph.
"""

from __future__ import annotations

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


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start + (end - start) * weight


def _lerp_(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.add_((end - start).mul_(weight))
