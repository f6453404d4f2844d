"""What the checks on a device are given, and how far it may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anygauge.interface import Backend

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest error of one operation relative to the largest value, by compute type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An opened backend, and how to make another one of its kind.

    Attributes:
        visible: devices that this process may see.
    """

    backend: Backend
    device: torch.device
    visible: int
    fresh: Any

    @property
    def placement(self) -> Any:
        """The backend's."""
        return self.backend.placement
