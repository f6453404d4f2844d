"""Planning replaces nothing in the libraries that it plans for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import anygauge.planning
from tests.architecture.private_members import library_names

LIBRARIES = {"torch", "transformers", "deepspeed", "peft"}


def replaced(source: str) -> list[str]:
    """Attributes of a library's modules and classes that a source sets or deletes."""
    tree = ast.parse(source)
    libraries = {name for name, of in library_names(tree) if of.partition(".")[0] in LIBRARIES}
    targets = [
        ast.unparse(node.args[0] if isinstance(node, ast.Call) else node)
        for node in ast.walk(tree)
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"))
    ]
    return [text for text in targets if text.partition(".")[0] in libraries]


def test_no_attribute_of_a_library_is_assigned_to() -> None:
    paths = [*Path(anygauge.planning.__file__).parent.glob("*.py")]
    found = {path.name: replaced(path.read_text(encoding="utf-8")) for path in paths}
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
    assert replaced(source)
