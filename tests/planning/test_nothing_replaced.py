"""Planning replaces nothing in the libraries that it plans for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import anygauge.planning

FOLDER = Path(anygauge.planning.__file__).parent
LIBRARIES = {"torch", "transformers", "deepspeed", "peft"}


def replaced(source: str) -> Iterator[str]:
    """Attributes of a library's modules and classes that a source assigns to."""
    tree = ast.parse(source)
    of_library: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_library |= {
                (name.asname or name.name).partition(".")[0]
                for name in node.names
                if name.name.partition(".")[0] in LIBRARIES
            }
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES
        ):
            of_library |= {name.asname or name.name for name in node.names}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            targets = [ast.Attribute(value=node.args[0])]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in of_library:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_no_attribute_of_a_library_is_assigned_to(path: Path) -> None:
    assert not list(replaced(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.softmax = None",
        "from torch import nn\nnn.Module._apply = None",
        "import torch as t\nsetattr(t.nn, 'Linear', None)",
        "from transformers.utils import import_utils\ndel import_utils.x",
    ],
)
def test_what_assigns_is_found(source: str) -> None:
    assert list(replaced(source))
