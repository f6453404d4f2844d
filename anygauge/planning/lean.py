"""Keeps out of the process of a rehearsal what takes long to import and is never used there.

Without it half of the time of a plan would be spent on imports: of a compiler, mostly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from anygauge.planning.stand_ins import COMPILER, LATER, Later, NoCompiler, Patterns, as_it_is

NOT_HERE = ("kernels", "mlflow", "triton")
"""transformers, DeepSpeed's tuner and torch's counter of operations see whether they are there."""
USUAL = (
    "anygauge.planning.run",
    "peft",
    "torch.distributed.tensor",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""What every rehearsal imports."""

PATTERNS = "transformers.core_model_loading"
"""It compiles a thousand patterns of parameters' names, of all architectures; a model has few."""


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
    sys.modules[COMPILER] = compiler = NoCompiler(COMPILER)
    sys.modules[f"{COMPILER}.source"] = compiler.source
    for later, known in LATER.items():
        sys.modules[later] = Later(later, known)
    with _frames_without_lines():
        import torch

    torch._dynamo = compiler
    torch.compile = as_it_is  # type: ignore[assignment]
    torch.Tensor.__hash__ = _in_order  # type: ignore[method-assign]
    with _quick_structure():
        import transformers  # noqa: F401


def import_usual() -> None:
    """Import what every rehearsal needs, before there is one."""
    for name in USUAL:
        importlib.import_module(name)
    if PATTERNS in sys.modules:  # since transformers 5
        sys.modules[PATTERNS].re = Patterns("re")  # type: ignore[attr-defined]
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _frames_without_lines() -> Iterator[None]:
    """Let torch note the file of each operation that it defines without reading it for the line."""
    usual = inspect.getframeinfo
    inspect.getframeinfo = functools.partial(usual, context=0)
    try:
        yield
    finally:
        inspect.getframeinfo = usual


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
