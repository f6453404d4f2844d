"""What ``anygauge plan`` says of time, from figures that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anygauge.cli import lines, planned
from anygauge.config.schema import RunFile
from anygauge.interface import Card
from anygauge.planning.changes import Choice, _order, total_times
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Traffic, Work
from anygauge.planning.time import Ranks, duration
from anygauge.planning.trials import Target, Trial
from tests.planning.standins import memory, run

CARD = Card(name="square", flops={"bfloat16": 100e12}, bandwidth=1e12, link=100e9)
MACHINE = Machine(name="eight", card="square", cards=8, link=100e9, network=50e9, price=36.0)
TARGET = Target(backend="cpu", card=CARD, machine=MACHINE)


def trial(of: RunFile, count: float = 80e9) -> Trial:
    """Each rank multiplies for a second, and gathers."""
    ranks = of.launch.nodes * of.launch.devices
    gather = Traffic(
        operation="all_gather", group=tuple(range(ranks)), waited=False, times=9, bytes=count
    )
    work = replace(Work(), flops={"bfloat16": 80e12}, traffic=(gather,))
    time = duration(
        work,
        CARD,
        Ranks(ranks=ranks, per_machine=of.launch.devices),
        machine=MACHINE,
        tokens=65_536,
        flops=400e12,
    )
    return Trial(run=of, memory=replace(memory(1000), work=work), fit=None, time=time)


def said(of: Trial) -> list[str]:
    return list(planned._time(of, TARGET))


def test_a_step_its_parts_and_an_epoch_with_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = trial(run(train={"steps": 100}))
    assert found.time is not None
    first, parts = said(found)
    each = found.time.tokens_per_s / 8
    assert first.endswith(
        f"({each:,.0f} each); MFU {found.time.flops / 8e14 / found.time.step:.0%}"
    )
    assert "matrix products 1.00 s" in parts and "sends in a machine" in parts
    planned.Page().trial(found, TARGET, 640, [])
    *_, epoch, whole = capsys.readouterr().out.splitlines()
    assert epoch.startswith("  the epoch: 10 steps, ")
    cost = 36 * 100 * found.time.step / 3600
    assert whole == f"  the run: 100 steps, {100 * found.time.step / 60:.1f} min, cost {cost:,.2f}"


def test_several_machines_send_to_each_other_and_all_are_paid() -> None:
    one, two = trial(run()), trial(run(launch={"nodes": 2, "devices": 8}))
    assert "between machines" in said(two)[1]
    epoch, _ = total_times(two, MACHINE, 640)
    assert epoch["money"] == pytest.approx(2 * 36 * epoch["seconds"] / 3600)
    assert total_times(one, None, 640)[0]["money"] is None
    assert total_times(one, MACHINE, None) == []


def test_without_a_rate_it_says_which_is_missing() -> None:
    unknown = replace(trial(run()), time=None, untimed="no bandwidth")
    assert said(unknown) == ["Time: not known: no bandwidth"]
    assert total_times(unknown, MACHINE, 640) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0123, "12.3 ms"), (1.5, "1.50 s"), (600, "10.0 min"), (90_000, "25.0 h")],
)
def test_times_in_words(value: float, expected: str) -> None:
    assert lines.seconds(value) == expected


def test_faster_ways_come_first() -> None:
    def row(name: str, count: float) -> Choice:
        return Choice(name, trial=trial(run(), count))

    rows = [row("slow", 900e9), row("quick", 8e9), row("middle", 90e9)]
    assert [one.name for one in sorted(rows, key=_order)] == ["quick", "middle", "slow"]
