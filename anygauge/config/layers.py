"""What a run file is made of, merged into one tree: files, what they extend, the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from anygauge.config.document import NotYaml, read_document, read_yaml
from anygauge.config.paths import expand_path
from anygauge.config.strategies import word_as_section
from anygauge.config.tree import (
    Origin,
    Problem,
    YamlNode,
    describe_value,
    is_private,
    merge,
    plain_value,
    run_file_error,
)
from anygauge.util.hiding import HIDDEN
from anygauge.util.text import near_file

_MAX_SHOWN = 300
_EXAMPLE = "such as --set train.steps=10"


def read_files(
    path: Path,
    shown: str,
    environ: Mapping[str, str],
    problems: list[Problem],
    chain: tuple[tuple[Path, str], ...] = (),
    root: YamlNode | None = None,
) -> YamlNode:
    """One file with everything it extends merged beneath it.

    Args:
        path: the file, absolute.
        root: what was read in its place.
        shown: the file as complaints name it.
        environ: variables for the paths of `extends`.
        problems: complaints that leave the rest readable are added here.
        chain: the files that led here, each real path with its shown name.
        root: what stands in the file; None: it is read.

    Raises:
        RunFileError: a file is not there, is not YAML, or extends itself.
    """
    root = read_document(path, shown, problems) if root is None else root
    word_as_section(root)
    chain = (*chain, (path.resolve(), shown))
    extends = root.value.pop("extends", None)
    if extends is None or extends.value is None:
        return root
    layers = []
    for item in extends.value if isinstance(extends.value, tuple) else (extends,):
        text, complaint = "", f"got {describe_value(item)}, expected a file or a list of files"
        if isinstance(item.value, str):
            text, complaint = expand_path(item.value, environ)
        base = path.parent / text
        seen = [real for real, _ in chain]
        if not complaint and not base.is_file():
            complaint = f"no such file: {base}{near_file(base)}"
        elif not complaint and base.resolve() in seen:
            circle = [*(name for _, name in chain[seen.index(base.resolve()) :]), item.value]
            complaint = f"goes in a circle: {' extends '.join(circle)}"
        if complaint:
            raise run_file_error(chain[0][1], [Problem(item.origin, "extends", complaint)])
        name = os.path.normpath(Path(shown).parent / text)
        layers.append(read_files(base, name, environ, problems, chain))
    return reduce(merge, [*layers, root])


def read_command_line(
    overrides: Sequence[str], flags: Mapping[str, Any], folder: Path, problems: list[Problem]
) -> YamlNode:
    """One tree of everything that the command line sets, to be merged over the run file.

    Args:
        overrides: "dotted.path=value", the value in YAML; of two for one path the last wins.
        flags: dotted path -> number or text of an option named after its last part. None: not
            given.
        folder: the current directory, to which relative paths in either are relative.
        problems: complaints are added here; whatever is wrong is left out of the result. An option
            and an override that contradict each other are a complaint.
    """
    tree = YamlNode({}, Origin("the command line", None, folder), implied=True)
    written: dict[str, YamlNode] = {}
    for text in overrides:
        path, node = _read_override(text, folder, problems)
        if node is not None:
            written[path] = node
            tree = merge(tree, _nest_value(path, node))
    for path, value in flags.items():
        if value is None:
            continue
        flag = Origin("--" + path.rpartition(".")[2].replace("_", "-"), None, folder)
        if path in written and plain_value(written[path]) != value:
            text = f"contradicts {written[path].origin}; give one of them"
            problems.append(Problem(flag, path, text))
        tree = merge(tree, _nest_value(path, YamlNode(value, flag, str(value))))
    return tree


def _read_override(text: str, folder: Path, problems: list[Problem]) -> tuple[str, YamlNode | None]:
    """Path and value of a --set; no value where something is wrong with it."""
    path, equals, value = text.partition("=")
    path = path.strip()
    parts = tuple(path.split("."))
    shown = f"{path}={HIDDEN}" if equals and is_private(parts) else text
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    origin = Origin(f"--set {shown}", None, folder)
    node, where = None, ""
    if not equals:
        complaint = f"expected PATH=VALUE, {_EXAMPLE}"
    elif not all(part.strip() == part != "" for part in parts):
        complaint = f"{path!r} is not a path of names with dots between, {_EXAMPLE}"
    elif path == "extends":
        complaint = "'extends' works in a file alone"
    else:
        where = path
        try:
            node = read_yaml(value, origin, problems, parts)
            # A comment alone is not a value either.
            way_out = "quote a value that begins with '#'"
            if not value.strip():
                way_out = "write null for the default, or '\"\"' for empty text"
            complaint = f"no value; {way_out}" if node is None else ""
        except NotYaml as error:
            complaint = f"the value is not valid YAML: {error}"
    if complaint:
        problems.append(Problem(origin, where, complaint))
    return path, node


def _nest_value(path: str, value: YamlNode) -> YamlNode:
    """`value` under one implied mapping for each part of `path`."""
    for part in reversed(path.split(".")):
        value = YamlNode({part: value}, value.origin, implied=True)
    word_as_section(value)
    return value
