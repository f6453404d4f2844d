"""The conformance kit on the lazy device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from anygauge.testing import BackendContract
from anygauge.testing.loop import Trained
from anygauge.testing.process import PartAnswers, Subject


class TestLazy(BackendContract):
    """Graphs are fused otherwise than operations run one by one, so losses differ a little."""

    backend = "lazy"
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 5e-3}

    # Graphs have runs of their own beside this; that both types train is asked every time.
    test_a_resumed_run_goes_on_where_it_was = pytest.mark.slow(
        BackendContract.test_a_resumed_run_goes_on_where_it_was
    )

    @pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
    def test_trains_as_the_host_does(
        self,
        dtype: str,
        subject: Subject,
        folder: Path,
        runs: dict[str, Trained],
        on_device: PartAnswers,
    ) -> None:
        super().test_trains_as_the_host_does(dtype, subject, folder, runs, on_device)
