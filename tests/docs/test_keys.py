"""Keys that pages name: those of ours are fields that take the value shown, and those that are said
to be missing are refused."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from anygauge.cli import COMMANDS
from anygauge.config.describe import sections
from anygauge.config.load import load_run_file
from anygauge.interface import RunFileError
from anygauge.registry import Registry
from tests.docs.pages import PAGES, ROOT, anchors, links

COMING_FROM = (ROOT / "docs/coming-from.md").read_text()
TABLES = dict(re.findall(r"^## (.+)\n(?:(?!## ).*\n)*?((?:\|.*\n)+)", COMING_FROM, re.M))
FIELDS = {".".join((*path, name)) for path, section in sections() for name in section.model_fields}


def rows(table: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [line.split("|")[1:-1] for line in table.splitlines()[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def load(folder: Path, key: str) -> None:
    """Read a run file with a key such as ``data.packing: true``."""
    name, _, value = key.partition(": ")
    fields = {"model": {"name": "m"}, "adapter": {}, "data": {"train": {"path": "rows.jsonl"}}}
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))
    # A strategy's field has to stand in a section that has it.
    strategy = "zero" if name.startswith("strategy.") else "auto"
    load_run_file(folder / "run.yaml", [f"strategy.name={strategy}", f"{name}={value}"])


OURS = {name for table in TABLES.values() for row in rows(table) for name in quoted(row[1])}
OURS |= {name for name in quoted(COMING_FROM) if name.partition(": ")[0] in FIELDS and "." in name}


@pytest.mark.parametrize("key", sorted(OURS))
def test_each_key_of_ours_is_a_field(key: str, tmp_path: Path) -> None:
    if key.startswith("anygauge "):
        assert key.split()[1] in COMMANDS
        return
    assert key.partition(": ")[0] in FIELDS
    if ": " in key:
        load(tmp_path, key)


def test_options_of_the_backend_are_its_own() -> None:
    registry, found = Registry.load(), re.findall(r"`backend_options` \| (.+) \|", COMING_FROM)
    for options in [text for note in found for text in quoted(note)]:
        registry.create_backend("hpu", yaml.safe_load(options))
    assert found


def test_keys_of_the_trainer_are_those_of_the_installed_one() -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "training_args.py").read_text()
    theirs = {
        n for row in rows(TABLES["Arguments of Hugging Face's Trainer"]) for n in quoted(row[0])
    }
    assert {name for name in theirs if f"\n    {name}:" not in source} == set()


MISSING = [
    key
    for line in (ROOT / "docs/not-here.md").read_text().splitlines()
    if line.startswith("| ")
    for key in quoted(line.split("|")[1])
    if ": " in key
]


@pytest.mark.parametrize("key", MISSING)
def test_what_is_not_here_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(RunFileError):
        load(tmp_path, key)


def test_each_word_of_the_glossary_is_linked_from_a_page() -> None:
    glossary = ROOT / "docs/glossary.md"
    linked = {
        link.partition("#")[2]
        for page in PAGES
        for link in links(page)
        if link.partition("#")[0].endswith("glossary.md")
    }
    assert anchors(glossary) - {"ten-words"} == linked - {""}
    assert len(linked - {""}) == 10
