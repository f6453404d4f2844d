"""A run file as a tree of values that know where they were written, and complaints about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anygauge.interface import RunFileError

WORDS = ("strategy",)
"""Sections for which a word may stand."""

_SHOWN = 50
_WIDTH = 4000


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


@dataclass(frozen=True, slots=True)
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

    def get(self, *path: object) -> YamlNode | None:
        """The node at `path` below this one, or None."""
        node = self
        for part in path:
            value = node.value
            is_item = isinstance(value, tuple) and type(part) is int and part < len(value)
            if not is_item and not (isinstance(value, dict) and part in value):
                return None
            node = value[part]
        return node

    def replaced(self, path: tuple[str | int, ...], value: Any) -> YamlNode:
        """The same tree with another scalar at `path`, which must exist; origins are kept."""
        if not path:
            return YamlNode(value, self.origin, str(value))
        below = self.value[path[0]].replaced(path[1:], value)
        if isinstance(self.value, tuple):
            items = tuple(below if at == path[0] else item for at, item in enumerate(self.value))
            return replace(self, value=items)
        return replace(self, value=self.value | {path[0]: below})

    def nearest(self, *path: object) -> YamlNode:
        """The node at `path`, or else the deepest one that was written on the way to it."""
        for length in range(len(path), 0, -1):
            found = self.get(*path[:length])
            if found is not None:
                return found
        return self


def merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """`over` laid upon `base`: mappings are merged key by key, everything else is replaced.

    Fields that are set one by one join a section for which a word stands: it is their ``name``.
    """
    if not (base.is_mapping and over.is_mapping):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        below = merged.get(key)
        if below is not None and key in WORDS and node.is_mapping and node.implied:
            below = below if below.is_mapping else replace(below, value={"name": below})
        # A word takes the place of a section, also with fields that joined it.
        merged[key] = node if below is None or node.text else merge(below, node)
    origin = base.origin if over.implied else over.origin
    return YamlNode(merged, origin, base.text, implied=base.implied and over.implied)


def plain(node: YamlNode) -> Any:
    """The value alone: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(below) for key, below in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    return node.value


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
    lines = [f"  {_shortened(str(each))}" for each in unique[:_SHOWN]]
    if len(unique) > _SHOWN:
        count = f"more than {_SHOWN} problems, first"
    return RunFileError("\n".join([f"{name}: {count}", *lines]))


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}... ({len(line):,} characters)"


def dotted(path: Iterable[object]) -> str:
    """A path as a user writes it: ("adapter", "targets", 0) is adapter.targets[0]."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
