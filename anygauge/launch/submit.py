"""From a prepared run to ranks: claim its directory, write the run, submit the job and record it.

The order is what a crash at any moment asks for: nobody writes to a folder without its claim; what
ranks read is there before them; a job that runs on by itself can be found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.interface import AnygaugeError, Plan, RunFileError, RunningJob
from anygauge.launch.follow import Signals
from anygauge.launch.foreign import without_launcher
from anygauge.launch.local_run import LocalRun
from anygauge.launch.rank_environment import NodeEnvironment
from anygauge.launch.run_directory import (
    LAUNCHED,
    RUN_FILE,
    clear_for_start,
    find_job,
    lock_folder,
    remove_unaccepted,
    took_no_step,
    write_run,
)
from anygauge.util.files import why_no_folder, write_text

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.launch.request import RunRequest
    from anygauge.training.checkpoints.identity import FinishedRun

_DECIDE = ("model", "adapter", "data", "train")
"""Sections that decide what is trained, and for how long."""


def resume_target(request: RunRequest) -> tuple[bool, FinishedRun | None]:
    """Whether a start resumes the run of its folder, and that run if it is done already.

    For a run and its dry run alike; only where the files are on this machine.

    Raises:
        AnygaugeError: what is to be gone on from is not a checkpoint, or belongs to another run; or
            the folder cannot be written.
    """
    run, folder = request.run, Path(request.job.run_directory)
    resume = run.checkpoint.resume
    if not request.launcher.shared_filesystem:
        return False, None
    if why := why_no_folder(folder):
        raise RunFileError(
            f"output: {why}, so this run cannot have {folder}; name another --output"
        )
    if resume == "never":
        return False, None
    if resume != "auto":
        _check_named(run, Path(resume))
        return False, None
    if not (folder / RUN_FILE).is_file() or took_no_step(folder):
        return False, None
    return True, _finished_before(run, folder)


def _check_named(run: RunFile, checkpoint: Path) -> None:
    """Refuse what ranks would refuse of ``--resume FOLDER``, but for its large files' contents."""
    from anygauge.training.checkpoints.identity import check_same_run, identity_of_file
    from anygauge.training.checkpoints.sound import read_record, refusal_of

    refusal = refusal_of(checkpoint, contents=False)
    if refusal is not None:
        raise AnygaugeError(refusal)
    check_same_run(checkpoint, read_record(checkpoint)["identity"], identity_of_file(run))


def _finished_before(run: RunFile, folder: Path) -> FinishedRun | None:
    """Find a folder's run that is done and had just these settings; reads records, no tensors.

    Where sections differ, the ranks decide: they know the data and the number of steps.

    Raises:
        RunFileError: what the folder holds belongs to another run.
    """
    from anygauge.config.load import load_run_file
    from anygauge.training.checkpoints import identity, sound

    finished = identity.finished_run(folder)
    kept, where = (finished.identity if finished else {}), folder
    if not kept:
        for checkpoint in sound.checkpoints_in(folder):
            if sound.find_defect(checkpoint, contents=False) is None:
                kept, where = sound.read_record(checkpoint)["identity"], checkpoint
                break
    if kept:
        identity.check_same_run(where, kept, identity.identity_of_file(run))
    if finished is None:
        return None
    try:
        before = load_run_file(folder / RUN_FILE)
    except AnygaugeError:
        return None
    same = all(getattr(before, name) == getattr(run, name) for name in _DECIDE)
    return finished if same else None


def refuse_second(folder: Path) -> None:
    """A run that is still going must not have two jobs.

    Raises:
        AnygaugeError: an earlier job still waits or runs.
    """
    if (folder / LAUNCHED).exists() and not (state := find_job(folder).state()).has_ended:
        raise AnygaugeError(
            f"{folder} has a job already: {state.text}. To follow it: anygauge job follow "
            f"{folder}; to end it: anygauge job cancel {folder}"
        )


@contextlib.contextmanager
def submit_job(
    request: RunRequest, plan: Plan, *, resuming: bool
) -> Iterator[tuple[RunningJob, Signals]]:
    """Submit a job; returns it, and the signals that came before it was whole, which end it.

    Signals wait meanwhile, and are taken to the end; so long this process holds the claim of the
    run directory.

    Args:
        plan: what the launcher would do.
        resuming: the start has a folder of its own (`Job.as_attempt`).

    Raises:
        AnygaugeError: another run has the folder, the launcher cannot start the job, or a file
            cannot be written.
    """
    job, spec, folder = request.job, request.launcher, Path(request.job.run_directory)
    unused = not folder.exists() or not any(folder.iterdir())
    refuse_second(folder)
    with lock_folder(folder) as lock, Signals() as signals:
        if spec.shared_filesystem or not (folder / RUN_FILE).exists():
            clear_for_start(folder, job if resuming else None)
        chosen = request.run.model_copy(update={"backend": job.backend})
        write_run(Path(job.run_file), chosen)
        try:
            running = _start_job(request, plan, lock)
        except AnygaugeError:
            if unused and "detach" in spec.can:
                shutil.rmtree(folder, ignore_errors=True)  # nothing was started
            raise
        if running.record is not None:
            record = {"launcher": spec.name, "record": dict(running.record)}
            if not spec.shared_filesystem:
                record["logs"] = shlex.join(plan.operations["logs"])
            write_text(folder / LAUNCHED, json.dumps(record, indent=2) + "\n")
        signals.end_with(running)
        if signals.received:
            running.cancel()
        yield running, signals
        if resuming and running.state().phase == "done":
            remove_unaccepted(folder)  # the run was done before


def _start_job(request: RunRequest, plan: Plan, lock: int) -> RunningJob:
    if request.launcher.remote:
        launcher = request.registry.launcher(request.launcher.name)()
        running: RunningJob = launcher.submit(replace(plan, held=(lock,)))
        return running
    chosen = (request.registry, request.backend)
    environment = NodeEnvironment(request.job, 0, without_launcher(os.environ), chosen)
    return LocalRun(request.job, lock=lock, grace_s=plan.grace_s, environment=environment)
