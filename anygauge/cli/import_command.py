"""``anygauge import FILE``: another tool's file as a run file."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.imports.detect import read_files
from anygauge.cli.imports.draft import BLANK, Draft, Leaf, given
from anygauge.cli.shared_options import SetOption
from anygauge.config.describe import Kind
from anygauge.config.layers import read_command_line
from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.config.tree import Problem, plain_value, run_file_error
from anygauge.config.yaml_text import write_flow
from anygauge.interface import RunFileError, UsageError
from anygauge.util.text import flatten_values, wrap_for_stream

_NEEDED = {
    "model.name": "the file names no model",
    "data.train.path": "the file names no rows",
}
REASONS = {
    "speed": "Speed and memory, which change no result",
    "logging": "Logging, and how often it evaluates and saves",
    "naming": "Names and folders",
    "upload": "Upload",
    "telemetry": "Telemetry",
}
ANYWAY = "Without effect there, or what anygauge does anyway"


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="The other tool's file, then those that belong to it (docs/import.md).",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the run file here; default: print it.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="Devices of a machine; decides the global batch."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    set_: SetOption = None,
    allow_dropped: Annotated[
        bool,
        typer.Option(
            "--allow-dropped", help="Leave out keys that change the result and are not offered."
        ),
    ] = False,
) -> None:
    """Turn an Axolotl, LLaMA-Factory, TRL or optimum-habana file into a run file."""
    if output is not None and output.exists():
        raise UsageError(f"--output {output}: exists already; remove it, or name another file")
    home = Path.cwd() if output is None else output.absolute().parent
    draft = read_files(files[0], files[1:], home, devices, nodes)
    _set(draft, set_ or [])
    _refuse(draft, allow_dropped)
    text = _run_text(draft)
    _check(draft, text)
    if output is None:
        sys.stdout.write(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    typer.echo(f"{output}: a run file from {files[0]} ({draft.tool})")
    for change in draft.changes:
        typer.echo(wrap_for_stream(f"  {change}", sys.stdout))
    typer.echo(f"next: anygauge train {output} --dry-run")


def _run_text(draft: Draft) -> str:
    """The run file as YAML: what changes a result first, and each value with its origin."""
    lines = [f"# From {draft.file.name} ({draft.tool}), by `anygauge import`."]
    if draft.blocked:
        lines += ["#", "# LEFT OUT, although they change the result (--allow-dropped):"]
        lines += _items(f"{key}: {nearest}" for key, nearest in draft.blocked.items())
    if draft.changes:
        lines += ["#", "# What may change a result:", *_items(draft.changes)]
    for why, keys in draft.meaningless.items():
        lines += ["#", *_items([f"{REASONS[why]}: {'; '.join(keys)}"], "# ")]
    fields = [*_lines(draft.tree, Kind(RunFile), top=True)]
    named = {*re.findall(r"\w+", " ".join([*lines, *fields]))}
    rest = [
        given(key, value)
        for key, value in draft.given.items()
        if value not in BLANK and key not in named
    ]
    if rest:
        lines += ["#", *_items([f"{ANYWAY}: {'; '.join(rest)}"], "# ")]
    return "\n".join([*lines, "", *fields, ""])


def _items(texts: Iterable[str], first: str = "# - ") -> Iterator[str]:
    """Each text as a comment, in lines of 100 characters."""
    wrap = textwrap.TextWrapper(100, initial_indent=first, subsequent_indent="#   ",
                                break_long_words=False, break_on_hyphens=False)  # fmt: skip
    for text in texts:
        yield from wrap.wrap(text)


def _lines(tree: Mapping[str, Any], kind: Kind | None, *, top: bool = False) -> Iterator[str]:
    """Fields in the order of their section."""
    section = None if kind is None else kind.section
    order = list(section.model_fields) if section is not None else []
    names = sorted(tree, key=lambda name: order.index(name) if name in order else len(order))
    for at, name in enumerate(names):
        value = tree[name]
        if top and at and not (isinstance(value, Leaf) and isinstance(tree[names[at - 1]], Leaf)):
            yield ""
        below = None if kind is None else kind.child(name)
        if isinstance(value, Leaf):
            comment = f"  # {value.origin}" if value.origin else ""
            yield f"{name}: {write_flow(value.value)}{comment}"
        elif isinstance(value, list):
            yield f"{name}:"
            for item in value:
                first, *rest = _lines(item, below.item if below else None)
                yield from (f"  - {first}", *(f"    {line}" for line in rest))
        else:
            yield f"{name}:"
            yield from (f"  {line}" if line else "" for line in _lines(value, below))


def _set(draft: Draft, overrides: list[str]) -> None:
    """Fields that the command line sets win over those of the file."""
    problems: list[Problem] = []
    tree = plain_value(read_command_line(overrides, {}, Path.cwd(), problems))
    if problems:
        raise run_file_error("--set", problems)
    for path, value in flatten_values(tree):
        draft.put(path, value, "--set")


def _refuse(draft: Draft, allow_dropped: bool) -> None:
    """Refuse to leave out what changes the result, and to leave open what the run needs."""
    needed = {**_NEEDED, **draft.needed}
    if isinstance(draft.at("data.train"), list):
        del needed["data.train.path"]
    if draft.blocked and not allow_dropped:
        lines = "\n".join(f"  {key}: instead: {near}" for key, near in draft.blocked.items())
        some = "a key changes" if len(draft.blocked) == 1 else f"{len(draft.blocked)} keys change"
        raise RunFileError(
            f"{draft.file}: {some} the result and cannot be imported:\n{lines}\n"
            "Change the file, or add --allow-dropped to leave them out; the run file then says so"
        )
    missing = [
        f"  --set {path}=...: {why}" for path, why in needed.items() if draft.at(path) is None
    ]
    if missing:
        lines = "\n".join(missing)
        raise RunFileError(
            f"{draft.file}: these fields of the run file have no value; add\n{lines}"
        )


def _check(draft: Draft, text: str) -> None:
    """Have our own reader read the run file, and say of what it refuses which key it came from."""
    lines = text.splitlines()
    try:
        load_run_file("run.yaml", cwd=draft.home, text=text)
    except RunFileError as error:

        def origin(match: re.Match[str]) -> str:
            return f"{draft.file} ({lines[int(match[1]) - 1].partition('  # ')[2]})"

        said = re.sub(r"run\.yaml:(\d+)", origin, str(error))
        said = said.replace("run.yaml", str(draft.file))
        raise RunFileError(f"no run file can say this:\n{said}") from None
