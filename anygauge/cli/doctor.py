"""``anygauge doctor``: is this machine ready, and what to do where it is not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from anygauge.cli.console import Console
from anygauge.cli.options import BackendOption, JsonOption, choose_backend
from anygauge.interface import AnygaugeError, Backend, Check, Outcome

_STYLES = {
    Outcome.PASS: "",
    Outcome.SKIP: "cyan",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
}
_COUNTED = {
    Outcome.PASS: "passed",
    Outcome.WARN: "with a warning",
    Outcome.FAIL: "failed",
    Outcome.SKIP: "skipped",
}


def doctor(
    backend: BackendOption = None,
    collectives: Annotated[
        int | None,
        typer.Option(
            "--collectives",
            min=2,
            help="Start this many ranks here and all-reduce tensors; shows size and bandwidth.",
            metavar="RANKS",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Folder whose write speed is measured.")
    ] = Path(),
    hub: Annotated[
        bool, typer.Option("--hub", help="Also check the connection to the model hub.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check whether this machine is ready for a backend. Exit status 1 if a check failed."""
    from anygauge.agent.doctor import worst

    _, selection, chosen = choose_backend(backend, need_device=False)
    found = _host(chosen, output, hub)
    own = _own(chosen)
    trip = []
    if collectives is not None:
        from anygauge.agent.doctor import round_trip

        trip.append(round_trip(chosen.name, {}, collectives))
    everything = [*own, *found, *trip]
    result = worst(everything)
    counts = {o: sum(check.outcome == o for check in everything) for o in _COUNTED}
    if json_:
        record = {
            "backend": chosen.name,
            "outcome": result,
            "counts": counts,
            "checks": [asdict(check) for check in everything],
        }
        typer.echo(json.dumps(record, indent=2))
    else:
        console = Console()
        console.print(Text(f"Backend {chosen.name}: {selection.reason}", style="bold"))
        for check in everything:
            line = f"{check.outcome:<6}{check.name}: {check.seen}"
            console.print(Text(line, style=_STYLES[check.outcome]))
            if check.remedy:
                console.print(Text(f"      {check.remedy}"))
        words = ", ".join(f"{count} {_COUNTED[outcome]}" for outcome, count in counts.items())
        console.print(Text(words, style=_STYLES[result] or "green"))
    if result == Outcome.FAIL:
        raise typer.Exit(1)


def _host(backend: Backend, output: Path, hub: bool) -> list[Check]:
    from anygauge.agent.doctor import host_checks, hub_access, write_speed
    from anygauge.agent.environment import inspect_node
    from anygauge.agent.foreign import scrub

    environ = scrub(os.environ)
    node = inspect_node(backend=backend, environ=environ)
    found = host_checks(node, backend.launch, environ, backend=backend.name)
    found.append(write_speed(output.absolute()))
    return [*found, hub_access()] if hub else found


def _own(backend: Backend) -> list[Check]:
    """The backend's checks; one that raises is a failed line, not the end of the others."""
    try:
        return list(backend.diagnostics())
    except AnygaugeError as error:
        seen = str(error)
    except Exception as error:
        seen = f"diagnostics() raised {type(error).__name__}: {error}"
    return [
        Check(
            name=f"checks of {backend.name}",
            outcome=Outcome.FAIL,
            seen=seen,
            remedy=(
                "report it to the authors of this backend (`anygauge backends` names the package)"
            ),
        )
    ]
