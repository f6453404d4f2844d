"""The backend that everyone has, against the kit. What its loop does is tested all over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import ClassVar

import pytest

from anygauge.testing import BackendContract


class TestCpu(BackendContract):
    """The host itself: nothing may differ."""

    backend = "cpu"
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 0.0, "bfloat16": 0.0}


for name, test in vars(BackendContract).items():
    if name.startswith("test_") and "runs" in inspect.signature(test).parameters:
        setattr(TestCpu, name, pytest.mark.slow(test))
