"""The descriptions that come along: the cards and machines that there must be, sourced and sane."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from anygauge.interface import CARD_FIGURES, MACHINE_FIGURES, Card, Machine
from anygauge.registry import BLOCK_VARIABLE, Hardware, Registry

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/hardware").glob("*.toml"))

# Devices of tests have cards of any size.
TESTS = "anygauge-sim,anygauge-lazy,anygauge-plain"
HARDWARE = Hardware.load(Registry.load({BLOCK_VARIABLE: TESTS}), EXAMPLES)

GB, GIB = 1e9, 2**30
BOUNDS = {
    "memory": (10 * GIB, 300 * GIB),
    "reserved": (0.2 * GIB, 3 * GIB),
    "bandwidth": (200 * GB, 10_000 * GB),
    "link": (10 * GB, 1_000 * GB),
    "host_link": (10 * GB, 100 * GB),
    "cards": (1, 16),
    "network": (0.3 * GB, 800 * GB),
    "host_memory": (15 * GIB, 4_200 * GIB),
    "cores": (4, 256),
    "disk": (60 * GIB, 40_000 * GB),
    "disk_rate": (1 * GB, 100 * GB),
    "copy": (100 * GB, 10_000 * GB),
    "exchange": (5 * GB, 1_000 * GB),
    "call": (1e-6, 1e-2),
    "issue": (1e-6, 1e-3),
}
"""Where a figure of today's cards and machines lies: bits for bytes, or 1000 times, do not."""

RATES = {"float32": (5e12, 200e12), "tf32": (100e12, 1200e12)}
RATES |= dict.fromkeys(("float16", "bfloat16"), (60e12, 2500e12))


def test_the_cards_that_there_must_be() -> None:
    for name in (
        *("V100 16", "V100 32", "A100 40", "A100 80", "H100", "H200", "B200", "MI300X"),
        *("Gaudi2", "Gaudi3", "Max 1550", "910B", "L4", "4090", "CPU"),
    ):
        assert HARDWARE.card(name).memory, name
    assert not HARDWARE.failures


def test_the_machines_that_there_must_be() -> None:
    for name in (
        *("HLS-2", "DGX A100", "DGX H100", "dgx-b200", "Standard_ND96asr_v4", "ND96isr_H100_v5"),
        *("Standard_NC24rs_v3", "Standard_NC96ads_A100_v4", "p4d.24xlarge", "ml.p5.48xlarge"),
        "dl1.24xlarge",
    ):
        machine = HARDWARE.machine(name)
        assert machine.cards and machine.host_memory and machine.link, name


def test_every_machine_has_a_card_that_is_described() -> None:
    for machine in HARDWARE.machines:
        assert HARDWARE.machine(machine.name).link is not None, machine.name


def test_a_name_on_the_card_is_its_drivers() -> None:
    assert HARDWARE.card("NVIDIA H100 80GB HBM3").name == "h100"
    assert HARDWARE.card("Tesla V100-SXM2-32GB").name == "v100-32"


@pytest.mark.parametrize("described", [*HARDWARE.cards, *HARDWARE.machines], ids=lambda d: d.name)
def test_every_figure_has_a_source_and_is_sane(described: Card | Machine) -> None:
    figures = CARD_FIGURES if isinstance(described, Card) else MACHINE_FIGURES
    assert set(BOUNDS) | {"price"} == {*CARD_FIGURES, *MACHINE_FIGURES}
    assert {one.name for one in dataclasses.fields(described)} >= set(figures)
    for name in figures:
        value = getattr(described, name)
        if value is None:
            continue
        assert len(described.sources[name]) > 7, name
        least, most = BOUNDS[name]
        assert least <= value <= most, (name, value)
    if isinstance(described, Card):
        for kind, rate in described.flops.items():
            assert len(described.sources[f"flops.{kind}"]) > 7, kind
            least, most = RATES[kind]
            assert least <= rate <= most, (kind, rate)
        for kind, rate in described.matmul.items():
            assert len(described.sources[f"matmul.{kind}"]) > 7, kind
            assert 0.4 <= rate / described.flops[kind] <= 1, (kind, rate)


def test_no_price_is_shipped() -> None:
    assert not [machine.name for machine in HARDWARE.machines if machine.price is not None]


def test_a_figure_in_the_wrong_unit_is_seen() -> None:
    link = HARDWARE.card("a100-80").link
    assert link is not None
    least, most = BOUNDS["link"]
    assert not least <= link / 1000 and not link * 1000 <= most
    network = HARDWARE.machine("p5").network
    assert network is not None and not network * 8 <= BOUNDS["network"][1]
