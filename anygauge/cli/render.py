"""``anygauge launch --render``: a launcher's plan, written for reading, for Git, or to submit."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import typer

from anygauge.interface import PlannedFile, UsageError
from anygauge.launch.request import RunRequest, render_plan
from anygauge.launch.run_directory import RESOLVED, write_run
from anygauge.util.files import why_no_folder, write_text
from anygauge.util.hiding import holds_secret, is_secret


def write_plan(request: RunRequest, folder: Path) -> None:
    """Write the plan's files and a description of the rest, for reading, for Git, or to submit.

    Secrets are left out: variables with secret names, or with a secret in their value, become names
    whose values the submitting shell has. The token that agents know each other by is drawn at
    submission, and here where the plan has a batch file, which is all that submission needs.

    Raises:
        UsageError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--render: {folder} exists and is not an empty folder; name another")
    if why := why_no_folder(folder):
        raise UsageError(f"--render {folder}: {why}; name another")
    spec = request.launcher
    request, left_out = _without_secrets(_under_its_own_name(request) if spec.remote else request)
    job, run, home = request.job, request.run, Path(request.job.run_directory)
    plan = render_plan(request)
    batch = plan.batch
    if batch is None:
        job = dataclasses.replace(job, id="", token="")
        plan = render_plan(dataclasses.replace(request, job=job))

    def inside(path: str) -> str:
        return str(Path(path).relative_to(home)) if home in Path(path).parents else path

    def here(word: str) -> str:
        # Machines that share no files get them from this folder, the others from the run's.
        return word if spec.shared_filesystem else word.replace(f"{home}/", "")

    notes = [*plan.notes, *(_LEFT_OUT.format(name) for name in left_out)]
    processes = [dataclasses.asdict(process) for process in plan.processes]
    operations = {n: [here(word) for word in argv] for n, argv in plan.operations.items()}
    files = plan.files
    if batch is None:
        notes.append(_DRAWN_LATER)
        how = "to submit it: the same command without --render"
    else:
        notes.append(_DRAWN_NOW)
        path = folder.absolute() / batch.name
        submit = [*batch.command, str(path)]
        how = f"to submit it: {shlex.join(submit)}"
        files = (
            *batch.files,
            PlannedFile(path=batch.name, text=batch.text(folder.absolute())),
            PlannedFile(path=".gitignore", text="job.json\n"),
        )
        processes = [{"node_rank": 0, "host": None, "argv": submit}]
        operations["submit"] = submit
    described: dict[str, Any] = {
        "launcher": spec.name,
        "tested_on": spec.tested_on,
        "can": sorted(spec.can),
        "pass_environment": list(plan.pass_environment),
        "files": [{"path": f.path, "mode": f"{f.mode:o}", "text": inside(f.path)} for f in files],
        "processes": processes,
        "notes": notes,
        "operations": operations,
    }
    chosen = run.model_copy(update={"backend": job.backend})
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_text(folder / inside(file.path), file.text, file.mode)
    write_run(folder / RESOLVED, chosen)
    write_text(folder / "plan.json", json.dumps(described, indent=2) + "\n")
    typer.echo(f"written: {folder} ({', '.join(sorted(p.name for p in folder.iterdir()))})")
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(how)


_LEFT_OUT = (
    "environment.{0} looks like a secret, so the plan leaves it out; export it in the shell that "
    "submits the job (launch.pass_environment passes it on)"
)
_DRAWN_LATER = (
    "this plan has no token, by which agents recognize each other: anygauge launch draws one when "
    "it submits the job, and then also fills in the variables of launch.pass_environment"
)
_DRAWN_NOW = (
    "job.json holds the token by which the job's agents recognize each other: only you can read "
    "it, and Git ignores it. Variables of pass_environment get their values from the shell that "
    "submits the job"
)


def _without_secrets(request: RunRequest) -> tuple[RunRequest, list[str]]:
    """The request with the names of secret variables where their values were; and these names."""
    job, run = request.job, request.run
    secret = [n for n, value in run.environment.items() if is_secret(n) or holds_secret(value)]
    kept = {n: value for n, value in run.environment.items() if n not in secret}
    names = list(dict.fromkeys([*run.launch.pass_environment, *secret]))
    launch = run.launch.model_copy(update={"pass_environment": names})
    run = run.model_copy(update={"environment": kept, "launch": launch})
    return (
        dataclasses.replace(
            request,
            run=run,
            job=dataclasses.replace(job, environment=kept, launch=launch),
        ),
        secret,
    )


def _under_its_own_name(request: RunRequest) -> RunRequest:
    """The request with the run's own folder, even where one of that name is taken here."""
    job, run = request.job, request.run
    own = (Path(run.output) / run.name).absolute()
    job = dataclasses.replace(
        job,
        run_directory=str(own),
        run_file=str(own / RESOLVED),
        rendezvous=job.rendezvous.replace(job.run_directory, str(own)),
    )
    return dataclasses.replace(request, job=job)
