"""Reads a run file: YAML, what it extends, and the command line, into one checked RunFile."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from anygauge.config.describe import Kind, field_kind, kind_of_run
from anygauge.config.document import NotYaml, read_yaml
from anygauge.config.paths import (
    CACHE,
    OUTPUT,
    Place,
    complaint_about,
    expand,
    holds_template,
    locate,
    places_of_paths,
    resolve_paths,
)
from anygauge.config.problems import explain, is_private, received, value_problems
from anygauge.config.schema import RunFile
from anygauge.config.strategies import STRICT, section_of, spelled_out
from anygauge.config.tree import Origin, Problem, YamlNode, dotted, merge, plain, run_file_error
from anygauge.interface import PluginError, RunFileError
from anygauge.util.files import read_bounded
from anygauge.util.hiding import HIDDEN
from anygauge.util.text import near_file

MOST_BYTES = 2**20
"""Of a run file. One with a chat template in it has some ten thousand."""

_FIELD = re.compile(r"(?P<path>[a-z_]+(\.[^\s:]+)?): (?P<text>.+)")


@dataclass(frozen=True)
class LoadedRun:
    """A run file that passed every check, and where its values come from.

    Attributes:
        run: the run, with absolute paths and all defaults filled in.
        sources: dotted path -> where it was written; a value left at its default has no entry.
        files: the files that were read, absolute: the run file first, then what it extends.
        file: the run file as the user named it.
    """

    run: RunFile
    sources: Mapping[str, Origin]
    files: tuple[Path, ...]
    file: str = field(default="run file", kw_only=True)

    def source(self, path: str) -> Origin:
        """Where `path` was written, or else the section that it belongs to, or the file."""
        while path and path not in self.sources:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.sources[path]

    def error(self, path: str, text: str) -> RunFileError:
        """An error to raise about one field: "FILE:LINE: path: text"."""
        return run_file_error(self.file, [Problem(self.source(path), path, text)])

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Add file and line to what a plugin says of its options: "path: text", a line each."""
        try:
            yield
        except RunFileError as error:
            said = [_FIELD.match(line) for line in str(error).splitlines()]
            problems = [
                Problem(self.source(each["path"]), each["path"], each["text"])
                for each in said
                if each is not None
            ]
            if len(problems) < len(said):
                raise
            raise run_file_error(self.file, problems) from None


def load_run_file(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> LoadedRun:
    """Reads and checks a run file; whether data and models exist is left to `check_paths`.

    What wins over what: `flags` and `overrides`, the file, what it extends, the schema's default.
    Mappings are merged, lists are replaced, null stands for the default.

    Args:
        path: the run file.
        overrides: values of --set, "dotted.path=YAML".
        flags: values of options of their own by dotted path; None where an option is not given.
        environ: variables for paths; left out: those of the process.
        cwd: what `output` and paths of the command line are relative to; left out: the process's.

    Raises:
        RunFileError: naming every problem that was found, with file and line.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    name = os.fspath(path)
    problems: list[Problem] = []
    files: list[Path] = []
    root = _read(cwd / path, name, (), environ, files, problems)
    root = spelled_out(root, words=False)
    root = spelled_out(merge(root, command_line(overrides, flags or {}, cwd, problems)))
    root = resolve_paths(root, environ, cwd, problems)
    known = _strategy_known(root, problems)
    values = _values(known, kind_of_run(known), (), problems)
    problems += value_problems(root)
    try:
        run = RunFile.model_validate(values, strict=True, context={STRICT: True})
    except ValidationError as error:
        # Whatever could not be read was complained about already, and stands as null in the tree.
        read = {problem.path for problem in problems}
        problems += [each for each in explain(error, known) if each.path not in read]
    if problems:
        raise run_file_error(name, problems)
    if root.get(*OUTPUT) is None:
        run = run.model_copy(update={"output": locate(OUTPUT, run.output, cwd)})
    return LoadedRun(run, dict(_sources(root)), tuple(dict.fromkeys(files)), file=name)


def check_paths(loaded: LoadedRun) -> None:
    """Looks for the data files, and for the model and tokenizer where they are local.

    Raises:
        RunFileError: "FILE:LINE: data.train.path: no such file: /abs/path", a line for each.
    """
    _check(loaded, complaint_about)


def check_folders(loaded: LoadedRun, folders: Sequence[str], advice: str) -> None:
    """Refuses local paths that are in none of the folders that another machine has.

    Args:
        advice: what to do about one.

    Raises:
        RunFileError: as of `check_paths`.
    """
    roots = [Path(folder) for folder in folders]

    def complaint(path: Place, text: str) -> str:
        target = Path(text)
        if path in (OUTPUT, CACHE) or holds_template(path, text) or not target.is_absolute():
            return ""
        if any(target == root or root in target.parents for root in roots):
            return ""
        have = ", ".join(folders)
        return f"{text} is not on the job's machines, which have only {have}{advice}"

    _check(loaded, complaint)


def _check(loaded: LoadedRun, complaint: Callable[[Place, str], str]) -> None:
    problems = []

    def at(path: Place) -> Any:
        value: Any = loaded.run
        for part in path:
            value = value[part] if isinstance(part, int) else getattr(value, part, None)
        return value

    for path in places_of_paths(at):
        value = at(path)
        text = complaint(path, value) if isinstance(value, str) else ""
        if text:
            problems.append(Problem(loaded.source(dotted(path)), dotted(path), text))
    if problems:
        raise run_file_error(loaded.file, problems)


def _read(
    path: Path,
    shown: str,
    chain: tuple[tuple[Path, str], ...],
    environ: Mapping[str, str],
    files: list[Path],
    problems: list[Problem],
) -> YamlNode:
    """One file with everything it extends merged beneath it.

    Args:
        path: the file, absolute.
        shown: the file as complaints name it.
        chain: the files that led here, each real path with its shown name.
    """
    files.append(path)
    root = _document(path, shown, problems)
    chain = (*chain, (path.resolve(), shown))
    extends = root.value.pop("extends", None)
    if extends is None or extends.value is None:
        return root
    items = extends.value if isinstance(extends.value, tuple) else (extends,)
    below: YamlNode | None = None
    for item in items:
        if not isinstance(item.value, str):
            text = f"got {received(item)}, expected a file or a list of files"
            raise run_file_error(chain[0][1], [Problem(item.origin, "extends", text)])
        text, complaint = expand(item.value, environ)
        base = path.parent / text
        if not complaint and not base.is_file():
            complaint = f"no such file: {base}{near_file(base)}"
        seen = [real for real, _ in chain]
        if not complaint and base.resolve() in seen:
            circle = [*(name for _, name in chain[seen.index(base.resolve()) :]), item.value]
            complaint = f"goes in a circle: {' extends '.join(circle)}"
        if complaint:
            raise run_file_error(chain[0][1], [Problem(item.origin, "extends", complaint)])
        name = os.path.normpath(Path(shown).parent / text)
        layer = _read(base, name, chain, environ, files, problems)
        below = layer if below is None else merge(below, layer)
    return root if below is None else merge(below, root)


def _document(path: Path, shown: str, problems: list[Problem]) -> YamlNode:
    """One file as a tree; its root is known by the file, without a line.

    Raises:
        RunFileError: there is no such file, or it is not a mapping in YAML.
    """
    whole = Origin(shown, None, path.parent)
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise RunFileError(f"{shown}: no such file{near_file(path)}") from None
    except IsADirectoryError:
        found = sorted(each.name for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
        hint = f"; it holds {', '.join(found)}" if found else ""
        raise RunFileError(f"{shown}: is a folder, expected a run file{hint}") from None
    except UnicodeDecodeError as error:
        text = f"is not text in UTF-8 (byte {error.start}); expected a run file in YAML"
        raise RunFileError(f"{shown}: {text}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFileError(f"{shown}: cannot be read: {reason}") from None
    try:
        root = read_yaml(text, shown, path.parent, problems)
    except NotYaml as error:
        place = Origin(shown, error.line, path.parent)
        raise RunFileError(f"{place}: not valid YAML: {error}") from None
    if root is None:
        raise RunFileError(f"{shown}: is empty; a run file needs at least 'model' and 'data'")
    if not root.is_mapping:
        text = f"got {received(root)}, expected a mapping such as 'model: {{...}}' at the top"
        raise RunFileError(f"{root.origin}: {text}")
    return YamlNode(root.value, whole)


def _strategy_known(root: YamlNode, problems: list[Problem]) -> YamlNode:
    """The tree without its strategy if there is none of that name, which is a problem."""
    node = root.get("strategy", "name")
    if node is None or node.value is None:
        return root
    if not isinstance(node.value, str):
        text = f"got {received(node)}, expected the name of a strategy"
    else:
        try:
            section_of(node.value)
        except PluginError as error:
            text = "; ".join(str(error).splitlines())
        else:
            return root
    problems.append(Problem(node.origin, "strategy.name", text))
    return replace(root, value={k: below for k, below in root.value.items() if k != "strategy"})


def _values(
    node: YamlNode, kind: Kind | None, path: tuple[object, ...], problems: list[Problem]
) -> Any:
    """Plain values for pydantic, with null as "left out" wherever a default stands ready."""
    section = None if kind is None else kind.section
    if kind is not None and isinstance(node.value, tuple):
        item_kind = kind.below(0)
        if item_kind is not None and item_kind.section is not None:
            return [
                _values(item, item_kind, (*path, index), problems)
                for index, item in enumerate(node.value)
            ]
    if section is None or not node.is_mapping:
        value = plain(node)
        is_tuple = kind is not None and any(
            get_origin(member.annotation) is tuple for member in kind.members
        )
        return tuple(value) if is_tuple and isinstance(value, list) else value
    values = {}
    for name, below in node.value.items():
        field = section.model_fields.get(name)
        inner = None if field is None else field_kind(field)
        if field is not None and below.value is None:
            if not below.text and inner is not None and inner.nullable and inner.section:
                text = "is left empty; give its fields, '{}' for all defaults, or null for none"
                problems.append(Problem(below.origin, dotted((*path, name)), text))
            if not field.is_required():
                continue
        values[name] = _values(below, inner, (*path, name), problems)
    return values


def _sources(node: YamlNode, path: tuple[object, ...] = ()) -> list[tuple[str, Origin]]:
    found = [(dotted(path), node.origin)]
    if isinstance(node.value, dict):
        for name, below in node.value.items():
            found += _sources(below, (*path, name))
    elif isinstance(node.value, tuple):
        for index, item in enumerate(node.value):
            found += _sources(item, (*path, index))
    return found


_SHOWN = 300
_EXAMPLE = "such as --set train.steps=10"


def command_line(
    overrides: Sequence[str], flags: Mapping[str, Any], folder: Path, problems: list[Problem]
) -> YamlNode:
    """One tree of everything that the command line sets, to be merged over the run file.

    Args:
        overrides: "dotted.path=value", the value in YAML; of two for one path the last wins.
        flags: dotted path -> value of an option named after its last part. None: not given.
        folder: the current directory, to which relative paths in either are relative.
        problems: complaints are added here; whatever is wrong is left out of the result. An option
            and an override that contradict each other are a complaint.
    """
    tree = YamlNode({}, Origin("the command line", None, folder), implied=True)
    written: dict[str, YamlNode] = {}
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


def _parse(text: str, folder: Path, problems: list[Problem]) -> tuple[str, YamlNode] | None:
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


def _nest(path: str, value: YamlNode) -> YamlNode:
    """`value` under one implied mapping for each part of `path`."""
    for part in reversed(path.split(".")):
        value = YamlNode({part: value}, value.origin, implied=True)
    return value


def _node(value: Any, origin: Origin) -> YamlNode:
    """A Python value as a tree, all of one origin."""
    if isinstance(value, Mapping):
        return YamlNode({key: _node(below, origin) for key, below in value.items()}, origin)
    if isinstance(value, list | tuple):
        return YamlNode(tuple(_node(item, origin) for item in value), origin)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return YamlNode(value, origin, "null" if value is None else str(value))
