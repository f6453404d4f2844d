"""Each key of ours on the page *Coming from another tool* is a field, and takes the value shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from anygauge.cli import COMMANDS
from anygauge.config.describe import sections
from anygauge.config.load import load_run_file
from tests.docs.pages import ROOT

PAGE = ROOT / "docs/coming-from.md"
TABLES = re.findall(r"^## (.+)\n(?:(?!## ).*\n)*?((?:\|.*\n)+)", PAGE.read_text(), re.M)
FIELDS = {
    ".".join((*path, name)) for path, section in sections() for name in section.model_fields
}


def cells(table: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    return [line.split("|")[1:-1] for line in table.splitlines()[2:]]


OURS = sorted(
    {name for _, table in TABLES for row in cells(table) for name in re.findall("`(.+?)`", row[1])}
    # Of the notes, what is a path of ours.
    | {n for n in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:: .+?)?`", PAGE.read_text()) if n in FIELDS}
)


@pytest.mark.parametrize("key", OURS)
def test_each_key_of_ours_is_a_field(key: str, tmp_path: Path) -> None:
    if key.startswith("anygauge "):
        assert key.split()[1] in COMMANDS
        return
    name, _, value = key.partition(": ")
    assert name in FIELDS
    if not value:
        return
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"model": {"name": "m"}, "adapter": {}, "data": {"train": {"path": "r"}}})
    )
    # A strategy's field has to stand in a section that has it.
    strategy = "zero" if name.startswith("strategy.") else "auto"
    load_run_file(tmp_path / "run.yaml", [f"strategy.name={strategy}", f"{name}={value}"])


def test_keys_of_the_trainer_are_those_of_the_installed_one() -> None:
    from importlib.util import find_spec

    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "training_args.py").read_text()
    theirs = {name for row in cells(TABLES[0][1]) for name in re.findall("`(.+?)`", row[0])}
    assert theirs
    assert {name for name in theirs if f"\n    {name}:" not in source} == set()
