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
    """Attributes of a library's modules and classes that a source sets or deletes."""
    tree, of_library = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in node.names:
                if (getattr(node, "module", None) or name.name).partition(".")[0] in LIBRARIES:
                    of_library.add((name.asname or name.name).partition(".")[0])
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) as target:
                pass
            case ast.Subscript(ctx=ast.Store() | ast.Del()) as target:
                pass
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
                pass
            case _:
                continue
        if ast.unparse(target).partition(".")[0] in of_library:
            yield ast.unparse(node)


def test_no_attribute_of_a_library_is_assigned_to() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    assert len(sources) > 3
    assert not {name: found for name, text in sources.items() if (found := [*replaced(text)])}


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
