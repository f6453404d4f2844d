"""Imports of torch and of the libraries on it, without what a run does not use.

A rank spends most of its start on them. Nothing here changes what is imported, but for packages
that are named as hidden.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

FEW_BITS = "bitsandbytes"
"""PEFT imports it, and with it torch's compiler, wherever it is installed."""
TRACKER = "mlflow"
"""DeepSpeed's tuner does the same with it."""


def unused(*, few_bits: bool, trackers: Collection[str]) -> list[str]:
    """Packages that other libraries would import, but a run does not use.

    Args:
        few_bits: its weights or its optimizer's state are quantised.
        trackers: any of which may use it.
    """
    wanted = {FEW_BITS: few_bits, TRACKER: bool(trackers)}
    return [name for name, is_used in wanted.items() if not is_used]


@contextlib.contextmanager
def quick_imports(hidden: Sequence[str] = ()) -> Iterator[None]:
    """Within it, imports of torch and transformers take less time.

    Args:
        hidden: packages that others shall not find; afterwards they can be imported again.
    """
    for name in hidden:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        with _sources_by_name(), quick_structure():
            yield
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports make many objects that stay: to look again and again for what could go takes a tenth
    of the time of all, so that Python does not look within it, and not through these afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # what Python cannot take down, nanobind reports as leaked
        if enabled:
            gc.enable()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within it, functions that a library has torch compile where it defines them stay as they are:
    the compiler would be imported for them, called or not."""
    import torch

    usual = torch.compile

    def as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return (lambda later: later) if function is None else function

    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = usual


@contextlib.contextmanager
def _sources_by_name() -> Iterator[None]:
    """Let torch note where each operation is defined without reading files.

    It would read the file for the line, and look through the files of all modules for the module.
    """
    frame_info, module_of = inspect.getframeinfo, inspect.getmodule

    def module(of: Any, *args: Any) -> ModuleType | None:
        if isinstance(of, FrameType):
            return sys.modules.get(of.f_globals.get("__name__", ""))
        return module_of(of, *args)

    inspect.getmodule = module  # type: ignore[assignment]
    inspect.getframeinfo = functools.partial(frame_info, context=0)
    try:
        yield
    finally:
        inspect.getframeinfo, inspect.getmodule = frame_info, module_of


@contextlib.contextmanager
def quick_structure() -> Iterator[None]:
    """Let transformers find out faster what its models' files have.

    It looks for the last ``__all__`` of a file line by line, keeps what it found for 128 folders,
    and looks again. What both are done by is defined in one file, before it is used in another.
    """
    kept = functools.lru_cache

    def cached(maxsize: Any = 128, typed: bool = False) -> Any:
        known = getattr(maxsize, "__globals__", {})
        if _ALL not in known:
            return kept(maxsize, typed)
        if not hasattr(known[_ALL], _WHOLE):
            known[_ALL] = _of_last_lines(known[_ALL])
        return kept(None)(maxsize)

    functools.lru_cache = cached
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
