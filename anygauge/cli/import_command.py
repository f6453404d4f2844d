"""``anygauge import FILE``: another tool's file as a run file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anygauge.cli.shared_options import SetOption
from anygauge.interface import RunFileError, UsageError
from anygauge.util.text import flatten_values, wrap_for_stream

if TYPE_CHECKING:
    from anygauge.cli.imports.draft import Draft

_NEEDED = {
    "model.name": "the file names no model",
    "data.train.path": "the file names no rows",
}
PATHS = (".path", "model.name", ".tokenizer", ".chat_template", ".start_from")
"""How fields of ours end that may name a file or folder."""


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
    from anygauge.cli.imports.detect import read_files
    from anygauge.cli.imports.run_text import run_text

    if output is not None and output.exists():
        raise UsageError(f"--output {output}: exists already; remove it, or name another file")
    home = Path.cwd() if output is None else output.absolute().parent
    draft = read_files(files[0], files[1:], home, devices, nodes)
    _set(draft, set_ or [])
    _refuse(draft, allow_dropped)
    text = run_text(draft)
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


def _set(draft: Draft, overrides: list[str]) -> None:
    """Fields that the command line sets win over those of the file."""
    from anygauge.config.layers import read_command_line
    from anygauge.config.tree import Problem, plain_value, run_file_error

    problems: list[Problem] = []
    tree = plain_value(read_command_line(overrides, {}, Path.cwd(), problems))
    if problems:
        raise run_file_error("--set", problems)
    for path, value in flatten_values(tree):
        is_path = path.endswith(
            (".path", "model.name", ".tokenizer", ".chat_template", ".start_from")
        )
        draft.put(path, draft.path(value) if is_path else value, "--set")


def _refuse(draft: Draft, allow_dropped: bool) -> None:
    """Refuse to leave out what changes the result, and to leave open what the run needs."""
    needed = {
        path: why for path, why in {**_NEEDED, **draft.needed}.items() if draft.at(path) is None
    }
    if draft.at("data.train") is not None and isinstance(draft.at("data.train"), list):
        needed.pop("data.train.path", None)
    if draft.blocked and not allow_dropped:
        lines = "\n".join(f"  {key}: instead: {near}" for key, near in draft.blocked.items())
        some = "a key changes" if len(draft.blocked) == 1 else f"{len(draft.blocked)} keys change"
        raise RunFileError(
            f"{draft.file}: {some} the result and cannot be imported:\n{lines}\n"
            "Change the file, or add --allow-dropped to leave them out; the run file then says so"
        )
    if needed:
        lines = "\n".join(f"  --set {path}=...: {why}" for path, why in needed.items())
        raise RunFileError(
            f"{draft.file}: these fields of the run file have no value; add\n{lines}"
        )


def _check(draft: Draft, text: str) -> None:
    """Have our own reader read the run file, and say of what it refuses which key it came from."""
    from anygauge.config.load import load_run_file

    lines = text.splitlines()
    try:
        load_run_file("run.yaml", cwd=draft.home, text=text)
    except RunFileError as error:

        def origin(match: re.Match[str]) -> str:
            return f"{draft.file} ({lines[int(match[1]) - 1].partition('  # ')[2]})"

        said = re.sub(r"run\.yaml:(\d+)", origin, str(error))
        said = said.replace("run.yaml", str(draft.file))
        raise RunFileError(f"no run file can say this:\n{said}") from None
