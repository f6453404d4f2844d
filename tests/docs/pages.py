"""The pages of the documentation, and the fenced blocks on them.

The words behind a fence's language say what a test does with the block: ``run`` executes it,
``fails`` executes commands that must fail with the message in the text block that follows,
``run-file`` loads it, ``file=NAME`` writes it to that name, ``over=NAME`` puts it over another
run file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.main

from anygauge.cli import command_function

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        line: of its fence, from 1.
        following: the text block that comes next on the page, or "".
    """

    page: Path
    line: int
    language: str
    words: frozenset[str]
    text: str
    following: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def option(self, name: str) -> str | None:
        """The value of ``name=value`` behind the language."""
        values = (word.partition("=") for word in sorted(self.words))
        return next((value for key, _, value in values if key == name), None)

    def commands(self) -> Iterator[list[str]]:
        """Its command lines, as arguments, without comments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            arguments = shlex.split(line, comments=True)
            if arguments:
                yield arguments


def blocks() -> list[Block]:
    """Every fenced block of every page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = list(_FENCE.finditer(text))
        for number, fence in enumerate(fences):
            language, *words = fence[1].split() or [""]
            later = fences[number + 1] if number + 1 < len(fences) else None
            found.append(
                Block(
                    page=page,
                    line=text.count("\n", 0, fence.start()) + 1,
                    language=language,
                    words=frozenset(words),
                    text=fence[2],
                    following=later[2] if later is not None and later[1] == "text" else "",
                )
            )
    return found


def marked(word: str) -> list[Block]:
    """The blocks that bear a word; there is at least one, so that no test runs on nothing."""
    found = [block for block in blocks() if word in block.words]
    assert found, f"no block is marked {word!r}"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where its links point, in the order in which they stand."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors that its headings get on the usual hosts."""
    return {anchor(heading) for heading in _HEADING.findall(prose(page))}


def anchor(heading: str) -> str:
    """``Environment: who sets what`` is ``environment-who-sets-what``."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.M)[0]


def table_names(text: str) -> set[str]:
    """What stands in backquotes in the first column of the tables of a text."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def click_command(name: str) -> Any:
    """A command as the command line makes it."""
    app = typer.Typer(add_completion=False)
    app.command(name)(command_function(name))
    return typer.main.get_command(app)
