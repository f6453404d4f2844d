"""A run that a Python program has, as the tree that its file would be: a dict, or a `RunFile`."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

from anygauge.config.document import HALF_CHARACTER
from anygauge.config.resolved import absolute_paths
from anygauge.config.schema import RunFile
from anygauge.config.tree import Origin, Problem, YamlNode, dotted_path


def tree_of_run(run: RunFile) -> YamlNode:
    """What a run sets; its values keep the file and line that they come from."""
    values = absolute_paths(run.model_dump(exclude_unset=True))
    return tree_of(values, lambda path: run.origin(dotted_path(path)), [])


def tree_of(
    value: Any,
    origin: Origin | Callable[[tuple[object, ...]], Origin],
    problems: list[Problem],
    path: tuple[object, ...] = (),
) -> YamlNode:
    """A value of dicts, lists, texts, paths and numbers (NumPy's too) as YAML's reader gives it.

    Args:
        origin: where it was written; or a function that says it of each path.
        problems: complaints are added here; what is wrong stands as null in the tree.
        path: where the value stands in the run.
    """
    at = origin if isinstance(origin, Origin) else origin(path)
    if isinstance(value, Mapping):
        below = {}
        for key, each in value.items():
            if not isinstance(key, str):
                text = f"the key {key!r} ({type(key).__name__}) is not text"
                problems.append(Problem(at, dotted_path(path), text))
                continue
            below[key] = tree_of(each, origin, problems, (*path, key))
        return YamlNode(below, at)
    if isinstance(value, list | tuple):
        items = (tree_of(each, origin, problems, (*path, i)) for i, each in enumerate(value))
        return YamlNode(tuple(items), at)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and not HALF_CHARACTER.search(value):
        return YamlNode(str(value), at, value)
    if value is None or isinstance(value, bool):
        return YamlNode(value, at, {None: "null", True: "true", False: "false"}[value])
    if isinstance(value, numbers.Integral | numbers.Real):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return YamlNode(number, at, str(number))
    what = f"got a value of type {type(value).__name__}, expected what YAML has: a text, a number"
    text = f"{what}, true or false, None, a list or a dict"
    problems.append(Problem(at, dotted_path(path), text))
    return YamlNode(None, at, "null")
