"""docs/environment.md is what the backends' rules say today."""

from __future__ import annotations

from pathlib import Path

from docs.rule_tables import page, shipped


def test_the_page_is_made_from_the_rules() -> None:
    path = Path(__file__).parents[2] / "docs/environment.md"
    assert path.read_text(encoding="utf-8") == page(shipped()), (
        "python docs/rule_tables.py docs/environment.md"
    )
