"""What the command line says about a run: `--set a.b=c` and options of their own (`--devices`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from anygauge.config.document import MOST_LEVELS, Node, NotYaml, merge, plain, read_yaml
from anygauge.config.messages import is_private
from anygauge.config.origin import Origin, Problem
from anygauge.util.hiding import HIDDEN

_SHOWN = 300
_EXAMPLE = "such as --set train.steps=10"


def command_line(
    overrides: Sequence[str], flags: Mapping[str, Any], folder: Path, problems: list[Problem]
) -> Node:
    """One tree of everything that the command line sets, to be merged over the run file.

    Args:
        overrides: "dotted.path=value", the value in YAML; of two for one path the last wins.
        flags: dotted path -> value of an option named after its last part. None: not given.
        folder: the current directory, to which relative paths in either are relative.
        problems: complaints are added here; whatever is wrong is left out of the result. An option
            and an override that contradict each other are a complaint.
    """
    tree = Node({}, Origin("the command line", None, folder), implied=True)
    written: dict[str, Node] = {}
    for text in overrides:
        parsed = _parse(text, folder, problems)
        if parsed is not None:
            path, value = parsed
            written[path] = value
            tree = merge(tree, _nest(path, value))
    for path, given in flags.items():
        if given is None:
            continue
        flag = Origin("--" + path.rpartition(".")[2].replace("_", "-"), None, folder)
        value = _node(given, flag)
        other = written.get(path)
        if other is not None and plain(other) != plain(value):
            text = f"contradicts {other.origin}; give one of them"
            problems.append(Problem(flag, path, text))
        tree = merge(tree, _nest(path, value))
    return tree


def _parse(text: str, folder: Path, problems: list[Problem]) -> tuple[str, Node] | None:
    path, equals, value = text.partition("=")
    path = path.strip()
    private = equals and is_private(tuple(path.split(".")))
    shown = f"{path}={HIDDEN}" if private else text
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    origin = Origin(f"--set {shown}", None, folder)
    if not equals:
        problems.append(Problem(origin, "", f"expected PATH=VALUE, {_EXAMPLE}"))
    elif not all(part.strip() == part != "" for part in path.split(".")):
        problems.append(
            Problem(origin, "", f"{path!r} is not a path of names with dots between, {_EXAMPLE}")
        )
    elif path.count(".") >= MOST_LEVELS:
        text = f"a path of {path.count('.') + 1} names; at most {MOST_LEVELS}, {_EXAMPLE}"
        problems.append(Problem(origin, "", text))
    elif path == "extends":
        problems.append(Problem(origin, "", "'extends' works in a file alone"))
    elif not value.strip():
        hint = "no value; write null for the default, or '\"\"' for empty text"
        problems.append(Problem(origin, path, hint))
    else:
        try:
            node = read_yaml(
                value, origin.label, folder, problems, lines=False, path=tuple(path.split("."))
            )
        except NotYaml as error:
            problems.append(Problem(origin, path, f"the value is not valid YAML: {error}"))
        else:
            # A comment alone is not a value either.
            if node is not None:
                return path, node
            problems.append(Problem(origin, path, "no value; quote a value that begins with '#'"))
    return None


def _nest(path: str, value: Node) -> Node:
    """`value` under one implied mapping for each part of `path`."""
    for part in reversed(path.split(".")):
        value = Node({part: value}, value.origin, implied=True)
    return value


def _node(value: Any, origin: Origin) -> Node:
    """A Python value as a tree, all of one origin."""
    if isinstance(value, Mapping):
        return Node({key: _node(below, origin) for key, below in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node(tuple(_node(item, origin) for item in value), origin)
    if isinstance(value, PathLike):
        value = fspath(value)
    return Node(value, origin, "null" if value is None else str(value))
