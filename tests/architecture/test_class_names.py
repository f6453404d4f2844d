"""A class name stands for one class in the whole tree, so that a search for it finds that one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.architecture.repository import ROOT

FOLDERS = ("anygauge", "backends", "benchmarks", "examples", "kernels", "launchers", "tests")


def classes(path: Path) -> list[str]:
    """Names of the classes that a file defines outside of functions and other classes."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [node.name for node in body if isinstance(node, ast.ClassDef)]


def test_no_class_name_stands_for_two_classes():
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in classes(path):
                found[name].append(str(path.relative_to(ROOT)))
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
