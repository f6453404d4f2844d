"""What mkdocs needs to make a site of these pages, which are also read as files of a repository.

The README is the first page, with the files beside it that it links. A link to a source file has
no page to lead to: its text stays.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Page beside docs/ -> its place on the site."""

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.M | re.S)
MARKS = re.compile(r"(?<=```)(\w*)[^\n]*")
"""A block's language, and after it what the tests are to do with it."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the order of the pages from the README's list of them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    config.nav = ["index.md", *sections_of(text.partition("## Documentation")[2])]
    return config


def sections_of(text: str) -> list[dict[str, list[str]]]:
    """A list as the README has it, as sections of pages: ``- **Train**: [run files](docs/...``."""
    sections = []
    for item in text.split("\n- **")[1:]:
        name, _, rest = item.partition("\n\n")[0].partition("**")
        links = (link for _, link in LINK.findall(rest))
        sections.append({name: [FROM_ROOT.get(link, link.removeprefix("docs/")) for link in links]})
    return sections


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/."""
    from mkdocs.structure.files import File

    for name, place in FROM_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to where the site has their pages; keep the text of those to sources."""
    here = PurePosixPath(page.file.src_uri)
    from_root = here.name in FROM_ROOT.values() and len(here.parts) == 1
    folder = PurePosixPath() if from_root else PurePosixPath("docs") / here.parent

    def lead(match: re.Match[str]) -> str:
        text, link = match.groups()
        path, mark, fragment = link.partition("#")
        if not path or "://" in link or link.startswith("mailto:"):
            return match[0]
        target = PurePosixPath(normpath(folder / path))
        place = FROM_ROOT.get(str(target))
        if place is None and target.is_relative_to("docs"):
            place = str(target.relative_to("docs"))
        if place is None or target.suffix == ".py":
            return text if (ROOT / target).exists() else match[0]  # mkdocs names what is missing
        up = "../" * len(here.parent.parts)
        return f"[{text}]({up}{place}{mark}{fragment})"

    parts = FENCE.split(markdown)
    return "".join(
        MARKS.sub(r"\1", part, count=1) if index % 2 else LINK.sub(lead, part)
        for index, part in enumerate(parts)
    )
