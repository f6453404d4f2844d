"""``anygauge train RUN.yaml`` and ``anygauge launch``: start a run and follow it to its end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.shared_options import (
    BackendOption,
    DevicesOption,
    ForceOption,
    LauncherOption,
    NodesOption,
    OutputOption,
    PlanOption,
    ProfileOption,
    QuietOption,
    ResumeOption,
    RunFileArgument,
    SetOption,
    read_steps,
)
from anygauge.interface import AnygaugeError, UsageError
from anygauge.launch.request import RunRequest, read_request


def train(
    context: typer.Context,
    run_file: RunFileArgument,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    nodes: NodesOption = None,
    launcher: LauncherOption = None,
    output: OutputOption = None,
    resume: ResumeOption = None,
    set_: SetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show settings, engine and processes; start nothing."),
    ] = False,
    no_model: Annotated[
        bool,
        typer.Option("--no-model", help="With --dry-run: look at no model and no rows."),
    ] = False,
    plan: PlanOption = None,
    profile: ProfileOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fine-tune a model as described in a run file."""
    flags = _flag_fields(backend, devices, nodes, launcher, output, resume)
    recorded = read_steps(profile)
    if no_model and (not dry_run or plan):
        raise UsageError(
            "--no-model: a run, and a plan, need the model; add --dry-run, and no --plan"
        )
    if not dry_run:
        from anygauge.launch.foreign import find_launch

        foreign = find_launch(os.environ)
        if foreign is not None:
            from anygauge.launch.join import join

            try:
                request = read_request(run_file, set_, flags, need_device=True, foreign=foreign)
                if not context.obj:
                    raise UsageError(
                        f"{foreign.launcher} has started this process as rank {foreign.rank} of "
                        f"{foreign.world_size}, and `anygauge train` would take its place: run it "
                        "in a process of its own (subprocess.run)"
                    )
                job = replace(request.job, plan=plan, force=force, profile_steps=recorded)
                join(replace(request, job=job), foreign, quiet=quiet)
            except AnygaugeError as error:
                foreign.report(str(error))
                raise
    request = read_request(
        run_file, set_, flags, need_device=not dry_run, look_at_files=not no_model
    )
    request = replace(request, job=replace(request.job, profile_steps=recorded))
    if dry_run:
        from anygauge.cli.dry_run import show_dry_run

        show_dry_run(request, plan=plan, force=force, model=not no_model)
        return
    raise typer.Exit(_start(request, quiet=quiet, plan_memory=plan, force=force))


def launch(
    run_file: RunFileArgument,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    nodes: NodesOption = None,
    launcher: LauncherOption = None,
    output: OutputOption = None,
    resume: ResumeOption = None,
    render: Annotated[
        Path | None,
        typer.Option("--render", help="Write the plan to this folder, and start nothing."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit the job and do not follow it.")
    ] = False,
    set_: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; start and write nothing.")
    ] = False,
    plan: PlanOption = None,
    profile: ProfileOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Start a run through its launcher and follow it, or write what the launcher would do."""
    flags = _flag_fields(backend, devices, nodes, launcher, output, resume)
    recorded = read_steps(profile)
    described = dry_run or render is not None
    if not described:
        _refuse_a_rank()
    request = read_request(run_file, set_, flags, need_device=not described)
    request = replace(request, job=replace(request.job, profile_steps=recorded))
    if render is not None:
        from anygauge.cli.render import write_plan
        from anygauge.launch.prepare import without_checks

        write_plan(without_checks(request), render)
    elif dry_run:
        from anygauge.cli.dry_run import show_dry_run

        show_dry_run(request, plan=plan, force=force)
    else:
        raise typer.Exit(_start(request, quiet=quiet, detach=detach, plan_memory=plan, force=force))


def _flag_fields(
    backend: str | None,
    devices: int | None,
    nodes: int | None,
    launcher: str | None,
    output: str | None,
    resume: str | None,
) -> dict[str, Any]:
    """The fields of a run file that have an option of their own."""
    return {
        "backend": backend,
        "launch.devices": devices,
        "launch.nodes": nodes,
        "launch.launcher": launcher,
        "output": output,
        "checkpoint.resume": resume,
    }


def _refuse_a_rank() -> None:
    """Ranks that were started must not start a job each.

    Raises:
        UsageError: this process is a rank of another launcher's.
    """
    from anygauge.launch.foreign import find_launch

    foreign = find_launch(os.environ)
    if foreign is not None:
        raise UsageError(
            f"{foreign.launcher} has started this process as rank {foreign.rank} of "
            f"{foreign.world_size}, so there is nothing left to launch. `anygauge train` joins as "
            "that rank"
        )


def _start(request: RunRequest, **options: Any) -> int:
    from anygauge.launch.start_run import start

    return start(request, **options).show(request.job.run_directory)
