"""Rotation, paired ratios and their interval."""

from __future__ import annotations

import math

import pytest

from benchmarks.ratios import paired, rotated, t_quantile


def test_every_contender_takes_every_place() -> None:
    orders = [rotated("abc", round_) for round_ in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)]
)
def test_quantiles_are_those_of_printed_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, rel=1e-4)


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was half as fast in the second round, for both.
    ratio = paired([200.0, 100.0], [100.0, 50.0])
    assert ratio.median == 2.0
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.0)


def test_the_interval_is_students_on_logarithms() -> None:
    ratio = paired([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    reach = 4.30265 * math.log(2) / math.sqrt(3)
    assert ratio.low == pytest.approx(2 * math.exp(-reach), rel=1e-4)
    assert ratio.high == pytest.approx(2 * math.exp(reach), rel=1e-4)


def test_one_round_has_no_interval() -> None:
    ratio = paired([3.0], [2.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (1.5, None, None, 1)
