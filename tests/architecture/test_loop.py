"""The loop fits on a screen and does not ask what it runs on."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

from tests.architecture.repository import CORE

LOOP = CORE / "training/loop.py"
SCREEN = 60
ASKS = re.compile(r"backend|strategy|engine|device|accelerator|launcher|capabilit|stage|sharded")


def parse_loop() -> ast.Module:
    return ast.parse(LOOP.read_text(encoding="utf-8"))


def conditions(tree: ast.AST) -> list[ast.expr]:
    """Every expression that decides what is run next."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                found.append(test)
            case ast.Assert(test=test):
                found.append(test)
            case ast.Match(subject=subject):
                found.append(subject)
            case ast.comprehension(ifs=ifs):
                found.extend(ifs)
            case ast.BoolOp(values=values):
                found.extend(values)
    return found


def questions(tree: ast.AST) -> list[str]:
    """The conditions that speak of what differs between devices or strategies."""
    return [
        ast.unparse(condition)
        for condition in conditions(tree)
        if any(
            isinstance(node, ast.Name | ast.Attribute)
            and ASKS.search(node.id if isinstance(node, ast.Name) else node.attr)
            for node in ast.walk(condition)
        )
    ]


def test_a_step_fits_on_a_screen():
    (loop,) = (
        node for node in parse_loop().body if isinstance(node, ast.ClassDef) and node.name == "Loop"
    )
    (run,) = (n for n in loop.body if isinstance(n, ast.FunctionDef) and n.name == "run")
    assert run.end_lineno is not None
    assert run.end_lineno - run.lineno + 1 <= SCREEN


def test_no_branch_on_device_or_strategy():
    tree = parse_loop()
    assert conditions(tree), "the loop has conditions: when to evaluate, at least"
    assert questions(tree) == []


@pytest.mark.parametrize(
    "source",
    [
        "if self.backend.placement.pinned_memory: ...",
        "x = 1 if strategy.name == 'zero' else 2",
        "while engine.stage == 3: ...",
        "match self.device.type:\n    case _: ...",
        "y = [a for a in b if a.device_type]",
        "backend.lazy and mark()",
        "if ready:\n    pass\nelif capabilities['x']:\n    pass",
    ],
)
def test_a_planted_branch_is_found(source):
    assert len(questions(ast.parse(textwrap.dedent(source)))) >= 1
