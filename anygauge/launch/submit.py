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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.interface import AnygaugeError, Plan, RunFileError, RunningJob
from anygauge.launch.environment import NodeEnvironment
from anygauge.launch.follow import deferred
from anygauge.launch.foreign import scrub
from anygauge.launch.local_run import LocalRun
from anygauge.launch.run_directory import (
    RUN_FILE,
    check_named,
    claim,
    clear_for_start,
    finished_before,
    goes_on,
    remove_unaccepted,
    write_run,
)
from anygauge.launch.submitted import LAUNCHED, refuse_second
from anygauge.util.files import why_no_folder, write_text

if TYPE_CHECKING:
    from anygauge.launch.request import RunRequest
    from anygauge.training.checkpoints.identity import Finished


def resume_target(request: RunRequest) -> tuple[bool, Finished | None]:
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
        check_named(run, Path(resume))
        return False, None
    if not goes_on(folder):
        return False, None
    return True, finished_before(run, folder)


@contextlib.contextmanager
def submitted(
    request: RunRequest, plan: Plan, *, resuming: bool
) -> Iterator[tuple[RunningJob, Sequence[int]]]:
    """The job, and the signals that came before it was whole: it was asked to end for them.

    Signals wait meanwhile. This process holds the claim of the run directory until it is left.

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
    with claim(folder) as lock:
        with deferred() as asked:
            if spec.shared_filesystem or not (folder / RUN_FILE).exists():
                clear_for_start(folder, job if resuming else None)
            chosen = request.run.model_copy(update={"backend": job.backend})
            write_run(Path(job.run_file), chosen)
            try:
                running = _started(request, plan, lock)
            except AnygaugeError:
                if unused and "detach" in spec.can:
                    shutil.rmtree(folder, ignore_errors=True)  # nothing was started
                raise
            if running.record is not None:
                record = {"launcher": spec.name, "record": dict(running.record)}
                if not spec.shared_filesystem:
                    record["logs"] = shlex.join(plan.operations["logs"])
                write_text(folder / LAUNCHED, json.dumps(record, indent=2) + "\n")
            if asked:
                running.cancel()
        yield running, asked
        if resuming and running.alive is False and running.wait() == 0:
            remove_unaccepted(folder)  # the run was done before


def _started(request: RunRequest, plan: Plan, lock: int) -> RunningJob:
    if request.launcher.remote:
        launcher = request.registry.launcher(request.launcher.name)()
        running: RunningJob = launcher.submit(replace(plan, held=(lock,)))
        return running
    chosen = (request.registry, request.backend)
    environment = NodeEnvironment(request.job, 0, scrub(os.environ), chosen)
    return LocalRun(request.job, lock=lock, grace_s=plan.grace_s, environment=environment)
