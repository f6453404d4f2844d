"""A run file as a tree of values that know where they were written, and complaints about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import RunFileError
from anygauge.util.hiding import is_secret
from anygauge.util.text import shorten

_MOST_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Origin:
    """A place that a user can go to and change.

    Attributes:
        label: a file as the user named it, or a command line option ("--set train.steps=10").
        line: line in that file, counted from 1; None for options and for a file as a whole.
        folder: what a relative path written there is relative to.
    """

    label: str
    line: int | None
    folder: Path

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


@dataclass(slots=True)
class YamlNode:
    """A value and where it was written.

    Attributes:
        value: a scalar, a tuple of nodes, or a dict of nodes by key.
        origin: for an entry of a mapping, the line of its key.
        text: a scalar as it was written, and a section for which a word was; "" for others, and
            for a value left empty.
        implied: a mapping that stands only on the way to a value: `train` in --set train.steps=1.
    """

    value: Any
    origin: Origin
    text: str = ""
    implied: bool = False

    @property
    def is_mapping(self) -> bool:
        """Whether `value` is a dict of nodes."""
        return isinstance(self.value, dict)

    @property
    def items(self) -> tuple[YamlNode, ...]:
        """The items of a list; none of anything else."""
        return self.value if isinstance(self.value, tuple) else ()

    def nodes(self, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], YamlNode]]:
        """This node and all below it, each with its path."""
        yield path, self
        for part, node in self.value.items() if self.is_mapping else enumerate(self.items):
            yield from node.nodes((*path, part))

    def get(self, *path: object) -> YamlNode | None:
        """The node at `path` below this one, or None."""
        node = self
        for part in path:
            parts = node.value if node.is_mapping else range(len(node.items))
            if part not in parts:
                return None
            node = node.value[part]
        return node

    def nearest(self, *path: object) -> YamlNode:
        """The node at `path`, or else the deepest one that was written on the way to it."""
        found = (self.get(*path[:length]) for length in range(len(path), 0, -1))
        return next((node for node in found if node is not None), self)


def merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """`over` laid upon `base`: mappings are merged key by key, everything else is replaced.

    A word takes the place of a whole section, also with fields that joined it.
    """
    if not (base.is_mapping and over.is_mapping) or over.text:
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    origin = base.origin if over.implied else over.origin
    return YamlNode(merged, origin, base.text, implied=base.implied and over.implied)


def plain_value(node: YamlNode) -> Any:
    """The value alone: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain_value(below) for key, below in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain_value(item) for item in node.value]
    return node.value


def describe_value(node: YamlNode, *, private: bool = False) -> str:
    """A value as it was written, with its type: 'fast' (str), 1e3 (float), null.

    Args:
        private: the type alone.
    """
    value = node.value
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    if private:
        return f"a value of type {type(value).__name__} (not shown)"
    shown = repr(value) if isinstance(value, str) else node.text
    return f"{shorten(shown)} ({type(value).__name__})"


def is_private(path: tuple[object, ...]) -> bool:
    """Whether the value at a path is not to be repeated in a message."""
    return path[:1] == ("environment",) or any(is_secret(str(part)) for part in path)


@dataclass(frozen=True, slots=True)
class Problem:
    """One complaint, shown as one line: "FILE:LINE: dotted.path: text"."""

    origin: Origin
    path: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.path, self.text) if part)


def run_file_error(name: str, problems: Iterable[Problem]) -> RunFileError:
    """All complaints in one error: a header, then a line each, in the order of the file.

    Args:
        name: the run file as the user named it; its complaints come first.
        problems: at least one; doubles are shown once, and of very many the first.
    """
    unique = list(dict.fromkeys(problems))
    labels = list(dict.fromkeys([name, *(problem.origin.label for problem in unique)]))
    unique.sort(key=lambda problem: (labels.index(problem.origin.label), problem.origin.line or 0))
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    if len(unique) > _MOST_SHOWN:
        count = f"more than {_MOST_SHOWN} problems, first"
    return RunFileError("\n  ".join([f"{name}: {count}", *map(str, unique[:_MOST_SHOWN])]))


def dotted_path(path: Iterable[object]) -> str:
    """A path as a user writes it: ("adapter", "targets", 0) is adapter.targets[0]."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
