"""The portable core knows no engine: what an engine calls its own stands in its strategy alone."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

import pytest

from tests.architecture.repository import CORE

HOME = "zero"
"""How the modules of `anygauge/strategies` begin that may speak of DeepSpeed."""


def engine_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each attribute and string of DeepSpeed's; documentation may name it."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=text) if text.startswith("ds_"):
                yield node.lineno, text
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                if text.startswith("ds_") or text == HOME or "deepspeed" in text.lower():
                    yield node.lineno, text


def test_the_core_knows_no_engine() -> None:
    strategies = CORE / "strategies"
    assert list(strategies.glob(f"{HOME}*.py"))
    found = [
        f"{path}:{line}: {text!r}"
        for path in sorted(CORE.rglob("*.py"))
        if not (path.parent == strategies and path.name.startswith(HOME))
        for line, text in engine_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "count = parameter.ds_numel",
        'shape = getattr(parameter, "ds_shape", None)',
        'if run.strategy.name == "zero": ...',
        'packages = ["torch", "deepspeed"]',
        'text = f"DeepSpeed has {fields}"',
    ],
)
def test_a_planted_name_is_found(source: str) -> None:
    assert len(list(engine_names(ast.parse(textwrap.dedent(source))))) == 1
