"""``anygauge train RUN.yaml``: start a run and follow it to its end."""

from __future__ import annotations

from typing import Annotated

import typer

from anygauge.cli.plan import (
    BackendOption,
    DevicesOption,
    Intent,
    LauncherOption,
    NodesOption,
    OutputOption,
    ResumeOption,
    RunFileArgument,
    SetOption,
    read_intent,
    rendered,
)


def train(
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
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print warnings and failures only.")
    ] = False,
) -> None:
    """Fine-tune a model as a run file says."""
    flags = {
        "backend": backend,
        "launch.devices": devices,
        "launch.nodes": nodes,
        "launch.launcher": launcher,
        "output": output,
        "checkpoint.resume": resume,
    }
    intent = read_intent(run_file, set_, flags, need_device=not dry_run)
    if dry_run:
        from anygauge.cli.dry_run import show

        show(intent)
        return
    raise typer.Exit(start(intent, quiet=quiet))


def start(intent: Intent, *, quiet: bool, detach: bool = False) -> int:
    """Write the resolved run file, submit the job and follow it; returns the exit status.

    Args:
        detach: leave once it is submitted.
    """
    import json
    import shlex
    from pathlib import Path

    from anygauge.cli.run_folder import LAUNCHED, claimed
    from anygauge.cli.terminal import follow
    from anygauge.config import dump_run
    from anygauge.interface import UnsupportedError
    from anygauge.interface.files import write_text
    from anygauge.registry import is_secret

    job, run = intent.job, intent.run
    name = run.launch.launcher
    spec = intent.registry.find_launcher(name).spec
    if detach and "detach" not in spec.can:
        raise UnsupportedError(
            f"--detach: a job of the {name} launcher ends with the command that started it"
        )
    launcher = intent.registry.launcher(name)()
    plan = rendered(intent)
    chosen = run.model_copy(update={"backend": job.backend})
    secret = any(is_secret(name) for name in run.environment)
    folder = Path(job.run_directory)
    with claimed(folder):
        write_text(Path(job.run_file), dump_run(chosen), mode=0o600 if secret else 0o644)
        running = launcher.submit(plan)
        if running.record is not None:
            record = {"launcher": name, "record": dict(running.record)}
            if spec.apart:
                record["logs"] = shlex.join(plan.operations["logs"])
            write_text(folder / LAUNCHED, json.dumps(record, indent=2) + "\n")
        if detach:
            typer.echo(
                f"submitted: {dict(running.record or {})}; to see it: anygauge job follow {folder}"
            )
            return 0
        return follow(running, run_directory=folder, quiet=quiet)
