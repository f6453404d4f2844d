"""The conformance kit, with nothing allowed for the cards' arithmetic: losses are the host's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import ClassVar

from anygauge.testing import BackendContract


class TestSim(BackendContract):
    """A loss that differs in its last digit fails."""

    backend = "sim"
    environment: ClassVar[Mapping[str, str]] = {
        "ANYGAUGE_SIM_LOCKS": tempfile.mkdtemp(),
        "ANYGAUGE_SIM_CARDS": "8",
        "ANYGAUGE_SIM_CAPACITY": str(2**33),
    }
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 0.0, "bfloat16": 0.0}
