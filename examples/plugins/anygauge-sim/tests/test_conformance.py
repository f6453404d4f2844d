"""The conformance kit on the simulated cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from children import SIM

from anygauge.testing import BackendContract


class TestSim(BackendContract):
    """Attention is put together from other kernels than the host's: what is derived is allowed."""

    backend = "sim"
    environment: ClassVar[Mapping[str, str]] = SIM.environment
