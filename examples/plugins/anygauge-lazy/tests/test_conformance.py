"""The conformance kit on the lazy device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from anygauge.testing import BackendContract


class TestLazyDevice(BackendContract):
    """Graphs are fused otherwise than operations run one by one, so losses differ a little."""

    backend = "lazy"
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 5e-3}
