"""Optimizer state that is kept in 8 bits: out of their blocks, and back into them.

bitsandbytes keeps a tensor `state1` as codes of 8 bits, with a scale for each block of values in
`absmax1` and the code's values in `qmap1`. Blocks run over a whole tensor, a rank's flat partition
included, so a part of it can only be read from the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale, in bitsandbytes' optimizers of 8 bits."""

_AUXILIARY = ("absmax", "qmap")


def is_auxiliary(key: str) -> bool:
    """Whether a part of an optimizer's state only describes another one."""
    return key.startswith(_AUXILIARY)


def is_packed(value: Any) -> bool:
    """Whether a tensor is kept as codes."""
    return torch.is_tensor(value) and value.dtype == torch.uint8


def unpacked(state: Mapping[str, Any], key: str) -> Tensor:
    """A tensor as float32, in its own shape."""
    value: Tensor = state[key]
    if not is_packed(value):
        return value.detach().to(torch.float32)
    from bitsandbytes.functional import dequantize_blockwise

    number = key.removeprefix("state")
    scales: Tensor = state[f"absmax{number}"]
    # Paged codes are the host's to torch, while their scales are on the device.
    return dequantize_blockwise(
        value.to(scales.device), absmax=scales, code=state[f"qmap{number}"], blocksize=BLOCK
    ).reshape(value.shape)


def pack(state: Mapping[str, Any], key: str, value: Tensor) -> None:
    """Put a float32 tensor into its place, as codes if it is kept so."""
    place: Tensor = state[key]
    value = value.reshape(place.shape)
    if not is_packed(place):
        place.copy_(value)
        return
    from bitsandbytes.functional import quantize_blockwise

    number = key.removeprefix("state")
    scales: Tensor = state[f"absmax{number}"]
    codes, blocks = quantize_blockwise(
        value.to(scales.device, torch.float32).contiguous(),
        code=state[f"qmap{number}"],
        blocksize=BLOCK,
    )
    place.copy_(codes.reshape(place.shape))
    scales.copy_(blocks.absmax)
