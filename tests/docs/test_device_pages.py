"""The pages on devices list what the code has: releases, options, versions, rules, hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.interface import CARD_FIGURES, FLOPS_TYPES, ImageRelease, read_cards
from anygauge.planning.machines import MACHINE_FIGURES, Hardware
from anygauge.registry import Registry
from anygauge_cuda.diagnostics import OLDEST_DRIVER
from anygauge_hpu.backend import HpuOptions
from anygauge_hpu.diagnostics import RELEASES
from docs import hardware_tables, rule_tables
from docs.run_file_tables import field_rows
from tests.docs.pages import ROOT, marked

DOCS = ROOT / "docs"
HARDWARE = DOCS / "hardware.md"


def rows(name: str, title: str) -> list[str]:
    """The rows of the table whose first column has this title."""
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(line)
    return found


def extra(release: ImageRelease) -> str:
    if not release.built:
        return "none"
    return "`hpu`" if release.versions["transformers"] >= "5" else "`hpu-lazy`"


def test_every_release_of_gaudis_software_is_listed() -> None:
    assert rows("gaudi.md", "release") == [
        f"| {r.name} | {r.versions['torch']} | {r.versions['deepspeed']} | {extra(r)} | "
        + r.goes_with["optimum-habana"]
        + ("" if "optimum-habana" in r.versions or not r.built else ", not in the image")
        + (f" | `{r.base}` |" if r.built else f" | none: {r.note} |")
        for r in RELEASES
    ]


def test_every_option_is_listed() -> None:
    assert rows("gaudi.md", "field") == field_rows(HpuOptions)


def test_the_oldest_drivers_are_listed() -> None:
    assert rows("stacks.md", "CUDA") == [f"| {c} | {d} |" for c, d in OLDEST_DRIVER.items()]


def test_the_page_of_the_environment_is_made_from_the_rules() -> None:
    told = (DOCS / "environment.md").read_text(encoding="utf-8")
    made = rule_tables.page(rule_tables.shipped())
    assert told == made, "python docs/rule_tables.py docs/environment.md"


def test_the_tables_are_made_from_the_descriptions() -> None:
    text = HARDWARE.read_text(encoding="utf-8")
    made = hardware_tables.page(text, hardware_tables.shipped())
    assert text == made, "python docs/hardware_tables.py docs/hardware.md"


def test_no_source_leans_on_another() -> None:
    # A user's file may replace the figure before it, and pages sort them.
    hardware = hardware_tables.shipped()
    for described in (*hardware.cards, *hardware.machines):
        for figure, source in described.sources.items():
            assert not source.startswith("the same"), (described.name, figure)


def test_the_example_describes_and_corrects(tmp_path: Path) -> None:
    (block,) = marked("hardware")
    own = tmp_path / "own.toml"
    own.write_text(block.text, encoding="utf-8")
    plain, hardware = hardware_tables.shipped(), Hardware.load(Registry.load(), [own])
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
