"""Time of a step: each part by its own rate, and what is missing is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anygauge.interface import Card, Rates
from anygauge.planning import time as times
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Traffic, Work
from anygauge.planning.time import Ranks, UnknownRateError, duration

CARD = Card(
    name="square",
    origin="a file",
    flops={"bfloat16": 100e12, "float32": 10e12},
    bandwidth=1e12,
    link=100e9,
)
MACHINE = Machine(name="four", card="square", cards=4, link=100e9, network=50e9)
ONE = Ranks(ranks=1, per_machine=1)
WORK = Work(flops={"bfloat16": 72e12}, other_bytes=0.8e12)
MEASURED = replace(CARD, matmul={"bfloat16": 40e12}, copy=0.4e12, exchange=10e9, issue=1.0)
HOST = replace(MEASURED, shared_memory=True, issue=1e-6)


def traffic(
    count: float, *, group: tuple[int, ...] = (0, 1), waited: bool = False, times: float = 0
) -> Traffic:
    return Traffic(operation="all_gather", group=group, waited=waited, times=times, bytes=count)


def test_each_part_by_its_rate() -> None:
    found = duration(WORK, CARD, ONE, tokens=1000, flops=50e12)
    assert found.multiplying == pytest.approx(72 / (100 * times.REACHED))
    assert found.moving == pytest.approx(0.8 / times.COPIED)
    assert found.step == pytest.approx(found.multiplying + found.moving)
    assert found.tokens_per_s == pytest.approx(1000 / found.step)
    assert found.mfu == pytest.approx(50 / 100 / found.step)


def test_thin_products_are_as_long_as_their_matrices_take() -> None:
    found = duration(replace(WORK, matrix_bytes=80e12), CARD, ONE)
    assert found.multiplying == pytest.approx(80 / times.COPIED)


def test_measured_rates_come_first() -> None:
    found = duration(WORK, MEASURED, ONE)
    assert found.multiplying == pytest.approx(72 / 40)
    assert found.moving == pytest.approx(2)


def test_a_host_that_issues_slowly_sets_the_pace_of_a_device() -> None:
    busy = duration(WORK, CARD, ONE).step
    slow = duration(replace(WORK, operations=1e9), CARD, ONE)
    assert slow.step == pytest.approx(1e9 * times.ISSUE, rel=1e-3)
    alike = duration(replace(WORK, operations=busy / times.ISSUE), CARD, ONE)
    assert busy < alike.step < busy + alike.issuing


def test_a_host_that_is_the_device_does_one_after_the_other() -> None:
    work = replace(WORK, operations=1e6)
    found = duration(work, HOST, ONE)
    assert found.step == pytest.approx(found.multiplying + found.moving + 1)
    halved = duration(work, HOST, Ranks(ranks=2, per_machine=2))
    assert halved.multiplying == pytest.approx(2 * found.multiplying)
    assert halved.moving == pytest.approx(2 * found.moving)


def test_sending_goes_on_meanwhile_unless_it_is_waited_for() -> None:
    two = Ranks(ranks=2, per_machine=2)
    alone = duration(WORK, MEASURED, two).step
    beside = replace(WORK, traffic=(traffic(20e9),))
    found = duration(beside, MEASURED, two)
    assert found.sending == {"cards": pytest.approx(1), "machines": 0}
    assert found.step == pytest.approx(alone + 1 - times.OVERLAP)
    waited = duration(replace(WORK, traffic=(traffic(20e9, waited=True),)), MEASURED, two)
    assert waited.step == pytest.approx(alone + 1)
    called = duration(replace(WORK, traffic=(traffic(0, waited=True, times=5),)), MEASURED, two)
    assert called.step == pytest.approx(alone + 5 * times.CALL)


def test_what_is_offloaded_is_copied_and_waited_for() -> None:
    far = replace(CARD, host_link=10e9)
    alone = duration(WORK, far, ONE).step
    found = duration(replace(WORK, copied_bytes=7e9, host_bytes=1e9), far, ONE)
    assert found.copying == pytest.approx(0.7 / times.SENT)
    assert found.on_host == pytest.approx(1e9 / times.HOST)
    part = 1 - times.OVERLAP
    assert found.step == pytest.approx(alone + part * found.copying + found.on_host)
    two = duration(replace(WORK, host_bytes=1e9), far, Ranks(ranks=2, per_machine=2))
    assert two.on_host == pytest.approx(2 * found.on_host), "ranks share their host"
    with pytest.raises(UnknownRateError, match="host_link"):
        duration(replace(WORK, copied_bytes=7e9), CARD, ONE)


def test_what_was_measured_of_so_many_ranks_is_taken_for_them() -> None:
    slow = Rates(matmul={"bfloat16": 1e9}, copy=1e9, issue=1e-6)
    host = replace(HOST, ranks={1: replace(slow, copy=8e9), 4: slow})
    assert host.of_ranks(1).copy == 8e9
    assert host.of_ranks(3).copy == host.of_ranks(4).copy == 1e9
    more = host.of_ranks(8)
    assert (more.copy, more.matmul) == (0.5e9, {"bfloat16": 0.5e9})
    assert more.issue == 1e-6
    alone = duration(WORK, replace(host, ranks={1: slow}), Ranks(ranks=1, per_machine=1))
    assert alone.multiplying == pytest.approx(sum(WORK.flops.values()) / 1e9)
    with pytest.raises(UnknownRateError, match=r"flops\.float32"):
        of_another_type = replace(WORK, flops={"float32": 1.0})
        duration(of_another_type, replace(host, ranks={1: slow}, flops={}), ONE)


def test_rings_share_the_network_of_a_machine() -> None:
    eight = Ranks(ranks=8, per_machine=4)
    whole = traffic(8 * 50e9, group=tuple(range(8)))
    found = duration(replace(WORK, traffic=(whole,)), CARD, eight, machine=MACHINE)
    assert found.sending["machines"] == pytest.approx(7 / times.SENT)
    pairs = traffic(50e9, group=(0, 4))  # and three other rings beside it
    found = duration(replace(WORK, traffic=(pairs,)), CARD, eight, machine=MACHINE)
    assert found.sending["machines"] == pytest.approx(4 / 2 / times.SENT)


def test_stages_wait_for_each_other() -> None:
    found = duration(WORK, CARD, Ranks(ranks=4, per_machine=4, stages=4, rounds=12))
    assert found.idle == pytest.approx(3 / 12 * (found.multiplying + found.moving))
    assert found.step == pytest.approx(15 * found.idle / 3)


@pytest.mark.parametrize(
    ("card", "sends", "machine", "expected"),
    [
        (replace(CARD, bandwidth=None), None, None, "square (a file) does not say its bandwidth"),
        (replace(CARD, flops={}), None, None, "does not say its flops.bfloat16"),
        (replace(CARD, link=None), (0, 1), None, "does not say its link"),
        (CARD, (0, 4), None, "no machine is named. Name a node"),
        (CARD, (0, 4), replace(MACHINE, network=None), "machine 'four' has no network. Name a"),
    ],
)
def test_what_is_missing_is_named(
    card: Card, sends: tuple[int, ...] | None, machine: Machine | None, expected: str
) -> None:
    work = replace(WORK, traffic=(traffic(1, group=sends),) if sends else ())
    with pytest.raises(UnknownRateError) as caught:
        duration(work, card, Ranks(ranks=8, per_machine=4), machine=machine)
    assert expected in str(caught.value)


def test_cards_without_any_link_to_each_other() -> None:
    with pytest.raises(UnknownRateError, match="does not say its link"):
        duration(
            replace(WORK, traffic=(traffic(1),)),
            replace(CARD, link=0),
            Ranks(ranks=2, per_machine=2),
        )
