"""The page of hardware: every key of a description, an example that is true, and sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.interface import CARD_FIGURES, FLOPS_TYPES, read_cards
from anygauge.planning.machines import MACHINE_FIGURES, Hardware
from anygauge.registry import Registry
from docs.make_docs import hardware as shipped
from tests.docs.pages import ROOT, marked

HARDWARE = ROOT / "docs/hardware.md"


def test_no_source_leans_on_another() -> None:
    # A user's file may replace the figure before it, and pages sort them.
    hardware = shipped()
    for described in (*hardware.cards, *hardware.machines):
        for figure, source in described.sources.items():
            assert not source.startswith("the same"), (described.name, figure)


def test_the_example_describes_and_corrects(tmp_path: Path) -> None:
    (block,) = marked("hardware")
    own = tmp_path / "own.toml"
    own.write_text(block.text, encoding="utf-8")
    plain, hardware = shipped(), Hardware.load(Registry.load(), [own])
    machine = hardware.machine("under the desk")
    assert (machine.cards, machine.link, machine.host_memory) == (2, 31e9, 128 * 2**30)
    assert hardware.card(machine.card).flops == {"bfloat16": 122e12}
    assert hardware.machine("p5").disk_rate == 20e9 != plain.machine("p5").disk_rate
    assert hardware.card("h100").bandwidth == 3.0e12 != plain.card("h100").bandwidth
    assert hardware.card("h100").memory == plain.card("h100").memory


@pytest.mark.parametrize(
    "key", [*CARD_FIGURES, *FLOPS_TYPES, *MACHINE_FIGURES, "shared_memory", "ranks"]
)
def test_every_key_is_on_the_page(key: str) -> None:
    prose = HARDWARE.read_text(encoding="utf-8").partition("## Cards")[0]
    assert key in prose or key.replace("_", " ") in prose


def test_the_examples_of_cards_say_all_that_they_know() -> None:
    for file in sorted((ROOT / "examples/hardware").glob("*.toml")):
        (card,) = read_cards(file.read_text(encoding="utf-8"), file.name)
        assert card.memory and card.bandwidth and card.flops and not card.backend
