"""Keeps out of the process of a rehearsal what takes long to import and is never used there.

Without it half of the time of a plan would be spent on imports: of a compiler, mostly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
NOT_HERE = ("mlflow", "triton")
"""DeepSpeed's tuner and torch's counter of operations import them to see whether they are there."""
USUAL = (
    "anygauge.planning.run",
    "peft",
    "torch.distributed.tensor",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""What every rehearsal imports."""


def leave_out(names: Iterable[str] = ()) -> None:
    """Let packages not be there for this process, and nothing be compiled in it.

    Call it before torch is imported.

    Args:
        names: of packages, besides those that no rehearsal uses.
    """
    # Imports make many objects that stay: to look again and again for what could go takes a tenth
    # of the time of all. `import_usual` has Python look again.
    gc.disable()
    for name in (*NOT_HERE, *names):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    sys.modules[COMPILER] = compiler = _Compiler(COMPILER)
    sys.modules[f"{COMPILER}.source"] = compiler.source
    import torch

    torch._dynamo = compiler
    torch.compile = _as_it_is  # type: ignore[assignment]
    torch.Tensor.__hash__ = _in_order  # type: ignore[method-assign]
    with _quick_structure():
        import transformers  # noqa: F401


def import_usual() -> None:
    """Import what every rehearsal needs, before there is one."""
    for name in USUAL:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


_hashed = itertools.count(2**40, -1)


def _in_order(tensor: Any) -> int:
    """A number that falls from tensor to tensor, in place of its address.

    DeepSpeed waits for the parameters of a set in the set's order, and what is held meanwhile
    depends on it: with addresses two rehearsals of the same run would find different peaks. That
    the last comes first holds more than the other way round.
    """
    # Attributes may be copied to another tensor, or shared with it.
    kept, name = tensor.__dict__, f"_hashed_{id(tensor)}"
    number: int | None = kept.get(name)
    if number is None:
        number = kept[name] = next(_hashed)
    return number


@contextlib.contextmanager
def _quick_structure() -> Iterator[None]:
    """Let transformers find out faster what its models' files have.

    It looks for the last ``__all__`` of a file line by line, keeps what it found for 128 folders,
    and looks again. What both are done by is defined in one file, before it is used in another.
    """
    kept = functools.lru_cache

    def unbounded(maxsize: Any = None, typed: bool = False) -> Any:
        if not callable(maxsize):
            return kept(maxsize, typed)
        known = getattr(maxsize, "__globals__", {})
        if _ALL in known and not hasattr(known[_ALL], _WHOLE):
            known[_ALL] = _of_last_lines(known[_ALL])
        return kept(None)(maxsize)

    functools.lru_cache = unbounded
    try:
        yield
    finally:
        functools.lru_cache = kept


_ALL, _WHOLE = "fetch__all__", "_whole"


def _of_last_lines(function: Any) -> Any:
    """transformers' function for a file's text, given only what it looks at of it."""

    def found(text: str) -> Any:
        return function(text[text.rfind("\n__all__") + 1 :])

    setattr(found, _WHOLE, function)
    return found


def _as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What a compiler's decorators give back, with arguments or without."""
    return (lambda later: later) if function is None else function


class _Compiler(ModuleType):
    """torch's compiler as it is for code that is never compiled; its parts are found as usual."""

    disable = assume_constant_result = allow_in_graph = staticmethod(_as_it_is)
    disallow_in_graph = mark_static_address = run = staticmethod(_as_it_is)
    is_compiling = staticmethod(lambda: False)
    graph_break = reset = staticmethod(lambda *args, **kwargs: None)
    # A new process group has them forget what it was.
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    OptimizedModule = type("OptimizedModule", (), {})  # what no module is
    eval_frame = SimpleNamespace(OptimizedModule=OptimizedModule)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        found = importlib.util.find_spec("torch")
        assert found is not None
        assert found.origin is not None
        self.source = _Sources(f"{name}.source")
        self.__path__ = [str(Path(found.origin).with_name("_dynamo"))]

    def __getattr__(self, name: str) -> Any:
        """A part that nobody has imported yet."""
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{COMPILER}.{name}")
        except ImportError as error:
            raise AttributeError(f"{COMPILER}.{name}") from error


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
