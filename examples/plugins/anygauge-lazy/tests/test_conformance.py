"""The conformance kit on the lazy device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from anygauge.testing import BackendContract
from anygauge.testing.process import PartAnswers
from anygauge.testing.trials import LoopTrials


class TestLazyDevice(BackendContract):
    """Graphs are fused otherwise than operations run one by one, so losses differ a little."""

    backend = "lazy"
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 5e-3}

    # Graphs have runs of their own beside this; that both types train is asked every time.
    test_a_resumed_run_goes_on_where_it_was = pytest.mark.slow(
        BackendContract.test_a_resumed_run_goes_on_where_it_was
    )
    test_trains_packed_rows_as_the_host_does = pytest.mark.slow(
        BackendContract.test_trains_packed_rows_as_the_host_does
    )
    test_trains_all_weights_as_the_host_does = pytest.mark.slow(
        BackendContract.test_trains_all_weights_as_the_host_does
    )
    test_every_strategy_trains_as_one_process_does = pytest.mark.slow(
        BackendContract.test_every_strategy_trains_as_one_process_does
    )
    test_a_run_is_resumed_on_other_ranks = pytest.mark.slow(
        BackendContract.test_a_run_is_resumed_on_other_ranks
    )

    @pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
    def test_trains_as_the_host_does(
        self, dtype: str, runs: LoopTrials, on_device: PartAnswers
    ) -> None:
        super().test_trains_as_the_host_does(dtype, runs, on_device)
