"""YAML text as a tree of values that know the line they were written on.

PyYAML's safe types, with four differences that all prevent a wrong number or text: `2e-4` and `1e5`
are numbers; `12:30:00` is text and not a count of seconds; `010` is text and not 8; a date is text.
A key that is not text, or is written twice in one mapping, is an error. So is a whole number beyond
64 bits, and so are more values than any run has: an alias of an alias of an alias names a billion
of them in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from anygauge.config.origin import Origin, Problem, dotted
from anygauge.config.scalars import RESOLVERS, TAG

MOST_VALUES = 20_000
"""Values of one document, each as often as aliases repeat it. A run file has a few hundred."""

MOST_LEVELS = 100
"""Mappings and lists within each other."""

_INT_BITS = 63
_HALF = re.compile("[\ud800-\udfff]")
_SCALARS = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str")}
_MERGE = f"{TAG}merge"
_KEPT = {f"{TAG}null", f"{TAG}bool", _MERGE}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our reading of numbers; used for its scalars and line marks."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """PyYAML's, within bounds."""
        line = self.peek_event().start_mark.line + 1
        self._values += 1
        self._level += 1
        refuse_beyond(self._values, self._level, line)
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


for _tag, _pattern, _first in RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


class NotYaml(Exception):
    """Text that cannot be read as one YAML document.

    Attributes:
        line: counted from 1, or None where the reader does not say.
    """

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line


def refuse_beyond(values: int, level: int, line: int | None) -> None:
    """Refuse a document with more values or levels than there are to be.

    Raises:
        NotYaml: says which bound it is.
    """
    if level > MOST_LEVELS:
        raise NotYaml(f"mappings and lists are nested more than {MOST_LEVELS} deep", line)
    if values > MOST_VALUES:
        raise NotYaml(
            f"more than {MOST_VALUES:,} values, counting each again wherever an alias (*name) "
            "repeats it; a run needs a few hundred. Write fewer values, or use fewer aliases",
            line,
        )


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


def read_yaml(
    text: str,
    label: str,
    folder: Path,
    problems: list[Problem],
    *,
    lines: bool = True,
    path: tuple[str, ...] = (),
) -> YamlNode | None:
    """The one document in `text`, or None where there is nothing but blanks and comments.

    Args:
        text: YAML.
        label: what complaints name as the place.
        folder: what relative paths in `text` are relative to.
        problems: complaints that leave the rest readable (a key written twice, an odd tag) are
            added here.
        lines: False for text without lines of its own, such as the value of an option.
        path: where the document will stand in the run file; for complaints.

    Raises:
        NotYaml: the text cannot be read at all.
    """
    try:
        loader = _Loader(text)
        try:
            top = loader.get_single_node()
            if top is None:
                return None
            builder = _Builder(loader, label, folder, problems, lines)
            return builder.node(top, builder.origin(top), path)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        text = f"the character U+{error.character:04X} is not allowed in YAML"
        raise NotYaml(text, line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in said:
            said += "; indent with spaces"
        raise NotYaml(said, None if mark is None else mark.line + 1) from None
    except RecursionError:
        raise NotYaml("nested too deeply", None) from None


class _Builder:
    """Turns PyYAML's nodes into ours."""

    def __init__(
        self, loader: _Loader, label: str, folder: Path, problems: list[Problem], lines: bool
    ) -> None:
        self._loader = loader
        self._label = label
        self._folder = folder
        self._problems = problems
        self._lines = lines
        self._open: set[int] = set()
        self._values = 0

    def origin(self, raw: yaml.Node) -> Origin:
        line = raw.start_mark.line + 1 if self._lines else None
        return Origin(self._label, line, self._folder)

    def node(self, raw: yaml.Node, origin: Origin, path: tuple[object, ...]) -> YamlNode:
        self._values += 1
        refuse_beyond(self._values, len(self._open), origin.line)
        if id(raw) in self._open:
            text = f"the value that begins on line {origin.line} contains an alias of itself"
            return self._refuse(origin, path, text)
        self._open.add(id(raw))
        try:
            if isinstance(raw, yaml.MappingNode) and raw.tag == f"{TAG}map":
                return YamlNode(self._mapping(raw, path), origin)
            if isinstance(raw, yaml.SequenceNode) and raw.tag == f"{TAG}seq":
                items = (
                    self.node(item, self.origin(item), (*path, index))
                    for index, item in enumerate(raw.value)
                )
                return YamlNode(tuple(items), origin)
            if isinstance(raw, yaml.ScalarNode) and raw.tag in _SCALARS:
                return self._scalar(raw, origin, path)
        finally:
            self._open.discard(id(raw))
        tag = raw.tag.replace(TAG, "!!")
        return self._refuse(origin, path, f"the tag {tag} means nothing here; write a plain value")

    def _scalar(self, raw: yaml.ScalarNode, origin: Origin, path: tuple[object, ...]) -> YamlNode:
        try:
            value = self._loader.construct_object(raw)
        except (ValueError, KeyError):
            kind = raw.tag.removeprefix(TAG)
            return self._refuse(origin, path, f"{raw.value[:60]!r} cannot be read as {kind}")
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            text = f"{raw.value[:60]} is a whole number beyond 64 bits; the largest is 2^63 - 1"
            return self._refuse(origin, path, f"{text}, {2**_INT_BITS - 1}")
        if isinstance(value, str) and (odd := _HALF.search(value)):
            text = f"holds half of a surrogate pair (U+{ord(odd[0]):04X}), which is not a character"
            return self._refuse(origin, path, text)
        return YamlNode(value, origin, raw.value)

    def _mapping(self, raw: yaml.MappingNode, path: tuple[object, ...]) -> dict[Any, YamlNode]:
        own: dict[Any, YamlNode] = {}
        merged: dict[Any, YamlNode] = {}
        for key_node, value_node in raw.value:
            origin = self.origin(key_node)
            if key_node.tag == _MERGE:
                for key, node in self._merge(value_node, path).items():
                    merged.setdefault(key, node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(origin, path, "a list or mapping cannot be a key")
                continue
            known = len(self._problems)
            key = self.node(key_node, origin, path).value
            if len(self._problems) > known:
                continue
            if not isinstance(key, str):
                shown = str(key).lower() if isinstance(key, bool) else str(key)
                text = f"the key {shown} ({type(key).__name__}) is not text; put it in quotes"
                self._refuse(origin, path, text)
                continue
            if key in own:
                first = own[key].origin
                text = "written twice"
                if self._lines:
                    text += f", on line {first.line} and on line {origin.line}; keep one of them"
                self._refuse(origin, (*path, key), text)
            own[key] = self.node(value_node, origin, (*path, key))
        return merged | own

    def _merge(self, raw: yaml.Node, path: tuple[object, ...]) -> Mapping[Any, YamlNode]:
        """What `<<: *anchor` or `<<: [*one, *two]` brings in; the first to name a key wins."""
        parts = raw.value if isinstance(raw, yaml.SequenceNode) else [raw]
        found: dict[Any, YamlNode] = {}
        for part in parts:
            node = self.node(part, self.origin(part), path)
            if not node.is_mapping:
                self._refuse(self.origin(raw), path, "'<<' takes a mapping, or a list of mappings")
                break
            found = node.value | found
        return found

    def _refuse(self, origin: Origin, path: tuple[object, ...], text: str) -> YamlNode:
        self._problems.append(Problem(origin, dotted(path), text))
        return YamlNode(None, origin, "null")


WORDS = ("strategy",)
"""Sections for which a word may stand."""


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
