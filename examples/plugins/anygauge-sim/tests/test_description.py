"""The card as plans know it is the card as torch reports it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from anygauge.planning.machines import Hardware
from anygauge.registry import Registry


def test_plans_find_the_card_with_the_memory_that_torch_reports(sim: Any) -> None:
    card = Hardware.load(Registry.load()).card("sim")
    version = importlib.metadata.version("anygauge-sim")
    assert (card.backend, card.origin) == ("sim", f"device.toml of anygauge-sim {version}")
    assert card.memory == sim.mem_get_info()[1]


def test_a_card_takes_nothing_for_itself(sim: Any) -> None:
    card = Hardware.load(Registry.load()).card("sim")
    free, total = sim.mem_get_info()
    assert card.reserved == total - free - sim.memory_allocated() == 0


def test_its_capacity_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYGAUGE_SIM_CAPACITY", "1234567")
    machine = Hardware.load(Registry.load()).machine("sim:4")
    assert (machine.card, machine.cards) == ("sim", 4)
    assert Hardware.load(Registry.load()).card("sim").memory == 1234567
