"""The pages on devices list what the code has: releases, options, versions, rules."""

from __future__ import annotations

from pathlib import Path

from anygauge.interface import ImageRelease
from anygauge_cuda.versions import OLDEST_DRIVER
from anygauge_hpu.options import HpuOptions
from anygauge_hpu.software import RELEASES
from docs.rule_tables import page, shipped
from docs.run_file_tables import field_rows

DOCS = Path(__file__).parents[2] / "docs"


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
    assert told == page(shipped()), "python docs/rule_tables.py docs/environment.md"
