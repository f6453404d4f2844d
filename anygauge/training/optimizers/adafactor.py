"""Adafactor that refuses to train on parameters which lost their shapes."""

from __future__ import annotations

from typing import Any

import torch

from anygauge.interface import UnsupportedError

FLAT = (
    "optimizer adafactor: it keeps one number per row and column of a matrix, but the strategy "
    "hands it parameters joined into flat vectors, on which it would keep one per element: another "
    "optimizer, that saves no memory. Use strategy.name: single, or train.optimizer.name: "
    "adamw_8bit"
)


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor (https://arxiv.org/abs/1804.04235).

    ``lr`` bounds the step relative to the parameter's own root mean square:
    ``min(lr, 1 / sqrt(step)) * max(1e-3, rms(p))``. State: ``step``; ``row_var`` and ``col_var``
    of a tensor of two or more dimensions, ``variance`` of a vector.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self._had_matrices = any(group["matrices"] for group in groups)
        super().__init__(groups, **options)

    def step(self, closure: Any = None) -> Any:
        """One update.

        Raises:
            UnsupportedError: an engine has joined the parameters into vectors.
        """
        if self._had_matrices and not any(
            p.dim() >= 2 for group in self.param_groups for p in group["params"]
        ):
            raise UnsupportedError(FLAT)
        return super().step(closure)
