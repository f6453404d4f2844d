"""Reads a run file: YAML, what it extends, and the command line, into one checked RunFile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anygauge.config.describe import kind_of_run
from anygauge.config.document import NotYaml, read_document, read_yaml
from anygauge.config.layers import read_command_line, read_files
from anygauge.config.paths import (
    CACHE,
    OUTPUT,
    Place,
    complaint_about,
    locate,
    paths_in,
    resolve_paths,
)
from anygauge.config.problems import empty_sections, explain_errors
from anygauge.config.resolved import absolute_paths
from anygauge.config.schema import RunFile
from anygauge.config.strategies import spell_out
from anygauge.config.tree import Origin, Problem, YamlNode, dotted_path, merge, run_file_error
from anygauge.config.yaml_text import write_yaml
from anygauge.interface import RunFileError

RunSource = str | os.PathLike[str] | Mapping[str, Any] | RunFile


def load_run_file(
    source: RunSource,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: str | None = None,
) -> RunFile:
    """Reads and checks a run file; whether data and models exist is left to `check_paths`.

    What wins over what: `flags` and `overrides`, the file, what it extends, the schema's default.
    Mappings are merged, lists are replaced, null stands for the default.

    Args:
        source: the run file; or what a Python program has in its place.
        overrides: values of --set, "dotted.path=YAML".
        flags: values of options of their own by dotted path; None where an option is not given.
        environ: variables for paths; left out: those of the process.
        cwd: what `output` and paths of the command line are relative to; left out: the process's.
        text: what will stand in the run file; None: it is read.

    Raises:
        RunFileError: naming every problem that was found, with file and line.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    problems: list[Problem] = []
    if isinstance(source, str | os.PathLike):
        name, root = os.fspath(source), None
        if text is not None:
            root = read_document(cwd / source, name, problems, text)
        root = read_files(cwd / source, name, environ, problems, root=root)
    else:
        name = source.origin("").label if isinstance(source, RunFile) else "run"
        root = read_values(source, Origin(name, None, cwd), problems)
        root = read_files(cwd / name, name, environ, problems, root=root)
    root = merge(root, read_command_line(overrides, flags or {}, cwd, problems))
    spell_out(root)
    resolve_paths(root, environ, cwd, problems)
    kind = kind_of_run(root)
    problems += empty_sections(root, kind)
    # Whatever could not be read was complained about already, and stands as null in the tree.
    read = {problem.path for problem in problems}
    try:
        found = RunFile.model_validate(kind.values(root), strict=True)
    except ValidationError as error:
        problems += [each for each in explain_errors(error, root, kind) if each.path not in read]
    if problems:
        raise run_file_error(name, problems)
    fields = {**dict(found), "output": locate(OUTPUT, found.output, cwd)}
    run = RunFile.model_construct(found.model_fields_set, **fields)
    return run.written_at({dotted_path(place): node.origin for place, node in root.nodes()})


def read_values(
    source: Mapping[str, Any] | RunFile, start: Origin, problems: list[Problem]
) -> YamlNode:
    """A dict, or what an object sets, as the tree that its file would be.

    Args:
        start: where values of a dict are written; those of an object keep their places.

    Raises:
        RunFileError: it is neither, or holds what no file can.
    """
    if not isinstance(source, Mapping | RunFile):
        what = "the path of a run file, a dict with what a run file has, or an anygauge.RunFile"
        raise RunFileError(f"run: got a value of type {type(source).__name__}, expected {what}")
    values: Any = source
    if isinstance(source, RunFile):
        values = absolute_paths(source.model_dump(exclude_unset=True))
    try:
        root = read_yaml(write_yaml(values), start, problems)
    except (ValueError, NotYaml) as error:
        raise RunFileError(f"{start}: {error}") from None
    assert root is not None
    if isinstance(source, RunFile):
        for place, node in root.nodes():
            node.origin = source.origin(dotted_path(place))
    return root


def check_paths(run: RunFile, complaint: Callable[[Place, str], str] = complaint_about) -> None:
    """Looks for the data files, and for the model and tokenizer where they are local.

    Args:
        complaint: what is wrong with a path at a place; "" for nothing.

    Raises:
        RunFileError: "FILE:LINE: data.train.path: no such file: /abs/path", a line for each.
    """
    said = [
        (dotted_path(place), complaint(place, text)) for place, text in paths_in(run.model_dump())
    ]
    if wrong := [each for each in said if each[1]]:
        raise run.errors(wrong)


def check_folders(run: RunFile, folders: Sequence[str], advice: str) -> None:
    """Refuses local paths that are in none of the folders that another machine has.

    Args:
        advice: what to do about one.

    Raises:
        RunFileError: as of `check_paths`.
    """

    def complaint(place: Place, text: str) -> str:
        target = Path(text)
        if place in (OUTPUT, CACHE) or not target.is_absolute():
            return ""
        if any(target.is_relative_to(folder) for folder in folders):
            return ""
        have = ", ".join(folders)
        return f"{text} is not on the job's machines, which have only {have}{advice}"

    check_paths(run, complaint)
