"""``anygauge doctor``: is this machine ready, and what to do where it is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anygauge.cli.shared_options import BackendOption, JsonOption, choose_backend
from anygauge.interface import Outcome
from anygauge.util.console import Console

_WORDS = {
    Outcome.PASS: ("passed", ""),
    Outcome.WARN: ("with a warning", "yellow"),
    Outcome.FAIL: ("failed", "bold red"),
    Outcome.SKIP: ("skipped", "cyan"),
}
"""Outcome -> how many are counted, and their style."""


def doctor(
    backend: BackendOption = None,
    collectives: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Start this many ranks here and all-reduce tensors; shows size and bandwidth.",
            metavar="RANKS",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder whose write speed is measured.")] = Path(),
    hub: Annotated[
        bool, typer.Option("--hub", help="Also check the connection to the model hub.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check whether this machine is ready for a backend. Exit status 1 if a check failed."""
    from anygauge.launch.machine_checks import run_checks, worst

    _, selection, chosen = choose_backend(backend, need_device=False)
    checks = run_checks(chosen, output.absolute(), hub=hub, ranks=collectives)
    result = worst(checks)
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in _WORDS}
    if json_:
        record = {"backend": chosen.name, "outcome": result, "counts": counts}
        typer.echo(json.dumps({**record, "checks": list(map(asdict, checks))}, indent=2))
    else:
        console = Console()
        console.print(f"Backend {chosen.name}: {selection.reason}", style="bold")
        for check in checks:
            style = _WORDS[check.outcome][1]
            console.print(f"{check.outcome:<6}{check.name}: {check.seen}", style=style)
            if check.remedy:
                console.print(f"      {check.remedy}")
        words = ", ".join(f"{count} {_WORDS[outcome][0]}" for outcome, count in counts.items())
        console.print(words, style=_WORDS[result][1] or "green")
    if result == Outcome.FAIL:
        raise typer.Exit(1)
