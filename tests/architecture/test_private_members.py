"""Private members of libraries, which the next release may take away: the list may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.private_members import private_members, sources

LIST = Path(__file__).with_name("private_members.txt")


def test_the_list_has_all_that_are_used_and_no_other() -> None:
    listed = LIST.read_text().splitlines()
    found = [f"{path} {name}" for path, name in private_members(sources())]
    new = sorted({*found} - {*listed})
    assert not new, f"use what the library documents, or go without: {new}"
    gone = sorted({*listed} - {*found})
    assert not gone, f"no longer used; take these lines out of {LIST.name}: {gone}"
    assert listed == found, f"{LIST.name} is sorted, and has each line once"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._autograd.x()", ["torch._C._autograd"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch._dynamo as d\nd.reset()", ["torch._dynamo"]),
        ("from torch import _inductor", ["torch._inductor"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("def f(module):\n    return module._buffers", ["_buffers"]),
        ("def f(module):\n    module.inner._buffers = {}", ["_buffers"]),
        ("class A:\n    def f(self):\n        return self._modules", ["_modules"]),
        ("setattr(1, '_hook', 2), getattr(1, '_kept', None)", ["_hook", "_kept"]),
        ("import importlib\nimportlib.import_module('torch._logging')", ["torch._logging"]),
        ("mock.patch.object(x, '_flush', None)", ["_flush"]),
    ],
)
def test_each_way_to_reach_one_is_seen(source: str, names: list[str]) -> None:
    found = private_members({"a.py": ast.parse(source)})
    assert found == [("a.py", name) for name in names]


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "def f(row):\n    return row._replace(a=1).__dict__",
        "class A:\n    _kept = 1\n    def f(self, other):\n        return other._kept + self._kept",
        "from anygauge.util._c import x\nfrom anygauge_sim import _C",
        "for _ in x:\n    y._",
    ],
)
def test_what_is_our_own_or_documented_is_not(source: str) -> None:
    assert private_members({"a.py": ast.parse(source)}) == []


def test_of_oneself_a_base_class_elsewhere_is_our_own() -> None:
    base = ast.parse("class A:\n    def _do(self):\n        pass")
    child = ast.parse("class B(A):\n    def f(self, other):\n        self._do(), other._do()")
    assert private_members({"a.py": base, "b.py": child}) == [("b.py", "_do")]
