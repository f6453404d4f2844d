"""From a request to the end of its run: prepare it, submit the job and follow it.

For the command and for Python programs alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anygauge.interface import UsageError
from anygauge.launch.follow import Ending, follow
from anygauge.launch.prepare import prepare_run
from anygauge.launch.request import RunRequest, render_plan
from anygauge.launch.submit import resume_target, submit_job
from anygauge.util.console import Console


def start(
    request: RunRequest,
    *,
    quiet: bool,
    detach: bool = False,
    plan_memory: bool | None = None,
    force: bool = False,
) -> Ending:
    """Write the resolved run, submit the job and follow it; returns how it ended.

    Args:
        detach: leave once it is submitted.
        plan_memory: always, or never; None: where it may be short.
        force: start it even where it cannot fit.

    Raises:
        AnygaugeError: it is refused before ranks start.
    """
    spec, folder = request.launcher, Path(request.job.run_directory)
    if detach and "detach" not in spec.can:
        raise UsageError(
            f"--detach: a job of the {spec.name} launcher ends with the command that started it; "
            "leave --detach out"
        )
    console, errors = Console(), Console(stderr=True)
    # Until its ranks accept it, a start changes nothing of the run that it resumes.
    resuming, finished = resume_target(request)
    if finished is not None:
        console.print(finished.describe())
        return Ending()
    if resuming:
        request = replace(request, job=request.job.as_attempt())
    render_plan(request)  # what a launcher refuses is refused before the checks, which take longer
    request, found, expected = prepare_run(request, quiet=quiet, plan=plan_memory, force=force)
    plan = render_plan(request)
    for note in (*plan.notes, *found.notes, *filter(None, [expected.note])):
        errors.print(f"note: {note}")
    if not quiet:
        console.print(f"run: {folder}", soft_wrap=True)
        for line in expected.lines:
            console.print(line)
    with submit_job(request, plan, resuming=resuming) as (running, signals):
        if not detach or signals.received:
            return follow(running, run_directory=folder, quiet=quiet, signals=signals)
        if not quiet:
            console.print(f"{running.state().text}; to follow it: anygauge job follow {folder}")
    return Ending(state="left")
