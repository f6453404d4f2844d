"""Models of the hub are fetched before anything else: one line on the terminal, and one message."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from anygauge.util.console import Console

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.models.hub import Wanted


def fetched(
    wanted: Sequence[Wanted], environ: Mapping[str, str] | None = None, *, quiet: bool = False
) -> int:
    """Have a process of its own fetch what is wanted; nothing is started where that is nothing.

    Args:
        environ: of the process; None: this one's.
        quiet: show failures alone.

    Returns:
        Bytes of weights whose index alone was wanted, and that are not here.

    Raises:
        HubUnreachableError: there is no telling.
        ModelError: what cannot be had, why, and what to do.
    """
    if not wanted:
        return 0
    from anygauge.models.fetching import fetching

    left = 0
    asked = json.dumps([asdict(want) for want in wanted])
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, expand=True)
    task = bar.add_task("", visible=False)
    with bar if console.draws and not quiet else nullcontext():
        for event in fetching(["--wanted", asked], os.environ if environ is None else environ):
            if event["event"] == "message" and not quiet:
                console.print(event["text"])
            elif event["event"] == "fetching":
                name, done, total = event["name"], event["done"], event["total"]
                bar.update(task, description=name, completed=done, total=total, visible=True)
            elif event["event"] == "fetched":
                left += event["left"]
    return left


def fetch_configuration(run: RunFile) -> None:
    """Have what a plan needs of the run's model; where no hub answers, a copy that is here will do.

    Raises:
        ModelError: what cannot be had, why, and what to do.
    """
    from anygauge.models.hub import CONFIG, copy_of, wanted_for_plan
    from anygauge.models.hub_errors import HubUnreachableError

    try:
        fetched(wanted_for_plan(run.model), {**run.environment, **os.environ}, quiet=True)
    except HubUnreachableError:
        copy = copy_of(run.model.name or "", run.model.revision)
        if copy is None or not (copy / CONFIG).is_file():
            raise
