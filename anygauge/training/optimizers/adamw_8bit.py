"""AdamW with moments of 8 bits, from bitsandbytes: its kernels where it has some for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anygauge.interface import RunFileError, UnsupportedError
from anygauge.training.optimizers.checks import EIGHT_BIT_MISSING

BLOCK = 256
"""Elements that share one scale."""
SMALLEST = 4096
"""A tensor of fewer elements keeps its moments in float32."""


def adamw_8bit(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """AdamW whose moments are block-wise 8-bit codes (https://arxiv.org/abs/2110.02861).

    State of a tensor of `SMALLEST` elements or more: ``state1`` and ``state2`` (uint8 codes of
    its shape), ``absmax1`` and ``absmax2`` (float32, one per `BLOCK` elements), ``qmap1`` and
    ``qmap2`` (256 float32, the values of the codes); of a smaller one: ``state1`` and ``state2``
    in float32. ``step`` is an int.

    Raises:
        RunFileError: bitsandbytes is not installed.
        UnsupportedError: it has no 8-bit update for the device of the parameters.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise RunFileError(EIGHT_BIT_MISSING) from error
    device = groups[0]["params"][0].device
    # Which devices it serves depends on how it was built: only a trial tells.
    trial = nn.Parameter(torch.zeros(SMALLEST, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        AdamW8bit([trial]).step()
    except Exception as error:
        raise UnsupportedError(
            f"optimizer adamw_8bit: the installed bitsandbytes cannot update on {device} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use "
            "train.optimizer.name: adamw, or a build of bitsandbytes for this device"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, min_8bit_size=SMALLEST, **options)
    return optimizer
