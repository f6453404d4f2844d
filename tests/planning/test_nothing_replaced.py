"""Planning replaces nothing in the libraries that it plans for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import anygauge.planning
from tests.architecture.private_members import library_names

LIBRARIES = {"torch", "transformers", "deepspeed", "peft"}


def replaced(tree: ast.Module) -> list[str]:
    """Attributes of a library's modules and classes that a source sets or deletes."""
    libraries = {name for name, of in library_names(tree) if of.partition(".")[0] in LIBRARIES}
    targets: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(ctx=ast.Store() | ast.Del())
                | ast.Subscript(ctx=ast.Store() | ast.Del())
            ):
                targets.append(node)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
                targets.append(target)
    texts = map(ast.unparse, targets)
    return [text for text in texts if text.partition(".")[0] in libraries]


def test_no_attribute_of_a_library_is_assigned_to() -> None:
    paths = [*Path(anygauge.planning.__file__).parent.glob("*.py")]
    found = {path.name: replaced(ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    assert len(found) > 3 and not any(found.values()), found


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
    assert replaced(ast.parse(source))
