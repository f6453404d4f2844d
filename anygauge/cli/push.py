"""``anygauge push RUN NAME``: the result of a run, on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from anygauge.interface import UsageError
from anygauge.util.console import Console
from anygauge.util.text import format_bytes

BASE = "The base's name on the hub, for an adapter whose base is a folder."


def push(
    run: Annotated[Path, typer.Argument(help="A run directory, or a result.", metavar="RUN")],
    name: Annotated[str, typer.Argument(help="On the hub, as OWNER/NAME.", metavar="NAME")],
    base: Annotated[str | None, typer.Option(help=BASE, metavar="HUB/NAME")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make it a private one.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload a result of anygauge",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go out; uses no network.")
    ] = False,
) -> None:
    """Upload the result of a run, its adapter/ or model/ alone, to the hub."""
    from anygauge.models.publish import published_copy, result_folder, upload

    for option, value in (("NAME", name), ("--base", base or name)):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
            raise UsageError(f"{option} {value}: a name of the hub is expected, as owner/name")
    result = result_folder(run)
    console = Console()
    with published_copy(result, name, base) as copy:
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        for path, size in zip(files, sizes, strict=True):
            console.print(f"{format_bytes(size):>11}  {path.relative_to(copy)}", soft_wrap=True)
        where = f"would go to {name}"
        if not dry_run:
            where = upload(copy, name, private=private, message=message)
        console.print(f"{len(files)} files, {format_bytes(sum(sizes))}, from {result}: {where}")
