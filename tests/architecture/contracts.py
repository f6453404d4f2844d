"""Checks the import contracts of pyproject.toml, in which ``backends/*`` is every package there.

python -m tests.architecture.contracts [options of lint-imports]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.architecture.repository import ROOT, example_plugins, project

FILE = ROOT / "build/importlinter.toml"


def expanded(value: Any) -> Any:
    """A field with packages in the place of their folders: import-linter knows no such patterns."""
    if not isinstance(value, list):
        return value
    found = [sorted(ROOT.glob(f"{one}/__init__.py")) if "/" in one else [one] for one in value]
    return [one.parent.name if isinstance(one, Path) else one for ones in found for one in ones]


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What import-linter is told of all contracts, and the contracts."""
    table = dict(project()["tool"]["importlinter"])
    contracts = table.pop("contracts")
    common = {key: expanded(value) for key, value in table.items()}
    return common, [{key: expanded(value) for key, value in one.items()} for one in contracts]


def _lines(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


if __name__ == "__main__":
    common, contracts = read()
    parts = [f"\n[[tool.importlinter.contracts]]\n{_lines(one)}" for one in contracts]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("[tool.importlinter]\n" + _lines(common) + "".join(parts), encoding="utf-8")
    folders = [str(package.parent) for package in example_plugins()]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    program = str(Path(sys.executable).with_name("lint-imports"))
    os.execv(program, [program, "--no-logo", str(FILE), *sys.argv[1:]])
