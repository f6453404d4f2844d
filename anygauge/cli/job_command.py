"""``anygauge job ACTION RUN_DIRECTORY``: a job that outlives the command that started it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from anygauge.interface import UsageError
from anygauge.launch.run_directory import (
    CANCELLED,
    LAUNCHED,
    find_job,
    logs_of,
    read_record,
)


class Action(enum.StrEnum):
    """What the command does with a job."""

    STATUS = "status"
    FOLLOW = "follow"
    LOGS = "logs"
    CANCEL = "cancel"


def job(
    action: Annotated[Action, typer.Argument(help="The action.", metavar="ACTION")],
    run_directory: Annotated[
        Path, typer.Argument(help="The run's folder.", metavar="RUN_DIRECTORY")
    ],
    lines: Annotated[
        int, typer.Option("--lines", min=1, help="For logs: how many lines of each.")
    ] = 20,
) -> None:
    """Follow, show or end a job that was started on other machines."""
    if action is Action.LOGS:
        show_logs(run_directory, lines)
        return
    running = find_job(run_directory)
    if action is Action.CANCEL:
        before = run_directory / CANCELLED
        again = before.exists()
        running.cancel()
        if again:
            running.cancel()
        before.touch()
        typer.echo(
            "requested: the job ends at once"
            if again
            else (
                "requested: the ranks write a checkpoint if they can, then the job ends (repeat "
                "the command to end it at once)"
            )
        )
    elif action is Action.STATUS:
        state = running.state()
        typer.echo(state.text)
        if state.phase == "gone":
            typer.echo(
                "no agent reported how the job ended; to see what it printed: anygauge job logs "
                f"{run_directory}",
                err=True,
            )
        if state.phase in ("gone", "silent"):
            raise typer.Exit(1)
    else:
        from anygauge.launch.follow import follow

        raise typer.Exit(follow(running, run_directory=run_directory).show(run_directory))


def show_logs(folder: Path, lines: int) -> None:
    """The end of every log; of a start that was refused, its own alone.

    Raises:
        UsageError: there is none.
    """
    logs = logs_of(folder)
    # Slurm's own log of a start is in place from the beginning.
    paths = {*logs.glob("*.log"), *(folder / "logs").glob("slurm.log")}
    found = sorted(path for path in paths if path.stat().st_size)
    remote_logs = read_record(folder).get("logs") if (folder / LAUNCHED).exists() else None
    if remote_logs:
        typer.echo(
            "the ranks' logs are on the job's storage, in the run directory (logs/rankN.log); to "
            f"see what the first machine printed: {remote_logs}"
        )
    elif not found:
        raise UsageError(f"{logs} has no logs: name the folder of a run that has started")
    for log in found:
        typer.echo(f"==> {log}")
        text = log.read_text(errors="replace").splitlines()
        for line in text[-lines:]:
            typer.echo(line)
