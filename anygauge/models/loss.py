"""The loss: cross entropy summed over supervised tokens, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anygauge.kernels.loss import IGNORE


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses in nats.

    Args:
        logits: (B, T, V), any floating type; position t predicts label t + 1.
        labels: (B, T) int64, not shifted; -100 where not supervised.

    Returns:
        () float32. Zero, with a gradient path, where nothing is supervised.
    """
    vocabulary = logits.shape[-1]
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocabulary).float(),
        labels[:, 1:].reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )


def summed_loss(outputs: Any, labels: Tensor) -> Tensor:
    """The sum of token losses that a model made of its labels, or that its logits give.

    Args:
        outputs: of the model's forward, with ``loss`` (see `fuse_loss`) or with ``logits``.
        labels: (B, T) int64, not shifted; -100 where not supervised.

    Returns:
        () float32, in nats.
    """
    loss: Tensor | None = getattr(outputs, "loss", None)
    return summed_cross_entropy(outputs.logits, labels) if loss is None else loss


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each position's loss in nats: (B, T) float32, zero where not supervised."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], ignore_index=IGNORE, reduction="none"
    )
    return torch.nn.functional.pad(losses, (1, 0))
