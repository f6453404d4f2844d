"""Phrases that the registry's messages share."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.7) -> str:
    """``"; did you mean 'x'?"`` for the nearest valid name, or nothing where none is near.

    Another letter in a name of three makes another name, not a misspelt one.
    """
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Iterable[str]) -> str:
    """Names in order, or ``none``."""
    return ", ".join(sorted(names)) or "none"


def plugin_words(distribution: str, version: str) -> str:
    """A distribution and its version."""
    return f"{distribution} {version}"


def describe(error: BaseException) -> str:
    """An exception from foreign code in one line: its type, its text and where it was raised."""
    text = " ".join(str(error).split())
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its own text says where
        return words
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if not frames:
        return words
    return f"{words} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
