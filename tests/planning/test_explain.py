"""Rates from how long steps took."""

from __future__ import annotations

import itertools

import pytest

from anygauge.planning.calibration import explained
from anygauge.planning.work import Traffic, Work

MEASURED = {
    "matmul": {"float32": 100e9, "float16": 1e9},
    "copy": 10e9,
    "issue": 1e-5,
    "exchange": 1e9,
    "call": 1e-4,
}
GROUP = (0, 1)


def work(
    flops: float,
    fed: float,
    copied: float,
    operations: int,
    times: int,
    sent: float,
    attended: float = 0.0,
) -> Work:
    return Work(
        flops={"float32": flops},
        attention={"float32": attended} if attended else {},
        matrix_bytes=fed,
        other_bytes=copied,
        copied_bytes=0,
        host_bytes=0,
        operations=operations,
        traffic=(Traffic(operation="send", group=GROUP, waited=False, times=times, bytes=sent),),
    )


WORKS = [
    work(
        1e9 * (1 + a + a * c),
        1e8 * (1 + b),
        1e8 * (1 + 2 * a + c),
        100 + 300 * b,
        1 + 5 * c,
        1e6 * (1 + a * b),
        1e8 * (b + c * c),
    )
    for a, b, c in itertools.product(range(3), repeat=3)
]


def seconds(work: Work) -> float:
    [sent] = work.traffic
    return (
        work.flops["float32"] / 80e9
        + work.attention.get("float32", 0.0) / 10e9
        + work.matrix_bytes / 5e9
        + work.other_bytes / 20e9
        + 2e-5 * work.operations
        + 1e-3 * sent.times
        + sent.bytes / 0.5e9
    )


def test_the_rates_that_made_the_times_are_found_again() -> None:
    found = explained([(work, seconds(work)) for work in WORKS], MEASURED)
    assert found["matmul"] == {"float32": pytest.approx(80e9), "float16": 1e9}
    assert found["attention"] == {"float32": pytest.approx(10e9)}
    assert (found["feed"], found["copy"]) == (pytest.approx(5e9), pytest.approx(20e9))
    assert (found["issue"], found["call"]) == (pytest.approx(2e-5), pytest.approx(1e-3))
    assert found["exchange"] == pytest.approx(0.5e9)


def test_no_rate_is_far_above_what_was_measured() -> None:
    """Though these times would be met best where multiplying took none."""
    alone = {name: MEASURED[name] for name in ("matmul", "copy", "issue")}
    found = explained([(work, 2e-5 * work.operations) for work in WORKS], alone)
    assert found["matmul"]["float32"] == pytest.approx(1000e9)
    assert found["copy"] == pytest.approx(100e9)
    assert set(found) == {"matmul", "attention", "feed", "copy", "issue"}
