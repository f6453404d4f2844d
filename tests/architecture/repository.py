"""Where the sources are, and the sets of modules that architecture tests talk about."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORE = ROOT / "anygauge"


@cache
def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages() -> list[Path]:
    """Folders of the import packages that the wheel carries."""
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    found = [sorted(ROOT.glob(f"{folder}/*/__init__.py")) for folder in wheel["sources"]]
    return [CORE, *(path.parent for paths in found for path in paths)]


def example_plugins() -> list[Path]:
    """Folders of the import packages of examples/plugins."""
    return [path.parent for path in sorted(ROOT.glob("examples/plugins/*/anygauge_*/__init__.py"))]


def core_packages() -> set[str]:
    """Full names of the packages of the core."""
    return {f"anygauge.{path.parent.name}" for path in CORE.glob("*/__init__.py")}


def modules(package: Path) -> list[str]:
    """Full names of every module in a package's folder; not of those that run when imported."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.name == "__main__.py":
            continue
        parts = path.relative_to(package.parent).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found
