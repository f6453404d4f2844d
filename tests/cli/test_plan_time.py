"""What ``anygauge plan`` says of time, from figures that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anygauge.cli import lines, planned
from anygauge.config.schema import RunFile
from anygauge.interface import Card
from anygauge.planning.changes import Choice, _order
from anygauge.planning.machines import Machine
from anygauge.planning.memory import Traffic, Work
from anygauge.planning.time import duration
from anygauge.planning.trials import Target, Trial
from tests.planning.standins import memory, run

CARD = Card(name="square", flops={"bfloat16": 100e12}, bandwidth=1e12, link=100e9)
MACHINE = Machine(name="eight", card="square", cards=8, link=100e9, network=50e9)
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
        ranks,
        of.launch.devices,
        machine=MACHINE,
        tokens=65_536,
        flops=400e12,
    )
    return Trial(run=of, memory=replace(memory(1000), work=work), fit=None, time=time)


def said(of: Trial) -> list[str]:
    return list(planned._time(of, TARGET))


def test_a_step_its_parts_and_the_run() -> None:
    found = trial(run(train={"steps": 100}))
    assert found.time is not None
    first, parts, whole = said(found)
    each = found.time.tokens_per_s / 8
    assert first.endswith(
        f"({each:,.0f} each); MFU {found.time.flops / 8e14 / found.time.step:.0%}"
    )
    assert "matrix products 1.00 s" in parts and "sends in a machine" in parts
    assert whole == f"  the run: 100 steps, {100 * found.time.step / 60:.1f} min"


def test_several_machines_send_to_each_other() -> None:
    two = trial(run(launch={"nodes": 2, "devices": 8}))
    assert "between machines" in said(two)[1]


def test_without_a_rate_it_says_which_is_missing() -> None:
    unknown = replace(trial(run()), time=None, untimed="no bandwidth")
    assert said(unknown) == ["Time: not known: no bandwidth"]


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
