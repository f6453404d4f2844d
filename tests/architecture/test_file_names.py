"""A file's name says its subject without its folder: none stands twice but by a scheme."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath

from tests.architecture.repository import ROOT

STRATEGY = frozenset(["spec", "engine", "footprint"])
DEVICE = frozenset(["backend", "probe", "placement", "environment", "diagnostics", "device"])
FACETS = frozenset(["graph", "kernels", "options"])
"""A facet's or an option section's contract stands in `anygauge/interface`, what answers it in a
plugin's folder."""

SCHEMES = {
    "anygauge/interface": DEVICE | FACETS | {"engine"},
    "anygauge/strategies": STRATEGY,
    "backends": DEVICE | FACETS,
    "examples/plugins": DEVICE | FACETS | STRATEGY | {"test_conformance"},
}
"""Folder -> names that its plugins' folders, or the contract for them, repeat."""

FOLDERS = [
    *("anygauge", "backends", "kernels", "launchers"),
    *("benchmarks", "docker", "docs", "examples", "tests"),
]
NAMED_BY_TOOLS = frozenset(["__init__", "__main__", "conftest", "setup", "sitecustomize"])
IMITATIONS = "tests/standins/"
"""Its files have the names of what they stand in for."""


def scheme_of(path: PurePosixPath) -> frozenset[str]:
    """Names that may stand twice where `path` is."""
    return frozenset().union(
        *(names for folder, names in SCHEMES.items() if path.is_relative_to(folder))
    )


def twice(paths: list[str]) -> dict[str, list[str]]:
    """Name -> paths, of each name that stands twice outside its scheme."""
    holders = defaultdict(list)
    for path in map(PurePosixPath, paths):
        if path.stem not in NAMED_BY_TOOLS and not str(path).startswith(IMITATIONS):
            holders[path.stem].append(path)
    return {
        name: list(map(str, found))
        for name, found in holders.items()
        if len(found) > 1 and any(name not in scheme_of(path) for path in found)
    }


def test_no_file_name_stands_twice() -> None:
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = [path.as_posix() for path in paths if "build" not in path.parts]
    assert len(files) > 100
    assert twice(files) == {}


def test_names_that_stand_twice_are_found() -> None:
    assert twice(["anygauge/data/rows.py", "benchmarks/rows.py"]) == {
        "rows": ["anygauge/data/rows.py", "benchmarks/rows.py"]
    }
    assert twice(["backends/anygauge_cpu/probe.py", "anygauge/launch/probe.py"]) != {}
    assert twice(["backends/anygauge_cpu/probe.py", "backends/anygauge_hpu/probe.py"]) == {}
    assert twice(["anygauge/data/__init__.py", "anygauge/__init__.py"]) == {}
