"""The documentation's table of wrong backends, made from the tests' own.

``python -m docs.mutant_table`` writes it into docs/plugins.md anew; tests/testing/test_mutations.py
shows that it is true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).with_name("plugins.md")
HEAD = "| part | check that fails | defects |\n|---|---|---|\n"


def rows(caught_by: Mapping[str, Mapping[str, str]]) -> str:
    """A line for each check that finds wrong backends."""
    found: dict[tuple[str, str], list[str]] = {}
    for part, mutations in caught_by.items():
        for name, check in mutations.items():
            found.setdefault((part, check), []).append(name)
    return "".join(
        f"| {part} | `{check}` | {'; '.join(names)} |\n" for (part, check), names in found.items()
    )


def page(text: str, caught_by: Mapping[str, Mapping[str, str]]) -> str:
    """The page with a new table."""
    return re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", lambda _: rows(caught_by), text, count=1)


if __name__ == "__main__":
    from tests.testing.test_mutations import CAUGHT_BY

    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), CAUGHT_BY), encoding="utf-8")
