from __future__ import annotations

import math

import pytest
import torch

from anygauge.data import MicroBatch
from anygauge.interface import Collectives, NonFiniteLossError
from anygauge.training.guard import check_finite

ALONE = Collectives("none")  # no group was joined: this rank is all there is


def batch(*origins: str) -> MicroBatch:
    ids = torch.zeros(len(origins), 2, dtype=torch.int64)
    return MicroBatch(
        input_ids=ids,
        labels=ids,
        attention_mask=ids,
        position_ids=ids,
        segment_ids=None,
        origins=origins,
        num_loss_tokens=1,
        tokens=2,
    )


BATCHES = [batch("rows:1", "rows:2"), batch("rows:3")]


def check(sums: list[float], norm: float, *, skipped: bool = False) -> None:
    check_finite(6, sum(sums), sums, norm, BATCHES, ALONE, skipped=skipped)


def test_finite_passes_and_so_does_an_update_that_loss_scaling_skipped() -> None:
    check([1.0, 2.0], 0.5)
    check([1.0, 2.0], math.inf, skipped=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_names_the_rows_of_its_micro_batch(bad: float) -> None:
    with pytest.raises(NonFiniteLossError, match="the loss became") as error:
        check([1.0, bad], 0.5)
    assert "step 7" in str(error.value)
    assert "rows:3" in str(error.value) and "rows:1" not in str(error.value)


def test_a_gradient_names_all_rows_of_the_step() -> None:
    with pytest.raises(NonFiniteLossError, match="gradient's norm became nan") as error:
        check([1.0, 2.0], math.nan)
    assert all(f"rows:{n}" in str(error.value) for n in (1, 2, 3))
