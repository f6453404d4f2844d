"""Modules that stand for others where nothing is compiled and no size is a symbol."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"


@functools.cache
def _torch() -> Path:
    """torch's folder."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What a compiler's decorators give back, with arguments or without."""
    return (lambda later: later) if function is None else function


class NoCompiler(ModuleType):
    """torch's compiler as it is for code that is never compiled; its parts are found as usual."""

    disable = assume_constant_result = allow_in_graph = staticmethod(as_it_is)
    disallow_in_graph = mark_static_address = run = staticmethod(as_it_is)
    is_compiling = staticmethod(lambda: False)
    graph_break = reset = staticmethod(lambda *args, **kwargs: None)
    # A new process group has them forget what it was.
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    OptimizedModule = type("OptimizedModule", (), {})  # what no module is
    eval_frame = SimpleNamespace(OptimizedModule=OptimizedModule)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.source = _Sources(f"{name}.source")
        self.__path__ = [str(_torch() / "_dynamo")]

    def __getattr__(self, name: str) -> Any:
        """A part that nobody has imported yet."""
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{COMPILER}.{name}")
        except ImportError as error:
            raise AttributeError(f"{COMPILER}.{name}") from error


class Later(ModuleType):
    """A module that is imported once something of it is asked for, but for what is known of it.

    A function of it may be imported by others: it is asked for when it is called.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__ = [str(_torch().parent.joinpath(*name.split(".")))]
        self._known = known
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return lambda *args, **kwargs: self._real(name)(*args, **kwargs)
        return self._real(name)

    def _real(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
            for known in self._known:
                delattr(self, known)
        return getattr(importlib.import_module(self.__name__), name)


def _plain(value: bool) -> bool:
    """A guard of what has no symbols."""
    assert isinstance(value, bool)
    return value


def _without(*values: Any) -> tuple[()]:
    """Symbols of what has none."""
    return ()


_GUARDS = ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true")
_ASKED = (
    "_iterate_exprs",
    "_iterate_nodes",
    "free_unbacked_symbols",
    "has_free_unbacked_symbols",
    "is_nested_int",
)
LATER: Mapping[str, Mapping[str, Any]] = {
    "sympy": {"Basic": type("Basic", (), {})},
    "torch.utils._sympy.functions": {"Max": None},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(_GUARDS, _plain),
        **dict.fromkeys(_ASKED, _without),
        "sym_eq": operator.eq,
        "sym_and": lambda *values: all(map(_plain, values)),
        "sym_or": lambda *values: any(map(_plain, values)),
        "GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (RuntimeError,), {}),
    },
}
"""What torch imports for sizes that are symbols, as those of a compiler are; and what of it other
parts of torch ask for, as it is where all sizes are numbers."""


class Patterns(ModuleType):
    """Python's `re`, which compiles a pattern once something of it is asked for."""

    compile = staticmethod(lambda *args: _Pattern(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)


class _Pattern:
    """One of them."""

    def __init__(self, *args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(*self._args), name)


class _Source:
    """Of any kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Any arguments."""


class _Sources(ModuleType):
    """Names of where a compiled function's tensors come from: torch gives them to every tensor."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Source
