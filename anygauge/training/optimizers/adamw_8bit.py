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
PAGED = 100_000
"""bitsandbytes pages no tensor of fewer elements."""


def adamw_8bit(
    groups: list[dict[str, Any]], *, paged: bool = False, **options: Any
) -> torch.optim.Optimizer:
    """AdamW whose moments are block-wise 8-bit codes (https://arxiv.org/abs/2110.02861).

    State of a tensor of `SMALLEST` elements or more: ``state1`` and ``state2`` (uint8 codes of
    its shape), ``absmax1`` and ``absmax2`` (float32, one per `BLOCK` elements), ``qmap1`` and
    ``qmap2`` (256 float32, the values of the codes); of a smaller one: ``state1`` and ``state2``
    in float32. ``step`` is an int.

    Args:
        paged: ``state1`` and ``state2`` of a tensor of `PAGED` elements or more lie in memory that
            the driver moves between the device and the host; a tensor on the host to torch.

    Raises:
        RunFileError: bitsandbytes is not installed.
        UnsupportedError: it has no 8-bit update for the device of the parameters, or no such
            memory.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise RunFileError(EIGHT_BIT_MISSING) from error
    device = groups[0]["params"][0].device
    # Which devices it serves depends on how it was built: only a trial tells.
    trial = nn.Parameter(torch.zeros(PAGED if paged else SMALLEST, device=device))
    trial.grad = torch.zeros_like(trial)
    tried = AdamW8bit([trial], is_paged=paged)
    try:
        tried.step()
    except Exception as error:
        raise UnsupportedError(
            f"optimizer adamw_8bit: the installed bitsandbytes cannot update on {device} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use "
            "train.optimizer.name: adamw, or a build of bitsandbytes for this device"
        ) from error
    # Where it knows that it has none, bitsandbytes goes on without.
    if paged and not getattr(tried.state[trial]["state1"], "is_paged", False):
        raise UnsupportedError(
            "train.optimizer.paged: the installed bitsandbytes has no memory on "
            f"{device} that moves to the host by itself. Leave it out"
        )
    optimizer: torch.optim.Optimizer = AdamW8bit(
        groups, min_8bit_size=SMALLEST, is_paged=paged, **options
    )
    return optimizer
