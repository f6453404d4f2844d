"""YAML as a tree of values that know the line they were written on.

PyYAML's safe types, with four differences that all prevent a wrong number or text: `2e-4` and `1e5`
are numbers; `12:30:00` is text and not a count of seconds; `010` is text and not 8; a date is text.
A key that is not text, or is written twice in one mapping, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from anygauge.config.tree import Origin, Problem, YamlNode, describe_value, dotted_path
from anygauge.config.yaml_text import TAG, add_numbers
from anygauge.interface import RunFileError
from anygauge.util.files import read_bounded
from anygauge.util.text import near_file

MOST_BYTES = 2**20
"""Of a run file. One with a chat template in it has some ten thousand."""

_SCALARS = {f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str")}
_MERGE = f"{TAG}merge"
_PLAIN_TAGS = {f"{TAG}null", f"{TAG}bool", _MERGE}
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our reading of numbers; used for its scalars and line marks."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


add_numbers(_Loader)


class NotYaml(Exception):
    """Text that cannot be read as one YAML document.

    Attributes:
        line: counted from 1, or None where the reader does not say.
    """

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line


def read_document(
    path: Path, shown: str, problems: list[Problem], text: str | None = None
) -> YamlNode:
    """One file as a tree; its root is known by the file, without a line.

    Args:
        shown: the file as complaints name it.
        problems: as of `read_yaml`.
        text: what stands in the file; None: it is read.

    Raises:
        RunFileError: there is no such file, or it is not a mapping in YAML.
    """
    try:
        if text is None:
            text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
        root = read_yaml(text, Origin(shown, 1, path.parent), problems)
    except FileNotFoundError:
        raise RunFileError(f"{shown}: no such file{near_file(path)}") from None
    except IsADirectoryError:
        found = sorted(each.name for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
        hint = f"; it holds {', '.join(found)}" if found else ""
        raise RunFileError(f"{shown}: is a folder, expected a run file{hint}") from None
    except UnicodeDecodeError as error:
        what = f"is not text in UTF-8 (byte {error.start}); expected a run file in YAML"
        raise RunFileError(f"{shown}: {what}") from None
    except NotYaml as error:
        place = Origin(shown, error.line, path.parent)
        raise RunFileError(f"{place}: not valid YAML: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFileError(f"{shown}: cannot be read: {reason}") from None
    if root is None:
        raise RunFileError(f"{shown}: is empty; a run file needs at least 'model' and 'data'")
    if not root.is_mapping:
        what = f"got {describe_value(root)}, expected a mapping such as 'model: {{...}}' at the top"
        raise RunFileError(f"{root.origin}: {what}")
    root.origin = Origin(shown, None, path.parent)
    return root


def read_yaml(
    text: str, start: Origin, problems: list[Problem], path: tuple[str, ...] = ()
) -> YamlNode | None:
    """The one document in `text`, or None where there is nothing but blanks and comments.

    Args:
        text: YAML.
        start: where it begins; without a line, so are its values.
        problems: complaints that leave the rest readable (a key written twice, an odd tag) are
            added here.
        path: where the document will stand in the run file; for complaints.

    Raises:
        NotYaml: the text cannot be read at all.
    """
    try:
        loader = _Loader(text)
        try:
            top = loader.get_single_node()
        except (OverflowError, ValueError):  # of PyYAML's chr() and int()
            large = "a number is too large (an escape \\U has at most 0010FFFF)"
            raise NotYaml(large, loader.line + 1) from None
        builder = _Builder(loader, start, problems)
        return None if top is None else builder.node(top, builder.origin(top), path)
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
        raise NotYaml("nested too deeply, or an alias stands in its own value", None) from None


@dataclass
class _Builder:
    """Turns PyYAML's nodes into ours."""

    loader: _Loader
    start: Origin
    problems: list[Problem]

    def origin(self, raw: yaml.Node) -> Origin:
        line = None if self.start.line is None else raw.start_mark.line + 1
        return replace(self.start, line=line)

    def node(self, raw: yaml.Node, origin: Origin, path: tuple[object, ...]) -> YamlNode:
        if isinstance(raw, yaml.MappingNode) and raw.tag == f"{TAG}map":
            return YamlNode(self._mapping(raw, path), origin)
        if isinstance(raw, yaml.SequenceNode) and raw.tag == f"{TAG}seq":
            items = enumerate(raw.value)
            nodes = (self.node(item, self.origin(item), (*path, index)) for index, item in items)
            return YamlNode(tuple(nodes), origin)
        if isinstance(raw, yaml.ScalarNode) and raw.tag in _SCALARS:
            return self._scalar(raw, origin, path)
        tag = raw.tag.replace(TAG, "!!")
        return self._refuse(origin, path, f"the tag {tag} means nothing here; write a plain value")

    def _scalar(self, raw: yaml.ScalarNode, origin: Origin, path: tuple[object, ...]) -> YamlNode:
        try:
            value = self.loader.construct_object(raw)
        except (ValueError, KeyError):
            kind = raw.tag.removeprefix(TAG)
            return self._refuse(origin, path, f"{raw.value[:60]!r} cannot be read as {kind}")
        if isinstance(value, str) and (odd := _SURROGATE.search(value)):
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
            known = len(self.problems)
            key = self.node(key_node, origin, path).value
            if len(self.problems) > known:
                continue
            if not isinstance(key, str):
                shown = str(key).lower() if isinstance(key, bool) else str(key)
                text = f"the key {shown} ({type(key).__name__}) is not text; put it in quotes"
                self._refuse(origin, path, text)
                continue
            if key in own:
                first = own[key].origin
                lines = f", on line {first.line} and on line {origin.line}; keep one of them"
                text = f"written twice{lines if origin.line else ''}"
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
        self.problems.append(Problem(origin, dotted_path(path), text))
        return YamlNode(None, origin, "null")
