"""The pages of the documentation hang together, leave out nothing that there is, and claim nothing
that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from anygauge.cli import COMMANDS
from anygauge.interface import CAPABILITIES
from anygauge.registry.load_plugins import BLOCK_VARIABLE, HOOK_NAMES
from anygauge.strategies import anygauge_provide_strategies
from anygauge.util.events import EVENTS_FD
from tests.docs.pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    click_command,
    links,
    prose,
    section,
    table_names,
)

README, COMMANDS_PAGE = ROOT / "README.md", ROOT / "docs/commands.md"
BACKENDS_PAGE = ROOT / "docs/backends.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, fragment = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert ROOT in target.parents, f"{page.name}: {link} leaves the repository"
        if fragment:
            assert fragment in anchors(target), f"{page.name}: {link}"


def test_the_readme_links_every_page() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(README)}
    assert set(PAGES) - {README} <= linked


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    assert f"anygauge {name}" in table_names(section(COMMANDS_PAGE, "## All commands"))
    text = section(COMMANDS_PAGE, f"## `anygauge {name}`")
    options = {
        option
        for parameter in click_command(name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert options - {"--help"} <= documented
    foreign = {
        o for p in COMMANDS for q in click_command(p).params for o in (*q.opts, *q.secondary_opts)
    }
    assert documented <= foreign, "an option that no command has"


def test_commands_that_do_not_exist_are_not_advertised() -> None:
    spoken_of = {
        name
        for page in PAGES
        for name in re.findall(r"`anygauge ([a-z]+)", page.read_text(encoding="utf-8"))
    }
    assert spoken_of == set(COMMANDS)


def test_every_hook_capability_and_strategy_is_documented() -> None:
    text = BACKENDS_PAGE.read_text(encoding="utf-8")
    assert set(HOOK_NAMES) <= table_names(section(BACKENDS_PAGE, "## How a backend is found"))
    facets = section(BACKENDS_PAGE, "## The contract, facet by facet")
    assert set(CAPABILITIES) <= table_names(facets)
    assert BLOCK_VARIABLE in text
    strategies = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `(\w+)`$", strategies, re.M) == [
        spec.name for spec in anygauge_provide_strategies()
    ]
    shared = {each.stem for each in (ROOT / "anygauge/strategies/shared").glob("[a-z]*.py")}
    assert table_names(section(ROOT / "docs/other-plugins.md", "## A strategy")) == shared


def test_every_room_is_on_the_map() -> None:
    rooms = {f"anygauge/{path.parent.name}" for path in (ROOT / "anygauge").glob("*/__init__.py")}
    page = prose(ROOT / "docs/architecture.md")
    assert {room for room in rooms if f"`{room}`" not in page} == set()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {
        arguments[1]
        for block in blocks()
        if block.language == "sh"
        for arguments in block.commands()
        if arguments[0] == "make"
    }
    assert {"demo", "test"} <= used <= targets


def test_internal_variables_stay_internal() -> None:
    # Users who set it would silence their run.
    assert not [page for page in PAGES if EVENTS_FD in page.read_text(encoding="utf-8")]


MADE_OF_PARTS = {"wandb-run.json", "mlflow-run.json"}
"""Names that a source puts together."""
OF_OTHERS = {"tokenizer.json"}


def sources() -> str:
    """All of the package's own code."""
    folders = ("anygauge", "backends", "launchers", "kernels", "docker")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_one_that_the_sources_know(page: Path) -> None:
    code = sources()
    named = set(re.findall(r"`(?:\w+/)*([a-z][a-z_-]*\.json)`", page.read_text()))
    unknown = {
        name
        for name in named - MADE_OF_PARTS - OF_OTHERS
        if not re.search(rf"(?<![\w-]){re.escape(name)}\b", code)
    }
    assert not unknown - {"data.json"}


def test_the_line_that_names_the_attention_is_the_one_that_is_printed() -> None:
    page = " ".join((ROOT / "docs" / "gaudi.md").read_text().split())
    told = re.search(r"begins with `(\w+:)` says which attention is active", page)
    assert told is not None
    assert f'f"{told[1]} {{plan.describe()}}"' in (ROOT / "anygauge/training/setup.py").read_text()
    assert 'parts = [f"attention ' in (ROOT / "anygauge/kernels/kernel_plan.py").read_text()
    assert f"\n{told[1]} attention " in (ROOT / "docs" / "commands.md").read_text()


def test_the_readme_claims_no_run_that_its_status_denies() -> None:
    status = section(ROOT / "README.md", "## What has run")
    for device, denied in (
        ("CUDA", "several cards only on a [strict stand-in]"),
        ("Gaudi", "on no card"),
    ):
        row = next(line for line in status.splitlines() if device in line)
        assert denied in row
    claim = " ".join((ROOT / "README.md").read_text().partition("\n## ")[0].split())
    assert "NVIDIA GPUs or Intel Gaudi" in claim
    assert "it has run on CPUs and on one NVIDIA H200" in claim
