"""Time of a step: each part by its own rate, and what is missing is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from anygauge.interface import Card, Rates
from anygauge.planning import time as times
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Traffic, Work
from anygauge.planning.time import UnknownRateError, duration

CARD = Card(
    name="square",
    origin="a file",
    flops={"bfloat16": 100e12, "float32": 10e12},
    bandwidth=1e12,
    link=100e9,
    host_link=10e9,
)
MACHINE = Machine(name="four", card="square", cards=4, link=100e9, network=50e9)
ONE, TWO, EIGHT = (1, 1), (2, 2), (8, 4)
"""Ranks, and how many of them are on one machine."""
WORK = Work(flops={"bfloat16": 72e12}, other_bytes=0.8e12)
MEASURED = replace(CARD, matmul={"bfloat16": 40e12}, copy=0.4e12, exchange=10e9, issue=1.0)
HOST = replace(MEASURED, shared_memory=True, issue=1e-6)
MULTIPLYING, MOVING = 72 / (100 * times.REACHED), 0.8 / times.COPIED
ALONE = MULTIPLYING + MOVING


def traffic(count: float, *group: int, waited: bool = False, calls: float = 0) -> dict[str, Any]:
    one = Traffic(
        operation="all_gather", group=group or (0, 1), waited=waited, times=calls, bytes=count
    )
    return {"traffic": (one,)}


@pytest.mark.parametrize(
    ("card", "ranks", "work", "expected"),
    [
        (
            CARD,
            ONE,
            {},
            {"multiplying": MULTIPLYING, "moving": MOVING, "step": ALONE},
        ),
        # A thin product takes as long as its matrices.
        (CARD, ONE, {"matrix_bytes": 80e12}, {"multiplying": 80 / times.COPIED}),
        # Measured rates come first.
        (MEASURED, ONE, {}, {"multiplying": 72 / 40, "moving": 2}),
        # A host that issues slowly sets the pace of a device.
        (CARD, ONE, {"operations": 1e9}, {"step": 1e9 * times.ISSUE}),
        (HOST, ONE, {"operations": 1e6}, {"step": 72 / 40 + 2 + 1}),
        # Sending goes on meanwhile, unless it is waited for.
        (MEASURED, TWO, traffic(20e9), {"sending": {"cards": 1, "machines": 0}}),
        (MEASURED, TWO, traffic(20e9), {"step": 3.8 + 1 - times.OVERLAP}),
        (MEASURED, TWO, traffic(20e9, waited=True), {"step": 3.8 + 1}),
        (MEASURED, TWO, traffic(0, waited=True, calls=5), {"step": 3.8 + 5 * times.CALL}),
        # What is offloaded is copied and waited for; ranks share their host.
        (CARD, ONE, {"copied_bytes": 7e9}, {"copying": 0.7 / times.SENT}),
        (CARD, ONE, {"host_bytes": 1e9}, {"step": ALONE + 1e9 / times.HOST}),
        (CARD, TWO, {"host_bytes": 1e9}, {"on_host": 2e9 / times.HOST}),
        # Rings share the network of a machine: one of all ranks, and four of two each.
        (CARD, EIGHT, traffic(8 * 50e9, *range(8)), {"sending": {"machines": 7 / times.SENT}}),
        (CARD, EIGHT, traffic(50e9, 0, 4), {"sending": {"machines": 4 / 2 / times.SENT}}),
        # Stages wait for each other.
        (
            CARD,
            (4, 4),
            {},
            {"idle": 3 / 12 * ALONE, "step": 15 / 12 * ALONE},
        ),
    ],
)
def test_each_part_by_its_rate(
    card: Card, ranks: tuple[int, int], work: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    machine = MACHINE if ranks is EIGHT else None
    pipeline = (4, 12) if ranks == (4, 4) else (1, 1)
    found = duration(replace(WORK, **work), card, *ranks, pipeline=pipeline, machine=machine)
    for name, value in expected.items():
        got = getattr(found, name)
        for link in value if isinstance(value, dict) else ():
            assert got[link] == pytest.approx(value[link]), link
        if not isinstance(value, dict):
            # The host and the device wait for each other in turn.
            assert got == pytest.approx(value, rel=1e-3 if "operations" in work else 1e-6)


def test_tokens_and_utilisation() -> None:
    found = duration(WORK, CARD, *ONE, tokens=1000, flops=50e12)
    assert found.tokens_per_s == pytest.approx(1000 / found.step)
    assert found.mfu == pytest.approx(50 / 100 / found.step)


def test_ranks_whose_device_is_the_host_share_it() -> None:
    one, two = duration(WORK, HOST, *ONE), duration(WORK, HOST, *TWO)
    assert two.multiplying == pytest.approx(2 * one.multiplying)
    assert two.moving == pytest.approx(2 * one.moving)
    slow = Rates(matmul={"bfloat16": 1e9}, copy=1e9, issue=1e-6)
    host = replace(HOST, ranks={1: replace(slow, copy=8e9), 4: slow})
    assert host.of_ranks(1).copy == 8e9, "what was measured of so many is taken for them"
    assert host.of_ranks(3).copy == host.of_ranks(4).copy == 1e9
    more = host.of_ranks(8)
    assert (more.copy, more.matmul, more.issue) == (0.5e9, {"bfloat16": 0.5e9}, 1e-6)


@pytest.mark.parametrize(
    ("card", "work", "machine", "expected"),
    [
        (replace(CARD, bandwidth=None), {}, None, "square (a file) does not say its bandwidth"),
        (replace(CARD, flops={}), {}, None, "does not say its flops.bfloat16"),
        (CARD, {"flops": {"float16": 1.0}}, None, "does not say its flops.float16"),
        (replace(CARD, link=None), traffic(1), None, "does not say its link"),
        (replace(CARD, link=0), traffic(1), None, "does not say its link"),
        (replace(CARD, host_link=None), {"copied_bytes": 7e9}, None, "say its host_link"),
        (CARD, traffic(1, 0, 4), None, "no machine is named. Name a node"),
        (
            CARD,
            traffic(1, 0, 4),
            replace(MACHINE, network=None),
            "'four' has no network. Name a",
        ),
    ],
)
def test_what_is_missing_is_named(
    card: Card, work: Mapping[str, Any], machine: Machine | None, expected: str
) -> None:
    with pytest.raises(UnknownRateError) as caught:
        duration(replace(WORK, **work), card, *EIGHT, machine=machine)
    assert expected in str(caught.value)
