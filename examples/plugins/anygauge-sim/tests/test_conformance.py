"""The conformance kit on the simulated cards."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import ClassVar

import pytest

from anygauge.testing import BackendContract


class TestSim(BackendContract):
    """Attention is put together from other kernels than the host's: what is derived is allowed."""

    backend = "sim"
    environment: ClassVar[Mapping[str, str]] = {
        "ANYGAUGE_SIM_LOCKS": tempfile.mkdtemp(),
        "ANYGAUGE_SIM_CARDS": "8",
        "ANYGAUGE_SIM_CAPACITY": str(2**33),
    }

    # ZeRO on cards has a test of its own, in `test_training`, that compares with the host, too.
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
