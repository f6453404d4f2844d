"""docs/gaudi.md lists what the code has: releases and options."""

from __future__ import annotations

from pathlib import Path

from anygauge_hpu.options import OPTIONS
from anygauge_hpu.software import RELEASES

PAGE = (Path(__file__).parents[2] / "docs/gaudi.md").read_text(encoding="utf-8").splitlines()


def rows(title: str) -> list[str]:
    start = next(i for i, line in enumerate(PAGE) if line.startswith(f"| {title} |"))
    found = []
    for line in PAGE[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(line)
    return found


def test_every_release_is_listed() -> None:
    assert rows("release") == [
        f"| {r.version} | {r.torch or 'not verified'} | "
        + (f"`{r.image}` |" if r.image else "not verified |")
        for r in RELEASES
    ]


def test_every_option_is_listed() -> None:
    assert rows("option") == [
        f"| `{name}` | {option.meaning} | {option.valid} |" for name, option in OPTIONS.items()
    ]
