"""The backend that everyone has, against the kit. What its loop does is tested all over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from anygauge.testing import BackendContract


class TestCpu(BackendContract):
    """The host itself: nothing may differ."""

    backend = "cpu"
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 0.0, "bfloat16": 0.0}

    test_trains_as_the_host_does = pytest.mark.slow(BackendContract.test_trains_as_the_host_does)
    test_zero_trains_as_one_process_does = pytest.mark.slow(
        BackendContract.test_zero_trains_as_one_process_does
    )
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
