"""``anygauge launch RUN.yaml``: like ``train``, and able to write a launcher's plan instead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
        typer.Option("--render", help="Write the plan to this folder; start nothing."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, and do not follow.")] = False,
    set_: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; start and write nothing.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print warnings and failures only.")
    ] = False,
) -> None:
    """Start a run through its launcher and follow it, or write what the launcher would do."""
    flags = {
        "backend": backend,
        "launch.devices": devices,
        "launch.nodes": nodes,
        "launch.launcher": launcher,
        "output": output,
        "checkpoint.resume": resume,
    }
    described = dry_run or render is not None
    intent = read_intent(run_file, set_, flags, need_device=not described)
    if render is not None:
        write_plan(intent, render)
    elif dry_run:
        from anygauge.cli.dry_run import show

        show(intent)
    else:
        from anygauge.cli.train import start

        raise typer.Exit(start(intent, quiet=quiet, detach=detach))


def write_plan(intent: Intent, folder: Path) -> None:
    """Write the plan's files and a description of the rest, for reading or for Git.

    Secrets are left out: the token that agents know each other by is drawn at submission, and
    variables with secret names show their names alone.

    Raises:
        AnygaugeError: the folder is not empty.
    """
    import dataclasses
    import json

    from anygauge.config import dump_run
    from anygauge.interface import AnygaugeError
    from anygauge.interface.files import write_text
    from anygauge.registry import is_secret

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AnygaugeError(f"--render: {folder} is there already, and not an empty folder")
    run = intent.run
    shown = {n: HIDDEN if is_secret(n) else v for n, v in run.environment.items()}
    job = dataclasses.replace(intent.job, id="", token="", environment=shown)
    spec = intent.registry.find_launcher(run.launch.launcher).spec
    plan = rendered(dataclasses.replace(intent, job=job))
    home = Path(job.run_directory)

    def inside(path: str) -> str:
        return str(Path(path).relative_to(home)) if home in Path(path).parents else path

    def here(word: str) -> str:
        # Machines apart get the files from this folder, the others from the run directory.
        return word.replace(f"{home}/", "") if spec.apart else word

    described: dict[str, Any] = {
        "launcher": spec.name,
        "proven": spec.fidelity,
        "can": sorted(spec.can),
        "pass_environment": list(plan.pass_environment),
        "files": [
            {"path": f.path, "mode": f"{f.mode:o}", "text": inside(f.path)} for f in plan.files
        ],
        "processes": [dataclasses.asdict(process) for process in plan.processes],
        "notes": [
            *plan.notes,
            "at submission by anygauge launch, the token by which agents know each other is drawn, "
            "and the variables of pass_environment get their values",
        ],
        "operations": {n: [here(word) for word in argv] for n, argv in plan.operations.items()},
    }
    chosen = run.model_copy(update={"backend": job.backend, "environment": shown})
    folder.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        write_text(folder / inside(file.path), file.text, file.mode)
    write_text(folder / "run.yaml", dump_run(chosen))
    write_text(folder / "plan.json", json.dumps(described, indent=2) + "\n")
    typer.echo(f"written: {folder} ({', '.join(sorted(p.name for p in folder.iterdir()))})")


HIDDEN = "***"
